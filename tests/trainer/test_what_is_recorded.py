"""Whatever breaks a fit off: what was trained is what is recorded, everywhere, by its number."""

import contextlib
import csv
import importlib.util
import random
import shutil
from collections import defaultdict

import numpy as np
import optax
import pytest
from recorded_script import (
    EVERY,
    TAPS,
    Acts,
    Killed,
    Plain,
    Watch,
    drawn,
    elements_of,
    evaluated,
    loss_fn,
    put,
)

import tailrace as tr
from tailrace.runs import write_queue
from tailrace.trainer.checkpoints.writer import CheckpointWriter

BOARD = all(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX"))

ENDS = (tr.errors.NonFiniteError, tr.errors.DataError, ArithmeticError)


class Life:
    """A process that runs a script: killed, it leaves a directory to the next."""

    def __init__(self, script, folder, done, sets, boards):
        self.script, self.folder, self.done, self.sets = script, folder, done, sets
        guards = {
            "stop": [tr.stop_on_nonfinite()],
            "skip": [tr.stop_on_nonfinite(on_nonfinite="skip", limit=script.limit)],
        }
        self.trainer = tr.Trainer(
            loss_fn,
            optax.sgd(-1.0),
            np.float32(0),
            observe=[*TAPS, *guards.get(script.guard, [])],
            loss_scale=1.0 if script.guard == "scale" else None,
            steps_per_execution=script.length,
            eval_fn=evaluated,
            run_dir=folder / "run",
        )
        self.plain = Plain(script.guard)
        self.kept = tr.Checkpoint(folder / "kept", every=2, keep=100) if script.keeps else None
        self.csv = self.board = None
        self.failed, self.told, self.boards = False, {}, boards

    def run(self):
        """All fits; whether it was killed, or got a signal."""
        for number, fit in enumerate(self.script.fits):
            self._before(fit, number)
            self.watch, self.before = Watch(), self.trainer.executions
            try:
                self._fit(fit, number)
            except (KeyboardInterrupt, Killed) as error:
                if isinstance(error, KeyboardInterrupt):
                    self._trained(fit, number)
                return True
            except ENDS:
                self.failed = True
            self._trained(fit, number)
        return False

    def _before(self, fit, number):
        trainer, plain = self.trainer, self.plain
        if fit.before == "put":
            put(trainer, 1000.0 + number)
            plain.put(1000.0 + number)
        back = plain.first + int(fit.back * (plain.step - plain.first))
        last = self.script.fits[number - 1]
        if fit.before == "rewind" and not self.sets[number - 1] and last.before != "put":
            proved = trainer.rewind(back, elements_of(last), checkpoint=self.kept)
            assert proved is not False
            plain.go_back(back)
        if fit.before == "restore" and self.kept is not None:
            found = sorted((self.folder / "kept" / f"fit-{number - 1}").glob("step-*"))
            found = found[int(fit.back * len(found))]
            trainer.restore(found)
            plain.go_back(trainer.step)

    def _fit(self, fit, number):
        first = self.trainer.step
        told = [self.watch, self._logs(), *self._boards()] if fit.listens else []
        if fit.best is not None:
            told.append(tr.callbacks.EarlyStopping(patience=2, restore_best=fit.best))
        if fit.acts:
            place = random.Random(number).randrange(len(told) + 1)
            told.insert(place, self._acts(fit, first, number))
        more = {"validation_data": [(np.zeros(2, np.float32),) * 2]} if fit.validates else {}
        if fit.validates:
            more["validation_every"] = fit.validates
        self.trainer.fit(
            elements_of(fit),
            **fit.call,
            **more,
            callbacks=told,
            checkpoint=self.kept,
            progress=False,
        )

    def _acts(self, fit, first, number):
        # A script is started again from its beginning: its failures would come again, and its later
        # fits not.
        copy = None if self.failed else self._copy
        return Acts(fit, first, self.done, self.sets[number], copy)

    def _logs(self):
        self.csv = self.csv or tr.callbacks.CSVLogger(self.folder / "log.csv")
        return self.csv

    def _boards(self):
        if not self.boards:
            return []
        self.board = self.board or tr.callbacks.TensorBoard(self.folder / "events")
        return [self.board]

    def _copy(self):
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        shutil.copytree(
            self.folder, self.folder / "copy", ignore=shutil.ignore_patterns("copy", "lock")
        )

    # -- the comparison ---------------------------------------------------------------------------

    def _trained(self, fit, number):
        """Compare all that is recorded with the plain loop."""
        trainer, plain = self.trainer, self.plain
        history = trainer.history
        plain.train(fit, len(history), self.sets[number])
        same(zip(history.steps, history.loss, strict=True), plain.of_fit(plain.losses))
        if "skipped" in history:
            same(zip(history.steps, history["skipped"], strict=True), plain.of_fit(plain.skipped))
        if trainer.executions > self.before:  # not where the fit was finished by an earlier process
            self._records(trainer.records, plain.of_fit(plain.elements))
        if trainer.executions > self.before:
            self._run_directory()
        if fit.listens:
            self._callbacks()
        if trainer.step != plain.step:
            assert fit.best
            assert trainer.step < plain.step
            plain.go_back(trainer.step)
        assert float(trainer.params) == plain.value

    def _callbacks(self):
        """What callbacks were told, and the files of loggers."""
        expected = self.plain.of_fit(self.plain.losses)
        same(self.watch.steps, expected)
        covered = [s for first, count in self.watch.executions for s in range(first, first + count)]
        assert covered == list(expected)
        self.told = {s: v for s, v in self.told.items() if s < self.plain.first} | expected
        if self.trainer.executions == self.before:
            return  # finished by an earlier process, whose files have later fits too
        with contextlib.suppress(FileNotFoundError), (self.folder / "log.csv").open() as file:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
            # After steps that it was not told of, the file begins again.
            same(rows, {s: v for s, v in self.told.items() if rows and s >= rows[0][0]})
            assert len(rows) >= len(expected)
        if self.boards and self.told:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            events = EventAccumulator(str(self.folder / "events"), {"scalars": 0}).Reload()
            same([(one.step, one.value) for one in events.Scalars("loss")], self.told)

    def _run_directory(self):
        """What is on disk, of all fits."""
        plain, run = self.plain, tr.open_run(self.folder / "run")
        same(zip(run.history.steps, run.history.loss, strict=True), plain.losses)
        # Going back into an execution cuts off its sum.
        self._records(run.records, plain.elements, sums=False)
        first, steps = run.executions["first_step"], run.executions["steps"]
        # One that a fit went back into counts up to there.
        ends = np.minimum(first + steps, [*first[1:], first[-1] + steps[-1]]) if len(first) else []
        covered = [s for a, end in zip(first, ends, strict=True) for s in range(a, end)]
        assert covered == list(plain.losses)
        validated = run.history.validated.tolist()
        assert validated == sorted(set(validated))
        for step, value in zip(
            validated, run.history["val_loss"] if validated else (), strict=True
        ):
            assert value == (plain.ends[step] - 5) ** 2

    def _records(self, records, elements, sums=True):
        if not elements:
            return
        record = records["input/0", "tensor"]
        same(zip(record.steps, record.values[:, 0], strict=True), elements)
        due = {s: v for s, v in elements.items() if (s + 1) % EVERY == 0}
        if due:
            record = records["input/0", "norm"]
            same(
                zip(record.steps, record.values, strict=True),
                {s: np.float32(v * 2**0.5) for s, v in due.items()},
                1e-5,
            )
        record = records["grad/params", "tensor"]
        if sums and not any(map(np.isnan, elements.values())):
            assert record.values.sum() == len(elements)
        assert set(record.steps.tolist()) <= set(elements)


def same(found, expected, rtol=0.0):
    """Compare values by step: each once, in order."""
    found = [(int(step), float(value)) for step, value in found]
    assert [step for step, _ in found] == list(expected)
    np.testing.assert_allclose([v for _, v in found], [float(v) for v in expected.values()], rtol)


def check(seed, folder, monkeypatch, boards=BOARD):
    script, done, sets = drawn(seed), set(), defaultdict(dict)
    save = CheckpointWriter.save

    def whole(self, *args, **kwargs):
        save(self, *args, **kwargs)
        self.wait(last=True)

    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 1e9)
    monkeypatch.setattr(CheckpointWriter, "save", whole)
    here = folder / "here"
    here.mkdir()
    for _ in range(20):
        if not Life(script, here, done, sets, boards).run():
            return
        if (here / "copy").exists():
            (here / "copy").rename(folder / "copy")
            shutil.rmtree(here)
            (folder / "copy").rename(here)
    raise AssertionError("the script does not end")


@pytest.mark.parametrize("seed", [37, 3, 4, 12, 16, 18, 29, 45])
def test_what_was_trained_is_what_is_recorded(tmp_path, monkeypatch, seed):
    check(seed, tmp_path, monkeypatch, boards=False)  # its reader takes seconds to load


@pytest.mark.parametrize("seed", range(50))
def test_fifty_scripts(tmp_path, monkeypatch, seed):
    check(seed, tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(50, 500))
def test_hundreds_of_scripts(tmp_path, monkeypatch, seed):
    check(seed, tmp_path, monkeypatch)
