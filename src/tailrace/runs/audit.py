"""`tailrace audit`: whether every element of the data was consumed once, in order.

Each execution records which elements it consumed, by the count of its data source. An audit checks that
within a pass over the dataset each execution begins where the previous one ended. With fingerprints it
also compares contents: elements consumed after a resume must not have been consumed before, and, if the
dataset is given, every element is compared with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tailrace.base.messages import counted
from tailrace.errors import OptionError, RunError
from tailrace.runs.audit_contents import changed_contents
from tailrace.runs.interventions import BACK
from tailrace.runs.reader import Run
from tailrace.runs.tables.tables import READING


@dataclasses.dataclass(frozen=True)
class Row:
    """One execution: its steps and the elements it consumed."""

    first_step: int
    steps: int
    fit: int
    epoch: int
    first: int
    count: int
    resumed: int

    def begins_after(self, before: Row | None) -> bool:
        """Whether it is the first execution of a fit.

        It may begin at an earlier step than the last one, if the trainer went back to its best state.
        """
        if before is None or before.fit != self.fit:
            return True
        went_back = self.first_step < before.first_step + before.steps
        # `fit` is the first step of the fit: a second fit from the same step has the same number.
        return went_back and self.first_step == self.fit and not self.resumed

    @property
    def end(self) -> int:
        """The index of the element after its last."""
        return self.first + self.count

    def cut(self, step: int) -> Row:
        """The part of it that counts after training went back to a step inside it."""
        steps = min(self.steps, step - self.first_step)
        # Every step of an execution takes the same number of elements.
        return dataclasses.replace(self, steps=steps, count=self.count // self.steps * steps)

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.first_step + self.steps - 1}"


@dataclasses.dataclass
class Audit:
    """The result of an audit.

    Attributes:
        executions: the number of executions checked.
        resumes: the number of times a process resumed the work of another.
        elements: the number of consumed elements.
        passes: for each pass over the data, in order: its fit, epoch, first element, end.
        findings: sentences about gaps, repeats and disorder; empty if there are none.
        compared: the number of elements compared with the dataset. If it is 0, an element that the
            dataset itself left out is not noticed.
        rewinds: where training went back, and why.
        notes: what is worth a look, and may be meant.
    """

    executions: int = 0
    resumes: int = 0
    elements: int = 0
    passes: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    findings: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0
    rewinds: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every element was consumed once, in order; see `compared` for which elements."""
        return not self.findings

    def __str__(self) -> str:
        lines = [
            f"{counted(self.executions, 'execution')} consumed {counted(self.elements, 'element')} in "
            f"{counted(len(self.passes), 'pass', 'passes')} over the data; "
            f"{counted(self.resumes, 'resume')}"
        ]
        for fit, epoch, first, end in self.passes[:20]:
            lines.append(f"  fit of step {fit}, epoch {epoch}: elements {first} to {end - 1}")
        if len(self.passes) > 20:
            lines.append(f"  and {len(self.passes) - 20} more")
        lines += [f"  went back {text}" for text in self.rewinds]
        if self.compared:
            were = "was" if self.compared == 1 else "were"
            lines.append(f"{counted(self.compared, 'element')} {were} compared with the dataset")
        lines += [f"note: {text}" for text in self.notes[:20]]
        lines += [f"WRONG: {text}" for text in self.findings[:50]]
        if self.is_clean:
            what = "every element" if self.compared else "every element that the dataset delivered"
            lines.append(f"{what} was consumed once, in order")
        else:
            lines.append(counted(len(self.findings), "finding"))
        if not self.compared:
            lines.append(
                "not compared with the dataset: elements are those that it delivered, by their count; "
                "whether it skipped or changed some itself is not seen. With tr.Trainer(..., "
                "fingerprint=True), tailrace audit RUN MODULE:FUNCTION compares them"
            )
        return "\n".join(lines)


