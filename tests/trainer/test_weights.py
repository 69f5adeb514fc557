"""`tr.Accumulation(weight=)`: the mean over valid tokens in training, evaluation and validation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.errors import ElementError, OptionError

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
MASK = (np.arange(64) % 16 == 0).astype(np.float32)
MASK[:32] = 1
DATA = tr.batches((X, MASK), 16)
W = np.ones(4, np.float32)


def loss_fn(w, x, mask):
    """The mean over the valid rows of a batch."""
    loss = (((x @ w - 1) ** 2) * mask).sum() / jnp.maximum(mask.sum(), 1)
    return loss, {"mean": (x[:, 0] * mask).sum() / jnp.maximum(mask.sum(), 1)}


def tokens(x, mask):
    return mask.sum()


def trainer_of(weight=tokens, rate=0.1, **options):
    options.setdefault("accumulation", tr.Accumulation(4, weight=weight))
    return tr.Trainer(loss_fn, optax.sgd(rate), W, steps_per_execution=1, **options)


def expected(w=W):
    """The means over all valid rows."""
    total = jnp.float32(MASK.sum())
    return {
        "loss": (((X @ w - 1) ** 2) * MASK).sum() / total,
        "mean": (X[:, 0] * MASK).sum() / total,
    }


OPTIONS = {
    "4 microbatches": {},
    "2 replicas": {"accumulation": tr.Accumulation(2, weight=tokens), "replicas": 2},
    "4 replicas": {"accumulation": tr.Accumulation(1, weight=tokens), "replicas": 4},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_evaluation_weighs_as_training_does(name):
    options = OPTIONS[name]
    trainer = trainer_of(rate=0.0, **options)
    history = trainer.fit(DATA, epochs=1, validation_data=DATA, progress=False)
    found, rtol = trainer.evaluate(DATA), 3e-2 if "precision" in options else 1e-6
    for key, value in expected().items():
        np.testing.assert_allclose([history[key][0], found[key]], value, rtol=rtol)
        assert history[f"val_{key}"][0] == found[key]
    # Of another function rows count, as documented; `eval_fn` stands for the loss.
    rows = trainer.evaluate(DATA, lambda w, x, mask: x[:, 0].mean())
    np.testing.assert_allclose(rows["loss"], X[:, 0].mean(), rtol=rtol, atol=1e-4)
    evaluated = trainer_of(eval_fn=lambda w, x, mask: loss_fn(w, x, mask)[0], **options)
    assert evaluated.evaluate(DATA).keys() == {"loss"}
    np.testing.assert_allclose(evaluated.evaluate(DATA)["loss"], expected()["loss"], rtol=rtol)


def test_a_pipeline_and_batches_of_two_sizes():
    """The last batch has 14 rows."""

    def model(w, x, mask):
        error = tr.stage_boundary((x @ w - 1) ** 2)
        return (error * mask).sum() / jnp.maximum(mask.sum(), 1)

    pipeline = tr.Pipeline(model, accumulation=tr.Accumulation(2, weight=tokens))
    data = tr.batches((X[:62], MASK[:62]), 16)
    plain, staged = trainer_of(), tr.Trainer(pipeline, optax.sgd(0.1), W)
    truth = float((((X @ W - 1) ** 2) * MASK)[:62].sum() / MASK[:62].sum())
    for trainer in (plain, staged):
        np.testing.assert_allclose(trainer.evaluate(data)["loss"], truth, rtol=1e-6)


def test_the_objective_is_the_weighted_mean():
    trainer = trainer_of(rate=0.1)
    trainer.fit(DATA, steps=1, progress=False)
    gradient = jax.grad(lambda w: expected(w)["loss"])(jnp.asarray(W))
    assert_close(trainer.params, W - 0.1 * gradient)


BAD = {
    "below 0": (lambda x, m: -m.sum(), r"Received: -16\.0 for step 0, microbatch 0, replica 0"),
    "one below 0": (
        lambda x, m: m.sum() - 5,
        r"Received: -4\.0 for step 0, microbatch 2, replica 0",
    ),
    "no number": (lambda x, m: jnp.nan, "Received: nan for step 0, microbatch 0"),
    "infinite": (lambda x, m: m.sum() / 0, "Received: inf for step 0, microbatch 0"),
    "only 0": (lambda x, m: 0.0, "Received: only 0 for step 0; the state was trained with it"),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_without_a_mean_are_errors(name):
    weight, text = BAD[name]
    trainer = trainer_of(weight)
    with pytest.raises(ElementError, match=text):
        trainer.fit(DATA, steps=1, progress=False)
    assert len(trainer.history.loss) == trainer.step == 1
    with pytest.raises(ElementError, match=r"for (batch \d of|all batches that) evaluate"):
        trainer.evaluate(DATA)


def test_the_step_of_a_bad_weight():
    """Of several executions, one alone in flight: the history has what was trained."""
    bad = np.arange(10, dtype=np.float32) - 6
    trainer = tr.Trainer(
        lambda w, x: ((w - x) ** 2).mean(),
        optax.sgd(0.0),
        np.float32(1),
        steps_per_execution=1,
        accumulation=tr.Accumulation(1, weight=lambda x: 0.5 - x / 10),
    )
    with pytest.raises(ElementError, match=r"-0\.\d+ for step 12,"):
        trainer.fit([np.float32(x) for x in [*bad, 1, 2, 6, 1, 1, 1, 1]], epochs=1, progress=False)
    assert len(trainer.history.loss) == trainer.step >= 13


def test_a_single_microbatch_without_weight_among_others():
    """Its rows do not count; the mean is that of the others."""
    trainer = trainer_of(lambda x, mask: jnp.where(mask.sum() > 5, 1.0, 0.0), rate=0.0)
    loss = trainer.fit(DATA, steps=1, progress=False).loss[0]
    halves = [loss_fn(W, X[i : i + 16], MASK[i : i + 16])[0] for i in (0, 16)]
    np.testing.assert_allclose(loss, np.mean(halves), rtol=1e-6)


@pytest.mark.parametrize("weight", [5, "tokens", [1.0]])
def test_what_is_no_weight(weight):
    with pytest.raises(OptionError, match=r"weight= of tr\.Accumulation is a function"):
        tr.Accumulation(2, weight=weight)
