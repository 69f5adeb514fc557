"""`fit(None, steps=n)`: a loss that needs no batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from covering import covering
from killed_fits import Kill, Killed
from oracles import assert_bits_equal, assert_close, mlp, mlp_apply, plain_training
from tailrace.errors import DataError, OptionError, ProgramError


def residual(params):
    """A collocation loss: the points are part of the function."""
    points = jnp.linspace(-1, 1, 12).reshape(4, 3)
    error = mlp_apply(params, points) - jnp.sin(points.sum(-1))
    return (error**2).mean(), {"largest": jnp.abs(error).max()}


def drawn(params, *ignored):
    """The same on points that are drawn anew in each microbatch."""
    points = jax.random.uniform(tr.key(), (4, 3))
    return ((mlp_apply(params, points) - jnp.sin(points.sum(-1))) ** 2).mean()


def trainer_of(loss_fn=residual, **options):
    return tr.Trainer(loss_fn, optax.sgd(0.05, 0.9), mlp(), **options)


@pytest.mark.parametrize("steps_per_execution", [1, 4, "auto"])
def test_a_fit_without_data_is_the_plain_loop(steps_per_execution):
    trainer = trainer_of(steps_per_execution=steps_per_execution)
    history = trainer.fit(None, steps=9)
    params, losses = plain_training(residual, optax.sgd(0.05, 0.9), mlp(), [()] * 9)
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(history.loss, losses)
    assert history["largest"].shape == (9,)
    assert trainer.step == 9
    assert not [entry for entry in trainer.tensors() if entry.kind == "input"]


@pytest.mark.parametrize(("accumulation", "replicas"), covering([1, 3], [1, 2]))
def test_keys_microbatches_and_replicas_are_those_of_a_fit_with_data(accumulation, replicas):
    options = {"accumulation": accumulation, "replicas": replicas, "fingerprint": True}
    without, beside = trainer_of(drawn, **options), trainer_of(drawn, **options)
    found = without.fit(None, steps=6)
    unread = [np.float32(0)] * 6 * accumulation * replicas
    expected = beside.fit(unread, steps=6)
    assert_bits_equal(found.each("loss"), expected.each("loss"))
    assert_bits_equal(without.params, beside.params)
    assert len(np.unique(found.each("loss"))) == 6 * accumulation * replicas


def test_a_killed_fit_resumes_and_replays(tmp_path):
    whole = trainer_of(drawn)
    expected = whole.fit(None, steps=12)
    kept = tr.Checkpoint(tmp_path, every=3)
    options = {"steps": 12, "checkpoint": kept, "progress": False}
    with pytest.raises(Killed):
        trainer_of(drawn, steps_per_execution=2).fit(None, callbacks=[Kill(3)], **options)
    trainer = trainer_of(drawn, steps_per_execution=2)
    history = trainer.fit(None, **options)
    assert_bits_equal(trainer.params, whole.params)
    assert_bits_equal(history.loss, expected.loss)
    replay = trainer.replay(7, None, observe=["grad/*"], checkpoint=tmp_path)
    assert replay.proved
    assert replay.loss == float(expected.loss[7])
    assert trainer.rewind(5, None, checkpoint=tmp_path)
    assert trainer.step == 5


def test_a_pipeline_without_data():
    stages = [lambda w: jnp.tanh(2 * w), lambda w, h: ((h * w - 3) ** 2).mean()]
    start = [np.float32(1), np.float32(1)]
    pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 0])
    piped = tr.Trainer(pipeline, optax.sgd(0.1), start).fit(None, steps=5)

    def whole(params):
        return stages[1](params[1], stages[0](params[0])), None

    assert_close(piped.loss, plain_training(whole, optax.sgd(0.1), start, [()] * 5)[1])


def test_data_is_needed_for_all_else(tmp_path):
    trainer = trainer_of()
    with pytest.raises(OptionError, match="for a number of steps. Received: epochs=2"):
        trainer.fit(None, epochs=2)
    with pytest.raises(OptionError, match=r"Use fit\(None, steps=...\)"):
        trainer.fit(None)
    with pytest.raises(DataError, match=r"Only a fit can do without: fit\(None, steps=...\)"):
        trainer.evaluate(None)
    with pytest.raises(ProgramError, match="then nothing, as there is no data"):
        trainer_of(lambda params, x: residual(params)).fit(None, steps=1)
    with pytest.raises(ProgramError, match="then one array"):
        trainer.fit([np.float32(0)], steps=1)
    trainer.fit(None, steps=2, checkpoint=tmp_path, progress=False)
    with pytest.raises(DataError, match="a fit without data has no rows"):
        trainer.explain_step(1, None, checkpoint=tmp_path)
    assert "of no data" in str(trainer.explain(None))
