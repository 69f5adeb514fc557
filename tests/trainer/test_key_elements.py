"""Typed random keys in the elements of a dataset."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal, plain_scan

KEYS = jax.random.split(jax.random.key(1), 24)
X = np.linspace(-1, 1, 24, dtype=np.float32)
START = np.float32(0.5)


def loss_fn(w, key, x):
    return (w - x - jax.random.normal(key, ())) ** 2


def batch_loss(w, keys, x):
    return jax.vmap(lambda key, x: loss_fn(w, key, x))(keys, x).mean()


def trainer_of(fn, **options):
    return tr.Trainer(fn, optax.sgd(0.1), START, **options)


def plain(fn, elements):
    """Parameters and losses of a hand-written scan; keys as their numbers, which it can stack."""

    def one(w, numbers, x):
        loss, grad = jax.value_and_grad(fn)(w, jax.random.wrap_key_data(numbers), x)
        return w - np.float32(0.1) * grad, loss

    numbers = [(jax.random.key_data(keys), x) for keys, x in elements]
    return plain_scan(one, jnp.asarray(START), numbers)


@pytest.mark.parametrize("batched", [False, True])
def test_equal_to_the_plain_loop(batched):
    if batched:
        data, fn = tr.batches((KEYS, X), 4), batch_loss
        elements = [(KEYS[i : i + 4], X[i : i + 4]) for i in range(0, 24, 4)]
    else:
        data, fn = [(KEYS[i], X[i]) for i in range(24)], loss_fn
        elements = data
    trainer = trainer_of(fn)
    history = trainer.fit(data, epochs=1, progress=False)
    params, losses = plain(fn, elements)
    assert_bits_equal(history.loss, losses)
    assert_bits_equal(trainer.params, params)
    assert [entry.name for entry in trainer.tensors() if entry.kind == "input"] == [
        "input/0",
        "input/1",
    ]


def test_evaluated_and_predicted():
    trainer = trainer_of(batch_loss)
    data = tr.batches((KEYS, X), 5)  # with a smaller last batch
    expected = float(jax.jit(batch_loss)(START, KEYS, X))
    assert trainer.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-5)
    drawn = trainer.predict(data, lambda w, keys, x: jax.vmap(jax.random.normal)(keys))
    assert_bits_equal(drawn, jax.vmap(jax.random.normal)(KEYS))


def test_other_generators_and_replicas():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 8)
    data = tr.batches({"key": keys, "x": X[:8]}, 2, shuffle=True)
    seen = []

    def fn(w, key, x):
        seen.append(str(jax.random.key_impl(key)))
        return batch_loss(w, key, x)

    history = trainer_of(fn, replicas=2, accumulation=2).fit(data, epochs=2, progress=False)
    assert history.each("loss").shape == (2, 2, 2)
    assert set(seen) == {"rbg"}


def test_resumed_and_replayed(tmp_path):
    data = tr.batches((KEYS, X), 2, shuffle=True)
    whole = trainer_of(batch_loss, fingerprint=True, steps_per_execution=2)
    expected = whole.fit(data, steps=9, progress=False)
    kept = tr.Checkpoint(tmp_path, every=2)
    options = {"steps": 9, "checkpoint": kept, "progress": False}
    with pytest.raises(Killed):
        trainer_of(batch_loss, steps_per_execution=2).fit(data, callbacks=[Kill(2)], **options)
    trainer = trainer_of(batch_loss, steps_per_execution=2)
    history = trainer.fit(data, **options)
    assert_bits_equal(history.loss, expected.loss)
    assert trainer.replay(7, data, checkpoint=tmp_path).proved
    assert len(trainer.explain_step(7, data, checkpoint=tmp_path).rows) == 2
