"""What a replay found: the records of the step, and whether it is the step that happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tailrace.base.messages import counted
from tailrace.records.fingerprints import GROUPS
from tailrace.records.records import Record, Records

SHOWN = 10
"""How many differences are printed."""

FORM = "form of elements"
"""The name of the dtypes and shapes of elements, where they are compared."""

NEVER_COMPARED = (
    "values that taps alone see, such as activations",
    "arrays of aux that a history does not have",
    "values of log= and of validations",
)
"""What a training keeps no record of that a replay could be compared with."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs from the recorded one.

    Attributes:
        step: the step, or the last one of the execution.
        what: "loss", the name of another scalar of the step (of aux), the group of tensors whose
            fingerprint differs, or "form of elements".
        recorded: the value that the training recorded; None if there is none.
        replayed: the value in the replay; None if there is none.
        part: the microbatch and replica whose value this is; empty for the mean of the step.
    """

    step: int
    what: str
    recorded: Any
    replayed: Any
    part: str = ""

    @property
    def is_fingerprint(self) -> bool:
        """Whether it is a fingerprint that differs, not a scalar."""
        return isinstance(self.recorded, int)

    def __str__(self) -> str:
        if not self.is_fingerprint:
            what = f"{self.what} of {self.part}:" if self.part else self.what
            was, now = ("nothing" if v is None else v for v in (self.recorded, self.replayed))
            return f"step {self.step}: {what} {was} recorded, {now} replayed"
        marks = f"{self.recorded:016x} recorded, {self.replayed:016x} replayed"
        return f"after step {self.step}: {self.what} {marks}"


class Replay(Mapping[Any, Record]):
    """A replayed step: the records of its taps, by name, and whether it provably equals the original.

    As a condition it is true if it is proved, whatever was observed.

    Attributes:
        step: its index.
        loss: its loss.
        proved: True if everything that was recorded is equal bit for bit; False if something
            differs; None if nothing was recorded.
        compared: the names of what was compared.
        not_compared: what was not, and may differ although the replay is proved.
        differences: what differs, the earliest first.
        evidence: a description of what was compared.
        started_at: the step of the checkpoint that the replay started from.
        changed: the versions, flags and devices that have changed since, which are the likely causes
            of a difference.
    """

    def __init__(
        self,
        step: int,
        loss: float,
        records: Records,
        differences: list[Difference],
        compared: list[str],
        started_at: int,
        changed: Sequence[str] = (),
        source: str = "checkpoint",
        nothing_there: Collection[str] = (),
    ) -> None:
        self.step, self.loss, self.started_at = step, loss, started_at
        self._records, self._source = records, source
        self.differences, self.changed = differences, list(changed)
        self.compared = list(dict.fromkeys(compared))
        could = ["loss", *(f"fingerprint of {group}" for group in GROUPS), FORM]
        known = {*self.compared, *(f"fingerprint of {group}" for group in nothing_there)}
        self.not_compared = [*(name for name in could if name not in known), *NEVER_COMPARED]
        self.evidence = ", ".join(self.compared)
        self.proved = not differences if compared else None

    def __getitem__(self, name: str | tuple[str, str]) -> Record:
        return self._records[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __bool__(self) -> bool:
        # Not the number of records: `assert trainer.replay(...)` must not pass without proof.
        return self.proved is True

    def __str__(self) -> str:
        nothing = "nothing was recorded of it"
        if self._source == "bundle":
            nothing = "a bundle has no results to compare with"
        said = {
            True: f"proved: equal to what was recorded, bit for bit ({self.evidence})",
            False: "NOT PROVED: it differs from what was recorded",
            None: f"not proved: {nothing}",
        }[self.proved]
        lines = [
            f"step {self.step}, loss {self.loss:.7g}, from the {self._source} of {self.started_at}"
        ]
        lines += [said, *(f"  {one}" for one in self.differences[:SHOWN])]
        if len(self.differences) > SHOWN:
            lines.append(f"  and {counted(len(self.differences) - SHOWN, 'more difference')}")
        if any(one.what == "elements" and one.is_fingerprint for one in self.differences):
            lines.append(
                "the elements differ: the dataset or its order is not that of the training"
            )
        elif self.differences and "fingerprint of elements" in self.evidence:
            lines.append(
                "the elements are equal: the model, optimizer, options or machine differ, or a "
                "callback changed the state"
            )
        if self.proved:
            lines.append(f"not compared: {', '.join(self.not_compared)}")
        else:
            lines += [f"  changed since: {one}" for one in self.changed]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Replay(step {self.step}, proved={self.proved}, {len(self)} records)"
