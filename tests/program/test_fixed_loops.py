"""On an accelerator a loop of fixed length takes over, compiled beside the training: same results.

The tests run on a CPU that is called an accelerator. There, XLA may round an iteration outside of a
loop differently; on a GPU it does not.
"""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_scan import ROWS, loss_fn, params, plain

import tailrace as tr
from machine import PLATFORM
from oracles import assert_bits_equal, assert_close
from tailrace.program.running.executable import Executable
from tailrace.program.running.fixed_loops import wait_for_compilations
from tailrace.trainer.fitting.pace import Pace
from waits import LIMIT_S, wait_until

LENGTH = 8


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Steps of these tests are short, and their training shorter than its compilation."""
    monkeypatch.setattr("tailrace.devices.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_WORTH", 0.0)
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_BELOW_S", 60.0)
    yield
    wait_for_compilations()  # not for another platform, beside the next test


def trainer_of(**options):
    return tr.Trainer(
        loss_fn, optax.sgd(0.05, momentum=0.9), params(), steps_per_execution=LENGTH, **options
    )


def pipeline_of(**options):
    """Two stages of the same model, four microbatches a step."""
    stages = [lambda w, x: jnp.tanh(x @ w), lambda w, h: jnp.mean((h - w) ** 2)]
    return tr.Trainer(
        tr.Pipeline(stages, accumulation=4, device_mapping=[0, 1]),
        optax.sgd(0.05, momentum=0.9),
        [params()["a"], params()["b"]],
        steps_per_execution=LENGTH,
        **options,
    )


def began(trainer, rows=ROWS):
    """Train three executions, and wait for the loop of fixed length; the losses."""
    losses = trainer.fit(iter(rows), steps=24).loss
    trainer.engine.runner.fixed.compiling.result(LIMIT_S)
    return losses


def in_fixed_loop(trainer):
    """Train 24 steps, wait for the loop of fixed length, and train 72 more; the losses."""
    return np.concatenate([began(trainer), trainer.fit(iter(ROWS[24:]), steps=72).loss])


def causes(trainer):
    return [one.cause for one in trainer.compilations]


def test_it_takes_over_with_the_same_bits():
    trainer = trainer_of()
    losses = in_fixed_loop(trainer)
    assert causes(trainer)[1:] == ["a loop of exactly 8 steps, which is faster"]
    w, expected, _ = plain(96)
    assert_bits_equal(losses, expected)
    assert_bits_equal(trainer.params, w)


def test_a_shorter_rest_runs_in_the_first_program():
    trainer = trainer_of()
    in_fixed_loop(trainer)
    first = trainer.engine.executions
    trainer.fit(iter(ROWS[:13]), steps=13)
    assert (trainer.engine.executions - first, len(trainer.compilations)) == (2, 2)


@pytest.mark.parametrize("period", [1, 2, 4, 8])
def test_periodic_taps(period):
    taps = [tr.Tap("grad/*", mode=tr.every(period), reduce="tensor"), tr.Tap("loss")]
    trainer = trainer_of(observe=taps)
    losses = in_fixed_loop(trainer)
    w, expected, grads = plain(96)
    assert_close(losses, expected)
    assert_close(trainer.params, w)
    found = trainer.records["grad/a"]
    assert found.steps.tolist() == [s for s in range(24, 96) if (s + 1) % period == 0]
    assert_close(found.values, grads["a"][found.steps])


@pytest.mark.parametrize("mode", ["sum", "final"])
def test_collected_taps(mode):
    trainer = trainer_of(observe=[tr.Tap("grad/a", mode=mode, reduce="tensor")])
    in_fixed_loop(trainer)
    grads = plain(96)[2]["a"][24:].reshape(9, LENGTH, 3, 2)
    expected = grads.sum(axis=1) if mode == "sum" else grads[:, -1]
    assert_close(trainer.records["grad/a"].values, expected)


def test_fingerprints_are_those_of_the_other_loop(monkeypatch):
    """Of the state, the gradients of the last step, the losses and the elements."""
    fixed, counted = trainer_of(fingerprint=True), trainer_of(fingerprint=True)
    in_fixed_loop(fixed)
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_BELOW_S", 0.0)
    counted.fit(iter(ROWS), steps=24)
    counted.fit(iter(ROWS[24:]), steps=72)
    assert len(counted.compilations) == 1
    found, expected = fixed.history.fingerprints, counted.history.fingerprints
    assert_close(fixed.params, counted.params)
    assert_close(fixed.history.loss, counted.history.loss)
    assert len(found["gradients"]) == 9
    # On a CPU the last step, outside of the loop, may be rounded differently.
    names = ["first_step", "steps", "elements"] if PLATFORM == "cpu" else list(expected)
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("taps", [(), (tr.Tap("grad/*", mode=tr.every(4), reduce="tensor"),)])
@pytest.mark.parametrize("kind", ["replicas", "accumulation", "pipeline"])
def test_several_devices_and_microbatches(monkeypatch, kind, taps):
    def trainer():
        options = {"observe": taps, "fingerprint": True}
        return pipeline_of(**options) if kind == "pipeline" else trainer_of(**options, **{kind: 2})

    rows = np.concatenate([ROWS, ROWS])
    fixed = trainer()
    began(fixed, rows)
    losses = fixed.fit(iter(rows), steps=40).loss
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_BELOW_S", 0.0)
    counted = trainer()
    counted.fit(iter(rows), steps=24)
    assert_close(losses, counted.fit(iter(rows), steps=40).loss)
    assert (len(fixed.compilations), len(counted.compilations)) == (2, 1)
    assert_close(fixed.params, counted.params)
    for name, found in fixed.records.items():
        assert_close(found.values, counted.records[name].values)
        np.testing.assert_array_equal(found.steps, counted.records[name].steps)


@pytest.mark.parametrize("bad", [24, 40, 45, 47, 95])
def test_a_guard_stops_before_the_bad_step(bad):
    """The state before its execution is kept, though the loop overwrites its carry."""
    trainer = trainer_of(observe=[tr.stop_on_nonfinite(["loss", "grad/*"])])
    began(trainer)
    rows = ROWS.copy()
    rows[bad, 1] = np.nan
    with pytest.raises(tr.errors.NonFiniteError, match=f"step {bad}"):
        trainer.fit(iter(rows[24:]), steps=72)
    assert trainer.step == bad
    assert_close(trainer.params, plain(bad)[0])


def test_a_guard_that_skips():
    trainer = trainer_of(observe=[tr.stop_on_nonfinite(["loss"], on_nonfinite="skip", limit=3)])
    rows = ROWS.copy()
    rows[[28, 47]] = np.nan
    began(trainer, rows)
    trainer.fit(iter(rows[24:]), steps=72)
    assert_close(trainer.params, plain(94, np.delete(rows, [28, 47], axis=0))[0])


def test_it_is_not_compiled_for_a_short_training(monkeypatch):
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_WORTH", 1e9)
    trainer = trainer_of()
    trainer.fit(iter(ROWS), steps=96)
    assert len(trainer.compilations) == 1


@pytest.mark.parametrize("remaining", [0, 99, 100, None])
def test_what_is_left_of_a_training_decides_or_what_it_took(monkeypatch, remaining):
    """Many short fits are a long training, though nothing is left at the end of each."""
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_WORTH", 1.0)
    trainer = trainer_of()
    trainer.engine.use(list(ROWS))
    runner = trainer.engine.runner
    runner.compile_s = 100.0  # so that fits themselves do not find it worth while
    for number in range(14):
        trainer.fit(iter(ROWS[:8]), steps=8)
        runner.compile_s = 100.0  # without that of the first fit
        runner.fix(trainer.engine.loop_state, 1, 1.0, remaining)
        # Twice the same length, and enough to come or behind us.
        enough = remaining == 100 or runner.iterations >= 100
        assert (runner.fixed.compiling is not None) == (number > 0 and enough), number


def test_training_goes_on_where_it_does_not_compile(monkeypatch, caplog):
    compile_ = Executable.compile

    def failing(self, *args):
        if not self.counted:
            raise MemoryError("no room for another program")
        return compile_(self, *args)

    monkeypatch.setattr(Executable, "compile", failing)
    trainer = trainer_of()
    with caplog.at_level(logging.WARNING, "tailrace"):
        with pytest.raises(MemoryError):
            began(trainer)
        trainer.fit(iter(ROWS[24:]), steps=72)
        # The thread says so after it has handed over the exception.
        text = "a loop of fixed length cannot be used (MemoryError: no room"
        wait_until(lambda: text in caplog.text, "the failure was not noted")
    assert_bits_equal(trainer.params, plain(96)[0])


def test_all_devices_must_have_room(monkeypatch):
    """Those that a training uses, and no others."""
    asked = []
    monkeypatch.setattr("tailrace.devices.devices.memory_left", lambda one: asked.append(one.id))
    devices = jax.devices()[1:3]
    monkeypatch.setattr("tailrace.devices.devices.available", lambda: devices)
    began(trainer_of(replicas=2), np.concatenate([ROWS, ROWS]))
    assert asked == [one.id for one in devices]


@pytest.mark.parametrize(("left", "used"), [(None, True), (3_000_000, True), (2_999_999, False)])
def test_it_is_used_only_where_it_has_room(monkeypatch, caplog, left, used):
    """A training of a week must not end because a faster program needs a little more memory."""
    monkeypatch.setattr("tailrace.devices.devices.memory_left", lambda _: left)
    peak = property(lambda self: 5_000_000 if self.counted else 8_000_000)
    monkeypatch.setattr(Executable, "peak_bytes", peak)
    trainer = trainer_of()
    with caplog.at_level(logging.WARNING, "tailrace"):
        if used:
            began(trainer)
        else:
            with pytest.raises(MemoryError):
                began(trainer)
            text = "cannot be used (MemoryError: it needs 3 MB more than the other one, and of "
            wait_until(lambda: text in caplog.text, "the reason was not noted")
    ran = []
    run = Executable.run
    monkeypatch.setattr(
        Executable, "run", lambda self, *a: ran.append(self.counted) or run(self, *a)
    )
    trainer.fit(iter(ROWS[24:]), steps=72)
    assert set(ran) == {not used}
    assert len(trainer.compilations) == 2  # it is not tried again
    assert_bits_equal(trainer.params, plain(96)[0])


def test_the_end_of_a_training_is_not_the_time():
    """The last of its executions is the first from which the loop could be compiled."""
    trainer = trainer_of()
    trainer.fit(iter(ROWS), steps=16)
    assert len(trainer.compilations) == 1


@pytest.mark.parametrize("kind", ["fits", "epochs", "a generator's epochs"])
def test_fits_and_epochs_of_one_execution(kind):
    """The length that is most common, not the one that was asked for."""
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), params(), steps_per_execution=20)
    rows = ROWS[:15]
    if kind == "fits":
        for _ in range(4):
            trainer.fit(iter(rows), steps=15)
    else:
        trainer.fit(Generated(rows) if kind != "epochs" else list(rows), epochs=4)
    trainer.engine.runner.fixed.compiling.result(LIMIT_S)
    assert causes(trainer)[1:] == ["a loop of exactly 15 steps, which is faster"]
    assert_bits_equal(trainer.params, plain(60, np.concatenate([rows] * 4))[0])


class Generated:
    """Rows in a dataset whose length nobody knows."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def test_executions_begin_with_a_period_whether_it_is_there_or_not(monkeypatch):
    """It ends each period with a look, so it cannot start in the middle of one."""
    trainer = trainer_of(observe=[tr.Tap("loss", mode=tr.every(4))])
    began(trainer)
    runner = trainer.engine.runner
    assert [runner.aligned(step, LENGTH, 4) for step in (0, 3, 4, 5)] == [8, 1, 8, 3]
    assert runner.aligned(3, 6, 4) == 6  # no fixed loop has such a length
    before = trainer.engine.executions
    trainer.fit(iter(ROWS[24:27]), steps=3)
    trainer.fit(iter(ROWS[27:]), steps=69)  # 1, eight times 8, 4
    assert trainer.engine.executions - before == 1 + 10
    assert_close(trainer.params, plain(96)[0])
    monkeypatch.setattr("tailrace.feeds.dispatch_table.FIXED_BELOW_S", 0.0)
    counted = trainer_of(observe=[tr.Tap("loss", mode=tr.every(4))])
    counted.fit(iter(ROWS), steps=27)
    before = counted.engine.executions
    counted.fit(iter(ROWS[27:]), steps=69)
    assert counted.engine.executions - before == 10