def audit(run: Run, dataset: object = None, fit: int | None = None) -> Audit:
    """Check which elements the executions of a run consumed.

    Args:
        run: the run.
        dataset: the training data, to compare contents with; needs `fingerprint=True`.
        fit: the first step of the fit that it is the training data of; None for all fits.
    """
    rows = list(_rows(run))
    fits = sorted({row.fit for row in rows})
    if fit is not None and fit not in fits:
        raise OptionError(
            f"fit is the first step of a fit of the run, one of {fits}. Received: fit={fit}."
        )
    rewinds = [one for one in run.interventions if one["kind"] in BACK]
    found = Audit(len(rows), sum(row.resumed for row in rows), sum(row.count for row in rows))
    found.rewinds = [f"to step {one.get('step')}: {one.get('reason')}" for one in rewinds]
    for before, row in zip([None, *rows], rows, strict=False):
        _check_step(before, row, found)
        _check_elements(before, row, found)
    _check_epochs(found)
    digests = run.elements
    if digests is not None:
        flat = digests.reshape(len(digests), -1)
        # In order, not by step: a trainer that went back has computed some steps twice.
        ends = np.cumsum([row.steps for row in rows])
        contents = [flat[end - row.steps : end] for end, row in zip(ends, rows, strict=True)]
        _check_contents(rows, contents, found)
        _note_equal_orders(rows, contents, found)
        if dataset is not None:
            _compare(rows, contents, dataset, fit, found)
    elif dataset is not None:
        raise RunError(
            f"To compare a dataset with what was consumed, the run needs digests of elements: "
            f"tr.Trainer(..., fingerprint=True). {str(run.directory)!r} has none."
        )
    return found


def _rows(run: Run) -> Iterator[Row]:
    columns = run.executions
    if not len(run.history.steps):  # killed before an execution had ended
        return
    if "first_element" not in columns:
        raise RunError(
            f"An audit reads which elements each execution consumed, and {str(run.directory)!r} does "
            f"not say it: it was written by an earlier version, or its elements were handed over "
            f"(Keras, PyTorch). Train with tr.Trainer(..., run_dir=...)."
        )
    names = ("first_step", "steps", *READING)
    rows = [Row(*map(int, values)) for values in zip(*(columns[n] for n in names), strict=True)]
    back = {one.get("step") for one in run.interventions if one["kind"] in BACK}
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if after is not None and after.first_step in back:
            # A rewind may go back into the middle of an execution: what came after is void, and
            # will be consumed again.
            row = row.cut(after.first_step)
        if row.count:
            yield row


def _check_step(before: Row | None, row: Row, found: Audit) -> None:
    due = before.first_step + before.steps if before is not None else row.first_step
    if row.first_step > due or (row.first_step < due and not row.begins_after(before)):
        what = "missing" if row.first_step > due else "recorded twice"
        low, high = sorted((row.first_step, due))
        found.findings.append(f"steps {low} to {high - 1} are {what}")


def _check_elements(before: Row | None, row: Row, found: Audit) -> None:
    same_fit = not row.begins_after(before)
    if before is None or not same_fit or row.epoch != before.epoch:
        _check_start(before if same_fit else None, row, found)
        found.passes.append((row.fit, row.epoch, row.first, row.end))
        return
    # Per step, without a division: executions have different lengths.
    if row.count * before.steps != before.count * row.steps:
        found.findings.append(f"{row} consumed {row.count} elements, {before} {before.count}")
    where = f"between step {row.first_step - 1} and step {row.first_step}"
    where += ", where a process resumed" if row.resumed else ""
    if row.first > before.end:
        skipped = f"elements {before.end} to {row.first - 1}"
        found.findings.append(f"epoch {row.epoch}: {skipped} were not consumed, {where}")
    elif row.first < before.end:
        again = f"elements {row.first} to {min(before.end, row.end) - 1}"
        found.findings.append(f"epoch {row.epoch}: {again} were consumed again, {where}")
    fit, epoch, first, end = found.passes[-1]
    found.passes[-1] = (fit, epoch, first, max(end, row.end))


def _check_start(before: Row | None, row: Row, found: Audit) -> None:
    """A pass begins at element 0, except that a one-shot iterator may continue in a new fit."""
    if before is not None and row.epoch != before.epoch + 1:
        found.findings.append(f"epoch {row.epoch} follows epoch {before.epoch}")
    # Not in the first pass of a fit: a one-shot iterator continues where an earlier fit left it.
    if before is not None and row.first:
        found.findings.append(
            f"epoch {row.epoch}: elements 0 to {row.first - 1} were not consumed: {row} begins with "
            f"element {row.first}"
        )


