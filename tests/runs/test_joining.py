"""Executions that are written together: the records are those of one at a time."""

import contextlib

import jax
import numpy as np
import optax
import pytest
from made_parts import chosen, execution
from small_runs import X, Y, assert_same_records, make_trainer, train

import tailrace as tr
from tailrace.records.records import Records
from tailrace.runs.tables import executions
from tailrace.runs.tables.executions import join_executions


class Keep:
    """A sink that keeps executions as they come."""

    def __init__(self):
        self.executions = []

    def fitting(self, info, goes_on=False):
        return contextlib.nullcontext()

    def compilation(self, row):
        pass

    def execution(self, done):
        self.executions.append(done)

    def stored(self):
        return {}


def records_of(executions):
    records = Records()
    for done in executions:
        for part in done.parts:
            records.add(part)
    return records


TAPS = [
    tr.Tap("grad/*"),
    tr.Tap("updated/first", reduce="tensor", mode="final"),
    tr.Tap("loss", mode="sum", reduce="tensor"),
    tr.Tap("activation/hidden", reduce="norm", mode="final"),
    tr.Tap("grad/*", reduce="histogram", mode=tr.every(2)),
    tr.Tap("param/*", reduce=lambda v: {"sum": v.sum(), "ends": (v.max(), [v.min()])}),
]


def test_records_are_equal(monkeypatch):
    sink = Keep()
    trainer = make_trainer(None, TAPS, steps_per_execution=4, accumulation=2, replicas=2)
    trainer._journal.sink = sink
    train(trainer, 22)
    assert [done.steps for done in sink.executions] == [4, 4, 4, 4, 4, 2]
    for large in (-1, 100, 1 << 30):  # statistics merged first: all, those of 4 steps, none
        monkeypatch.setattr(executions, "LARGE", large)
        joined = list(join_executions(sink.executions))
        assert [(done.first_step, done.steps) for done in joined] == [(0, 22)]
        assert_same_records(records_of(sink.executions), records_of(joined))
        assert_same_records(records_of(joined), trainer.records)
        for name, values in joined[0].scalars.items():
            each = [done.scalars[name] for done in sink.executions]
            np.testing.assert_array_equal(values, np.concatenate(each))


def test_only_what_follows_is_joined(monkeypatch):
    one, other = chosen("grad/a"), chosen("grad/b")
    done = [
        execution(0, 3, [one]),
        execution(3, 2, [one]),
        execution(5, 2, [other]),
        execution(7, 2, [one]),
        execution(20, 2, [one]),
    ]
    starts = [(part.first_step, part.steps) for part in join_executions(done)]
    assert starts == [(0, 5), (5, 2), (7, 2), (20, 2)]
    monkeypatch.setattr(executions, "MOST_BYTES", 0)
    assert [part.steps for part in join_executions(done)] == [3, 2, 2, 2, 2]
    assert list(join_executions([])) == []


def test_branches_and_stops(tmp_path):
    """Values that are made only sometimes, and a stop after which nothing counts."""

    def loss_fn(params, x, y):
        with jax.named_scope("seldom"):
            w = jax.lax.cond(y[0] > 0, lambda w: w * 2, lambda w: w, params["w"])
        return ((x @ w - y) ** 2).mean()

    def fitted(run_dir):
        taps = [tr.Tap("activation/seldom*", reduce="norm"), tr.stop_on_nonfinite("loss")]
        trainer = tr.Trainer(
            loss_fn,
            optax.sgd(0.01),
            {"w": np.ones(6, np.float32)},
            observe=taps,
            run_dir=run_dir,
            steps_per_execution=4,
        )
        bad = X.copy()
        bad[8 * 13, 0] = np.inf
        with pytest.raises(tr.errors.NonFiniteError):
            trainer.fit(tr.batches((bad, Y), 8), steps=20, progress=False)
        return trainer.records

    assert_same_records(fitted(None), fitted(tmp_path))