@pytest.mark.parametrize(("period", "chosen"), [(1, 25), (10, 20), (7, 21), (40, 25)])
def test_automatic_lengths_are_whole_periods(period, chosen):
    pace = Pace(None, 4, period=period)
    for _ in range(3):
        pace.measured(1, 0.01)
    assert pace.chosen == chosen


@pytest.mark.parametrize("bad", [3, 5, 11])
def test_a_guard_with_automatic_lengths(monkeypatch, bad):
    """A block of the fixed loop has less room than the program that runs its first steps again."""

    def measured(self, steps, seconds):
        self.chosen = LENGTH
        self.trials.append(1e-4)

    monkeypatch.setattr(Pace, "measured", measured)
    guard = tr.stop_on_nonfinite(["loss", "grad/*"])
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), params(), observe=[guard])
    began(trainer)
    assert trainer.engine.runner.capacity > LENGTH
    rows = ROWS.copy()
    rows[bad, 1] = np.nan
    with pytest.raises(tr.errors.NonFiniteError, match=f"step {24 + bad}"):
        trainer.fit(iter(rows), steps=48)
    assert trainer.step == 24 + bad
    assert_close(trainer.params, plain(24 + bad, np.concatenate([ROWS[:24], ROWS]))[0])


def test_a_padded_block_has_its_elements():
    feed = tr.InfeedQueue(list(ROWS))
    feed.bind_replicas(1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    block = feed.take(4, sharding)
    wide = block.padded(6)
    assert (wide.room, wide.count, block.padded(4).room) == (6, 4, 4)
    np.testing.assert_array_equal(wide.device[0][:4], block.device[0])
    feed.close()


def test_a_guard_whose_loop_is_shorter_than_the_bad_execution():
    """The steps before the bad one have the length of the loop, and their block has more."""
    trainer = trainer_of(observe=[tr.stop_on_nonfinite(["loss", "grad/*"])])
    some = list(ROWS[:2])
    trainer.fit(iter(ROWS), steps=16, validation_data=some, validation_every=4)
    trainer.engine.runner.fixed.compiling.result(LIMIT_S)
    rows = ROWS.copy()
    rows[20, 1] = np.nan
    with pytest.raises(tr.errors.NonFiniteError, match="step 20"):
        trainer.fit(iter(rows[16:]), steps=8)
    assert trainer.step == 20
    assert_close(trainer.params, plain(20)[0])


def test_a_sentinel_runs_one_program_twice(monkeypatch):
    """Also if the loop of fixed length is ready between the two runs; in a pipeline they share it."""
    trainer = pipeline_of(sentinel=1.0)
    ran, run = [], Executable.run

    def running(self, *args):
        found = run(self, *args)
        if self.segment.is_loop:
            ran.append(self)
            if trainer.engine.runner.fixed.compiling is not None:
                trainer.engine.runner.fixed.compiling.result(LIMIT_S)
        return found

    monkeypatch.setattr(Executable, "run", running)
    trainer.fit(iter(np.concatenate([ROWS, ROWS])), steps=40)
    assert [a is b for a, b in zip(ran[::2], ran[1::2], strict=True)] == [True] * 5
    assert len(set(ran)) == 2


def test_muted_results_are_another_program():
    trainer = trainer_of()
    engine = trainer.engine
    began(trainer)
    assert trainer.fit(iter(ROWS), steps=16).loss.shape == (16,)
    first = engine.runner.fixed.compiling
    # From now on nothing comes out, and a loop without is compiled once it is the more common one.
    engine.runner.muted = frozenset([engine.scalars])
    for _ in range(6):
        engine.dispatch(LENGTH)
        engine.runner.fix(engine.loop_state, 1, 1e-3)
    engine.runner.fixed.compiling.result(LIMIT_S)
    assert engine.runner.fixed.compiling is not first
    engine.runner.muted = frozenset()
    assert trainer.fit(iter(ROWS), steps=16).loss.shape == (16,)


def test_with_64_bits():
    with jax.enable_x64(True):
        trainer = trainer_of(observe=[tr.Tap("grad/*", mode=tr.every(4))])
        in_fixed_loop(trainer)
    assert_close(trainer.params, plain(96)[0])


EXIT = """
import time
from tailrace.program.running.fixed_loops import FixedLoops
FixedLoops().compile(None, None, lambda: (time.sleep(1.0), print("compiled", flush=True)))
"""


def test_a_process_waits_for_compilations_when_it_ends():
    """XLA would abort it otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