def _check_epochs(found: Audit) -> None:
    """All passes of a fit except its last have the same length."""
    fits: dict[int, list[tuple[int, int]]] = {}
    for fit, epoch, _, end in found.passes:
        fits.setdefault(fit, []).append((epoch, end))
    for passes in fits.values():
        # The last pass of a fit ends where its steps do.
        whole = passes[:-1]
        longest = max((end for _, end in passes), default=0)
        for epoch, end in whole:
            if end != longest:
                found.findings.append(
                    f"epoch {epoch} ended after element {end - 1}, another one after {longest - 1}"
                )


def _check_contents(rows: list[Row], contents: list[np.ndarray], found: Audit) -> None:
    """After a resume, no element may have the content of one that was consumed before."""
    seen: dict[int, int] = {}
    distinct = True
    for before, row, digests in zip([None, *rows], rows, contents, strict=False):
        if row.begins_after(before) or before is None or row.epoch != before.epoch:
            seen, distinct = {}, True
        for step, of_step in enumerate(digests, start=row.first_step):
            for digest in map(int, of_step):
                # Only after a resume, and only in data whose elements all differ.
                if digest in seen and row.resumed and distinct:
                    found.findings.append(
                        f"step {step}, the first execution after a resume, consumed the "
                        f"content that step {seen[digest]} had consumed: the dataset resumed elsewhere"
                    )
                    return
                distinct &= digest not in seen  # data with equal elements proves nothing
                seen[digest] = step


def _note_equal_orders(rows: list[Row], contents: list[np.ndarray], found: Audit) -> None:
    """Note where a pass has the order of the one before: a loader that is to shuffle does not."""
    before: tuple[int | None, list[int]] = (None, [])
    alike: dict[int, list[int]] = {}
    for several in _passes(rows, contents):
        fit, epoch = several[0][0].fit, several[0][0].epoch
        order = [digest for row, digests in several for digest, _ in _of_row(row, digests)]
        shared = min(len(order), len(before[1]))
        # Data whose elements are all equal has no order; of one element nothing follows.
        distinct = len(set(order[:shared])) > 1 and before[0] == fit
        if distinct and order[:shared] == before[1][:shared]:
            alike.setdefault(fit, []).append(epoch)
        before = (fit, order)
    for fit, epochs in alike.items():
        count = sum(one == fit for one, *_ in found.passes)
        which = (
            "every epoch"
            if len(epochs) == count - 1
            else f"epochs {', '.join(f'{epoch - 1} and {epoch}' for epoch in epochs[:5])}"
        )
        found.notes.append(
            f"{which} of the fit of step {fit} consumed the same elements in the same order, as data "
            f"does that is not shuffled"
        )


def _passes(rows: list[Row], contents: list[np.ndarray]) -> list[list[tuple[Row, np.ndarray]]]:
    """The executions of each pass over the data, with the digests of their elements."""
    passes: list[list[tuple[Row, np.ndarray]]] = []
    for before, row, digests in zip([None, *rows], rows, contents, strict=False):
        if row.begins_after(before) or before is None or row.epoch != before.epoch:
            passes.append([])
        passes[-1].append((row, digests))
    return passes


def _compare(
    rows: list[Row],
    contents: list[np.ndarray],
    dataset: object,
    fit: int | None,
    found: Audit,
) -> None:
    """Compare every element of a fit, or of all fits, with the dataset."""
    for several in _passes(rows, contents):
        epoch = several[0][0].epoch
        if fit is not None and several[0][0].fit != fit:
            continue
        consumed = {
            row.first + number: (int(digest), step)
            for row, digests in several
            for number, (digest, step) in enumerate(_of_row(row, digests))
        }
        found.compared += len(consumed)
        found.findings += changed_contents(epoch, consumed, dataset)


def _of_row(row: Row, digests: np.ndarray) -> Iterator[tuple[int, int]]:
    for step, of_step in enumerate(digests, start=row.first_step):
        for digest in of_step:
            yield int(digest), step
