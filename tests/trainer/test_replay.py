"""Replay: a past step again is the step that happened, or says where it is not."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_apply, regression
from tailrace.errors import CheckpointError, DataError, DataExhausted, OptionError
from tailrace.records.records import Records
from tailrace.trainer.lookback.comparison import Comparison
from tailrace.trainer.lookback.outcome import NEVER_COMPARED, Difference, Replay
from tailrace.trainer.lookback.recorded import Recorded
from tailrace.trainer.lookback.replay import replay
from tailrace.trainer.lookback.rerun import Rerun
from tailrace.trainer.lookback.start import nearest

X, Y = (np.concatenate(leaf) for leaf in zip(*regression(24), strict=True))
STATE = {"seen": np.int32(0)}


def loss_fn(params, state, x, y):
    x = jnp.where(jax.random.bernoulli(tr.key(), 0.8, x.shape), x, 0)
    with jax.named_scope("net"):
        out = mlp_apply(params, x)
    return ((out - y) ** 2).mean(), ({"seen": state["seen"] + 1}, None)


def data(repeat=True):
    return tr.batches((X, Y), 4, shuffle=True, seed=5, repeat=repeat)


def trainer_of(**options):
    options = {"steps_per_execution": 3, "fingerprint": True, **options}
    optimizer = optax.sgd(0.05, momentum=0.5)
    return tr.Trainer(loss_fn, optimizer, mlp(), model_state=STATE, **options)


TAPS = [tr.Tap("activation/net", reduce="tensor"), tr.Tap("grad/*", reduce="tensor")]
# A replay is of one step, whatever its number and the period of its taps.
RARE = [dataclasses.replace(tap, mode=tr.every(7)) for tap in TAPS]
FORMS = {"plain": {}, "accumulation": {"accumulation": 2}, "replicas": {"replicas": 2}}


@pytest.fixture(scope="module", params=FORMS)
def trained(request, tmp_path_factory):
    """A training with checkpoints, and the same with taps from the start: what a replay must see."""
    folder, options = tmp_path_factory.mktemp("replay"), FORMS[request.param]
    trainer = trainer_of(run_dir=folder / "run", **options)
    kept = tr.Checkpoint(folder / "kept", every=6, keep=2)
    trainer.fit(data(), steps=20, checkpoint=kept)
    watched = trainer_of(observe=TAPS, **options)
    watched.fit(data(), steps=20)
    return trainer, watched, folder


@pytest.mark.parametrize(("step", "taps"), [(7, TAPS), (19, RARE)])
def test_taps_see_what_they_would_have_seen(trained, step, taps):
    trainer, watched, folder = trained
    found = trainer.replay(step, data(), observe=taps, checkpoint=folder / "kept")
    assert found.proved is True, str(found)
    assert not found.differences
    assert "fingerprint of parameters" in found.evidence
    assert "fingerprint of elements" in found.evidence
    assert found.started_at <= step
    assert set(found) == set(watched.records)
    for name, record in watched.records.items():
        assert_bits_equal(found[name].values, record.values[record.steps == step])
        assert_bits_equal(found[name].steps, record.steps[record.steps == step])
    assert "proved: equal" in str(found)


def test_the_trainer_is_as_before(trained):
    trainer, _, folder = trained
    state, step, loss = trainer.state, trainer.step, trainer.history.loss
    executions, seed = trainer.executions, trainer.seed
    trainer.replay(9, data(), observe=TAPS, checkpoint=folder / "kept")
    assert (trainer.step, trainer.executions, trainer.seed) == (step, executions, seed)
    assert_bits_equal(trainer.state, state)
    assert_bits_equal(trainer.history.loss, loss)
    assert not len(trainer.records)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    trainer = trainer_of()
    trainer.fit(data(), steps=12, checkpoint=tr.Checkpoint(folder, every=3, keep=9))
    return trainer, folder


class Failure(tr.Callback):
    def on_execution_end(self, trainer, execution):
        if trainer.step >= 6:
            raise OSError("the machine goes away")


def test_a_step_is_not_proved_by_those_before_it(tmp_path):
    trainer = trainer_of()
    with pytest.raises(OSError, match="goes away"):
        trainer.fit(data(), steps=12, checkpoint=tmp_path, callbacks=[Failure()])
    assert trainer.replay(5, data(), checkpoint=tmp_path).proved is True
    beyond = trainer.replay(6, data(), checkpoint=tmp_path)  # steps 0 to 5 are equal
    assert (beyond.proved, beyond.differences) == (None, [])
    assert "nothing was recorded of it" in str(beyond)
    assert trainer.explain_step(6, data(), checkpoint=tmp_path).proved is None
    assert trainer.rewind(7, data(), checkpoint=tmp_path) is None
    assert trainer.rewind(0, data(), checkpoint=tmp_path) is True


def test_recorded_fingerprints_are_compared_by_any_trainer(plain):
    _, folder = plain
    found = trainer_of(fingerprint=False).replay(7, data(), checkpoint=folder)
    assert found, str(found)  # though nothing was observed
    assert (found.proved, len(found)) == (True, 0)
    assert "fingerprint of parameters" in found.evidence


def test_it_is_listed_what_is_compared_and_what_is_not(plain):
    trainer, folder = plain
    found = trainer.replay(7, data(), checkpoint=folder)
    groups = ("parameters", "optimizer", "model_state", "gradients", "loss", "elements")
    names = ["loss", "form of elements", *(f"fingerprint of {group}" for group in groups)]
    assert sorted(found.compared) == sorted(names)
    assert found.not_compared == list(NEVER_COMPARED)
    assert f"not compared: {NEVER_COMPARED[0]}" in str(found)


def test_elements_of_another_dtype_are_a_difference(tmp_path):
    def summed(w, x):
        return (w * x.astype(jnp.float32)).sum()

    def replayed(dtype):
        numbers = tr.batches(np.arange(32, dtype=dtype), 4)
        return trainer.replay(2, numbers, checkpoint=tmp_path)

    trainer = tr.Trainer(summed, optax.sgd(0.1), jnp.float32(1), fingerprint=True)
    trainer.fit(tr.batches(np.arange(32, dtype=np.int32), 4), steps=4, checkpoint=tmp_path)
    assert replayed(np.int32).proved is True
    assert "fingerprint of model_state" not in replayed(np.int32).not_compared  # there is none
    (differs,) = replayed(np.uint32).differences  # the same bits
    assert str(differs) == "step 0: form of elements int32[4] recorded, uint32[4] replayed"


def test_a_trainer_of_another_process_finds_the_record_in_later_checkpoints(plain):
    _, folder = plain
    found = trainer_of().replay(7, data(), checkpoint=folder)
    assert found.proved is True
    assert found.started_at == 6


def test_the_last_steps_of_a_checkpoint_without_later_ones_are_not_proved(plain, tmp_path):
    _, folder = plain
    killed = shutil.copytree(folder, tmp_path / "killed")
    for name in ("step-12", "step-12-end"):
        shutil.rmtree(killed / "fit-0" / name)
    found = trainer_of().replay(10, data(), checkpoint=killed)
    assert found.proved is None
    assert "nothing was recorded" in str(found)
    with pytest.raises(
        CheckpointError, match=r"that fit, fit\(steps=12\) from step 0, ends before"
    ):
        trainer_of().replay(12, data(), checkpoint=killed)


def test_other_data_is_not_taken_for_the_same(plain):
    trainer, folder = plain
    other = np.array(X)
    rows = data().rows(7, 1)[0]
    other[rows[0], 0] += 1e-3
    changed = tr.batches((other, Y), 4, shuffle=True, seed=5, repeat=True)
    found = trainer.replay(7, changed, checkpoint=folder)
    assert found.proved is False
    assert (found.differences[0].step, found.differences[0].what) == (7, "loss")
    groups = {one.what for one in found.differences}
    assert {"parameters", "optimizer", "elements", "loss"} <= groups
    assert "NOT PROVED" in str(found)
    assert "step 7: loss" in str(found)
    assert "the elements differ: the dataset" in str(found)
    assert not found
    before = trainer.replay(6, changed, checkpoint=folder)  # its execution goes on to step 8
    assert before.proved is False
    assert before.differences[0].step == 7


def test_equal_means_are_not_shown_as_a_difference():
    recorded = Recorded({0: np.float32([[1.0], [3.0]])})
    comparison = Comparison(recorded)
    loss = {"loss": np.float32([[[3.0], [1.0]]])}
    form = {"first_step": 0, "steps": 1, "elements": None, "weights": None}
    comparison.take(SimpleNamespace(scalars=loss, arrays={}, **form))
    assert [str(one) for one in comparison.differences] == [
        "step 0: loss of microbatch 0, replica 0: 1.0 recorded, 3.0 replayed"
    ]


def test_all_differences_are_counted():
    differences = [Difference(step, "loss", 1.0, 2.0) for step in range(13)]
    said = str(Replay(12, 2.0, Records(), differences, ["loss", "fingerprint of elements"], 0))
    assert "step 9: loss 1.0 recorded, 2.0 replayed\n  and 3 more differences\n" in said
    assert "machine differ, or a callback changed the state" in said


def test_a_changed_program_is_not_taken_for_the_same(plain):
    _, folder = plain

    def other(params, state, x, y):
        loss, rest = loss_fn(params, state, x, y)
        return loss * 1.0000001, rest

    changed = tr.Trainer(
        other, optax.sgd(0.05, momentum=0.5), mlp(), model_state=STATE, fingerprint=True
    )
    found = changed.replay(7, data(), checkpoint=folder)
    assert found.proved is False
    assert "the elements are equal: the model" in str(found)


def measuring(factor=1.0, name="size", **options):
    def measured(w, x):
        size = factor * jnp.abs(x * w).mean()
        return ((x - w) ** 2).mean(), {name: size, "bad": jnp.log(-size), "steps": jnp.int32(3)}

    options = {"fingerprint": True, "steps_per_execution": 3, **options}
    return tr.Trainer(measured, optax.sgd(0.1), np.float32(1), **options)


@pytest.mark.parametrize("where", ["history", "run", "checkpoint"])
def test_all_recorded_scalars_are_compared(where, tmp_path):
    """Those of aux too: a metric that is computed otherwise is no part of the loss or the state."""
    numbers = tr.batches(np.arange(48, dtype=np.float32) + 1, 4)
    own = {"run_dir": tmp_path / "run"} if where == "run" else {}
    trainer = measuring(log=["grad_norm", "examples_per_second"], **own)
    history = trainer.fit(numbers, steps=6, checkpoint=tmp_path / "kept", progress=False)
    recorded = Recorded()
    if where == "run":
        recorded.add_run(tr.open_run(tmp_path / "run"))
    elif where == "history":
        recorded.add_history(history)

    def again(changed):
        return replay(changed.engine, 4, numbers, (), tmp_path / "kept", recorded)

    same = again(measuring())  # values of log= are none of the step
    assert same.proved is True, str(same)  # NaN is equal to NaN
    assert same.evidence.startswith("loss, bad, size, steps, fingerprint")
    other = again(measuring(2.0))
    assert (other.proved, {one.what for one in other.differences}) == (False, {"size"})
    one = next(one for one in other.differences if one.step == 4)
    assert one.replayed == 2 * one.recorded
    assert f"step 4: size {one.recorded} recorded, {one.replayed} replayed" in str(other)
    renamed = again(measuring(name="length"))
    assert renamed.proved is False
    assert "step 0: size 2.5 recorded, nothing replayed" in str(renamed)
    assert "step 0: length nothing recorded, 2.5 replayed" in str(renamed)


def test_a_tap_may_change_how_aux_is_rounded(tmp_path, monkeypatch):
    """No gradient depends on it: the step without taps says whether it is that of the training."""
    look, looks = Rerun.look, []

    def rounded(rerun):
        results = look(rerun)
        looks.append(rerun.tapped)
        size = results.scalars["size"]
        changed = np.nextafter(size, np.float32(9)) if rerun.tapped else size
        return dataclasses.replace(results, scalars={**results.scalars, "size": changed})

    monkeypatch.setattr(Rerun, "look", rounded)
    numbers, alone = tr.batches(np.arange(32, dtype=np.float32) + 1, 4), {"steps_per_execution": 1}
    kept = tr.Checkpoint(tmp_path, every=1, keep=9)
    measuring(**alone).fit(numbers, steps=4, checkpoint=kept, progress=False)
    taps = {"observe": ["grad/*"], "checkpoint": kept}
    found = measuring(**alone).replay(2, numbers, **taps)
    assert (found.proved, looks, "size" in found.evidence) == (True, [True, False], True)
    assert found["grad/params"].steps.tolist() == [2]
    assert measuring(**alone).explain_step(2, numbers, checkpoint=kept).proved is True
    other = measuring(2.0, **alone).replay(2, numbers, **taps)
    assert [(one.step, one.what) for one in other.differences] == [(2, "size")]


def test_epochs_are_followed(tmp_path):
    trainer = trainer_of(accumulation=5)  # 4 elements of an epoch are left out
    trainer.fit(data(repeat=False), epochs=3, checkpoint=tr.Checkpoint(tmp_path, every=100))
    for step in (3, 4, 11):
        found = trainer.replay(step, data(repeat=False), checkpoint=tmp_path)
        assert found.proved is True, str(found)
        assert found.started_at == 0


@pytest.mark.parametrize("by", ["steps", "epochs"])
def test_a_fit_that_was_continued(by, tmp_path):
    """More steps or epochs than the first call asked for: each of them is of that fit."""
    elements, kept = data(repeat=by == "steps"), tr.Checkpoint(tmp_path, every=99)
    first, then = (
        ({"steps": 10}, {"steps": 24}) if by == "steps" else ({"epochs": 1}, {"epochs": 2})
    )
    make = lambda: trainer_of(accumulation=1 if by == "steps" else 2)  # noqa: E731
    trainers = [make(), make()]
    for trainer, duration in zip(trainers, (first, then), strict=True):
        trainer.fit(elements, checkpoint=kept, **duration)
    middle, end = trainers[0].step, trainers[1].step
    found = make().replay(middle + 1, elements, checkpoint=kept)
    assert (found.proved, found.started_at) == (True, middle), str(found)
    # As a version before this one left the directory, or if the middle is no longer kept.
    shutil.rmtree(tmp_path / "fit-0" / f"step-{middle}-end")
    found = make().replay(middle + 1, elements, checkpoint=kept)
    assert (found.proved, found.started_at) == (True, 0), str(found)
    assert make().explain_step(middle, elements, checkpoint=kept).proved is True
    assert make().rewind(middle + 1, elements, checkpoint=kept) is True
    with pytest.raises(CheckpointError, match=f"ended with step {end - 1}. Received: step={end}"):
        make().replay(end, elements, checkpoint=kept)


class Stop(tr.Callback):
    def on_execution_end(self, trainer, execution):
        trainer.stop()


def test_steps_of_a_fit_without_checkpoints(tmp_path):
    trainer = trainer_of()
    trainer.fit(data(), steps=9, checkpoint=tmp_path, callbacks=[Stop()])  # ends after three
    trainer.fit(data(), steps=3)
    trainer.fit(data(), steps=3, checkpoint=tmp_path)
    for call, step in ((trainer.replay, 4), (trainer.explain_step, 3), (trainer.rewind, 5)):
        with pytest.raises(CheckpointError, match=r"ends before step \d. Steps of a fit without"):
            call(step, data(), checkpoint=tmp_path)
    assert trainer.rewind(3, data(), checkpoint=tmp_path) is True


class DrawsAtItsEnd:
    """As a seeded DataLoader of PyTorch: who reads on after the last element changes the next order."""

    def __init__(self):
        self._order = np.random.default_rng(3)

    def __len__(self):
        return 24

    def __iter__(self):
        for row in self._order.permutation(24):
            yield X[4 * row : 4 * row + 4], Y[4 * row : 4 * row + 4]
        self._order.permutation(24)


@pytest.mark.parametrize("accumulation", [3, 5])
def test_the_end_of_an_epoch_is_read_as_the_fit_read_it(tmp_path, accumulation):
    trainer = trainer_of(accumulation=accumulation)
    trainer.fit(DrawsAtItsEnd(), epochs=3, checkpoint=tr.Checkpoint(tmp_path, every=3, keep=9))
    per_epoch = 24 // accumulation
    for step in (per_epoch - 1, per_epoch, 2 * per_epoch, 3 * per_epoch - 1):
        found = trainer.replay(step, DrawsAtItsEnd(), checkpoint=tmp_path)
        assert found.proved is True, str(found)


@pytest.mark.parametrize("steps", [1, 7])
def test_the_program_that_ran_runs_again(tmp_path, steps):
    """A loop with room for one pass is compiled otherwise than a longer one: one bit, now and then."""

    def loss_fn(params, x, y):
        logits = jnp.tanh(x @ params["a"]) @ params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    rng = np.random.default_rng(0)
    params = {
        "a": (rng.normal(size=(64, 32)) * 0.2).astype(np.float32),
        "b": (rng.normal(size=(32, 10)) * 0.3).astype(np.float32),
    }
    x = rng.normal(size=(448, 64)).astype(np.float32)
    rows = tr.batches((x, rng.integers(0, 10, 448).astype(np.int32)), 32)
    make = lambda: tr.Trainer(  # noqa: E731
        loss_fn, optax.sgd(0.1), params, steps_per_execution=steps, fingerprint=True
    )
    trainer = make()
    trainer.fit(rows, epochs=1, checkpoint=tmp_path)
    rerun = Rerun(trainer.engine, (), rows, *nearest(tmp_path, 0).fit())
    with rerun.closing():
        losses = [rerun.look().scalars["loss"] for _ in range(14)]
    assert_bits_equal(np.concatenate(losses), trainer.history.each("loss"))
    assert make().replay(13, rows, checkpoint=tmp_path).proved is True


def test_without_fingerprints_losses_are_compared(tmp_path):
    trainer = trainer_of(fingerprint=False)
    trainer.fit(data(), steps=6, checkpoint=tmp_path)
    found = trainer.replay(4, data(), checkpoint=tmp_path)
    assert (found.proved, found.evidence) == (True, "loss, form of elements")
    assert found.not_compared[0] == "fingerprint of parameters"
    # The loss of the first step is that of the checkpoint's parameters, whatever the optimizer does.
    other = optax.sgd(0.06, momentum=0.5)
    changed = tr.Trainer(loss_fn, other, mlp(), model_state=STATE)
    found = changed.replay(0, data(), checkpoint=tmp_path)
    assert [one.step for one in found.differences] == [1]
    # A later fit has other data: its losses prove nothing of this one.
    trainer.fit(tr.batches((X + 1, Y), 4), steps=2, checkpoint=tmp_path)
    assert trainer.replay(5, data(), checkpoint=tmp_path).proved is True


def test_a_pipeline(tmp_path):
    def stages(params):
        first = lambda p, x, y: (jnp.tanh(x @ p["kernel"] + p["bias"]), y)  # noqa: E731
        second = lambda p, h, y: ((h @ p - y) ** 2).mean()  # noqa: E731
        return tr.Pipeline([first, second], accumulation=4), [params["hidden"], params["out"]]

    taps = tr.Tap("reduced/*", reduce="tensor")
    pipeline, params = stages(mlp())
    make = lambda **o: tr.Trainer(  # noqa: E731
        pipeline, optax.sgd(0.1), params, fingerprint=True, steps_per_execution=2, **o
    )
    trainer, watched = make(), make(observe=taps)
    trainer.fit(data(), steps=4, checkpoint=tmp_path)
    watched.fit(data(), steps=4)
    found = trainer.replay(2, data(), observe=taps, checkpoint=tmp_path)
    assert found.proved is True, str(found)
    for name, record in watched.records.items():
        assert_bits_equal(found[name].values, record.values[2:3])


WEIGHTED = tr.Accumulation(3, weight=lambda x: x[0] ** 2)


@pytest.mark.parametrize("accumulation", [3, WEIGHTED])
def test_the_loss_is_that_of_the_history(accumulation, tmp_path):
    """A mean of three in float32 differs in the last bit from one in float64, now and then."""
    numbers = np.random.default_rng(0).normal(size=18).astype(np.float32)
    losses = numbers.reshape(6, 3)
    (other, *_) = np.flatnonzero(losses.mean(1) != losses.mean(1, dtype=np.float64).astype("f4"))
    trainer = tr.Trainer(
        lambda w, x: (w * x).sum(), optax.sgd(0.0), np.float32(1), accumulation=accumulation
    )
    history = trainer.fit(tr.batches(numbers, 1), steps=6, checkpoint=tmp_path, progress=False)
    step = int(other)
    found = trainer.replay(step, tr.batches(numbers, 1), checkpoint=tmp_path)
    explained = trainer.explain_step(step, tr.batches(numbers, 1), checkpoint=tmp_path)
    assert found.loss == explained.loss == history.loss[step]


def test_what_cannot_be_replayed(plain, tmp_path):
    trainer, folder = plain
    with pytest.raises(OptionError, match="the number of a step that was trained"):
        trainer.replay(-1, data(), checkpoint=folder)
    with pytest.raises(CheckpointError, match="nothing' does not exist. Give the directory"):
        trainer.replay(3, data(), checkpoint=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="' contains none. Give the directory"):
        trainer.replay(3, data(), checkpoint=tmp_path)
    (tmp_path / "run.json").write_text('{"format": 1, "checkpoint": "there"}')
    text = "is a run directory: records, not .* This run's checkpoints are in 'there'. Give"
    with pytest.raises(CheckpointError, match=text):
        trainer.replay(3, data(), checkpoint=tmp_path)
    for call in (trainer.replay, trainer.explain_step):
        with pytest.raises(CheckpointError, match=r"ended with step 11\. Received: step=12"):
            call(12, data(), checkpoint=folder)
    with pytest.raises(CheckpointError, match=r"ended with step 11\. Received: step=13"):
        trainer.rewind(13, data(), checkpoint=folder)
    with pytest.raises(OptionError, match="the directory that fit"):
        trainer.replay(3, data(), checkpoint=None)
    with pytest.raises(DataExhausted, match="this dataset ends before step 6"):
        trainer.replay(7, [*tr.batches((X[:24], Y[:24]), 4)], checkpoint=folder)
    with pytest.raises(DataExhausted, match="ends before step 6, where the replay starts"):
        trainer.replay(7, [*tr.batches((X[:8], Y[:8]), 4)], checkpoint=folder)
    with pytest.raises(DataError, match="A state belongs to the recipe that it was saved from"):
        trainer.replay(7, tr.batches((X[:24], Y[:24]), 4), checkpoint=folder)
    with pytest.raises(CheckpointError, match=r"took 1 element .*, and here it takes 2"):
        trainer_of(accumulation=2).replay(7, data(), checkpoint=folder)
    other = tr.Trainer(loss_fn, optax.sgd(0.05), mlp(), model_state=STATE)
    with pytest.raises(CheckpointError, match="does not have the form of the trainer's"):
        other.replay(7, data(), checkpoint=folder)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_a_random_key_in_the_model_state(generator, tmp_path):
    def noisy(w, state, x):
        key, own = jax.random.split(state["key"])
        return ((w - x + jax.random.normal(own, x.shape)) ** 2).mean(), ({"key": key}, None)

    state = {"key": jax.random.key(3, impl=generator)}
    trainer = tr.Trainer(noisy, optax.sgd(0.1), np.float32(0), model_state=state)
    numbers = tr.batches(np.arange(32, dtype=np.float32), 4)
    trainer.fit(numbers, steps=6, checkpoint=tr.Checkpoint(tmp_path, every=2), progress=False)
    assert trainer.replay(5, numbers, checkpoint=tmp_path).proved is True


def test_it_is_said_what_has_changed_since(plain, monkeypatch):
    trainer, folder = plain
    assert trainer.replay(7, data(), checkpoint=folder).changed == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    other = tr.batches((X + 1, Y), 4, shuffle=True, seed=5, repeat=True)
    found = trainer.replay(7, other, checkpoint=folder)
    (changed,) = found.changed
    assert changed.startswith("XLA_FLAGS: ")
    assert f"changed since: {changed}" in str(found)
