"""Arrays in `aux`: in the history, in checkpoints, compared by replays."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal, assert_close, mlp, mlp_apply, regression
from tailrace.errors import SelectionError

ELEMENTS = regression(24)


def loss_fn(params, x, y):
    error = mlp_apply(params, x) - y
    aux = {"mae": jnp.abs(error).mean(), "rows": error**2, "loss": jnp.ones((2, 3), jnp.int32)}
    return (error**2).mean(), aux


def trainer_of(fn=loss_fn, **options):
    return tr.Trainer(fn, optax.sgd(0.1), mlp(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation": 2},
        {"accumulation": 2, "replicas": 2},
        {"accumulation": tr.Accumulation(2, weight=lambda x, y: jnp.abs(y).sum())},
    ],
)
def test_arrays_are_in_the_history(options):
    trainer = trainer_of(**options)
    history = trainer.fit(ELEMENTS, steps=5, progress=False)
    parts = (trainer.accumulation.microbatches, trainer.replicas)
    assert history.each("rows").shape == (5, *parts, 4)
    assert_close(history.each("rows").mean(axis=-1), history.each("loss"))
    assert history["rows"].shape == (5, 4)
    assert_close(history["rows"].mean(axis=-1), history.loss)
    assert history["aux/loss"].shape == (5, 2, 3)
    assert (history.names, history.array_names) == (["loss", "mae"], ["aux/loss", "rows"])
    assert set(history.last()) == {"loss", "mae"}
    with pytest.raises(SelectionError, match="There are: loss, mae, aux/loss, rows"):
        history.each("columns")


def test_they_are_those_of_the_plain_loop():
    trainer = trainer_of()
    history = trainer.fit(ELEMENTS, steps=3, progress=False)
    params, step = mlp(), jax.jit(jax.grad(loss_fn, has_aux=True))
    for number, element in enumerate(ELEMENTS[:3]):
        grads, aux = step(params, *element)
        assert_close(history["rows"][number], aux["rows"])
        params = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads)


def test_they_survive_a_kill_and_are_replayed(tmp_path):
    expected = trainer_of().fit(ELEMENTS, steps=12, progress=False)
    kept = tr.Checkpoint(tmp_path, every=4)
    options = {"steps": 12, "checkpoint": kept, "progress": False}
    with pytest.raises(Killed):
        trainer_of(steps_per_execution=2).fit(ELEMENTS, callbacks=[Kill(3)], **options)
    trainer = trainer_of(steps_per_execution=2)
    history = trainer.fit(ELEMENTS, **options)
    for name in ("rows", "aux/loss"):
        assert_bits_equal(history.each(name), expected.each(name))
    assert trainer.replay(9, ELEMENTS, checkpoint=tmp_path).proved

    def other(params, x, y):
        loss, aux = loss_fn(params, x, y)
        return loss, {**aux, "rows": 2 * aux["rows"]}

    changed = trainer_of(other).replay(9, ELEMENTS, checkpoint=tmp_path)
    assert {difference.what for difference in changed.differences} == {"rows"}


def test_a_run_directory_has_scalars_and_says_so(tmp_path, caplog):
    trainer = trainer_of(run_dir=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "tailrace"):
        trainer.fit(ELEMENTS, steps=4, checkpoint=tmp_path / "kept", progress=False)
    assert "The arrays of aux, 'aux/loss', 'rows', are in trainer.history" in caplog.text
    assert tr.open_run(tmp_path / "run").history.names == ["loss", "mae"]
    assert trainer.replay(2, ELEMENTS, checkpoint=tmp_path / "kept").proved


def test_large_ones_are_left_out_with_a_note(caplog):
    def large(params, x, y):
        loss, aux = loss_fn(params, x, y)
        return loss, {**aux, "large": jnp.zeros(1025), "keys": jax.random.split(jax.random.key(0))}

    with caplog.at_level(logging.WARNING, "tailrace"):
        history = trainer_of(large).fit(ELEMENTS, steps=2, progress=False)
    assert "up to 1,024 numbers for each microbatch. Left out: 'keys', 'large'" in caplog.text
    assert history.array_names == ["aux/loss", "rows"]


def test_in_a_pipeline():
    def last(w, h, y):
        error = h.sum(-1) * w - y
        return (error**2).mean(), {"rows": error**2}

    stages = [lambda w, x, y: (jnp.tanh(x * w), y), last]
    pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 1])
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), [np.float32(1), np.float32(0.5)])
    history = trainer.fit(ELEMENTS, steps=3, progress=False)
    assert history.each("rows").shape == (3, 4, 1, 4)
    assert_close(history.each("rows").mean(axis=-1), history.each("loss"))
