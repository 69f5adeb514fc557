"""The trainer against the plain loop: to the bit where the order is the same, else to tolerance."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import (
    assert_bits_equal,
    assert_close,
    mlp,
    mlp_apply,
    mlp_loss,
    plain_accumulated_training,
    plain_training,
    regression,
)
from tailrace.errors import OptionError

ELEMENTS = regression(36)


@pytest.fixture(autouse=True)
def _optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


# -- one microbatch, one replica: to the bit ----------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw on a schedule": lambda: optax.adamw(
        optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1
    ),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_plain_loop(name):
    trainer = tr.Trainer(mlp_loss, OPTIMIZERS[name](), mlp(), steps_per_execution=4)
    history = trainer.fit(ELEMENTS, steps=18)
    params, losses = plain_training(mlp_loss, OPTIMIZERS[name](), mlp(), ELEMENTS[:18])
    assert len(history.loss) == 18
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(history.loss, losses)


@pytest.mark.parametrize("steps_per_execution", [1, 5, 18, 100, "auto"])
def test_the_length_of_executions_changes_no_bit(steps_per_execution):
    def loss_fn(params, x, y):
        keep = jax.random.bernoulli(tr.key(), 0.5, x.shape)
        return mlp_loss(params, jnp.where(keep, x, 0.0), y)

    def train(steps_per_execution):
        trainer = tr.Trainer(
            loss_fn, optax.sgd(0.1), mlp(), steps_per_execution=steps_per_execution, seed=5
        )
        history = trainer.fit(ELEMENTS, steps=18)
        return trainer.params, history.loss

    assert_bits_equal(train(steps_per_execution), train(3))


# -- every option, alone and with every other ---------------------------------------------------


def with_state(params, state, x, y):
    """A loss that depends on a running mean, as BatchNorm does, and counts its calls."""
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
    error = mlp_apply(params, x - mean) - y
    state = {"mean": mean, "calls": state["calls"] + 1}
    return (error**2).mean(), (state, {"mae": jnp.abs(error).mean()})


def tokens(x, y):
    """A weight that differs from microbatch to microbatch."""
    return 1.0 + (y > 0).sum()


def wide_kernels(parameter):
    return jnp.float32 if parameter.ndim == 2 else parameter.dtype


ACCUMULATIONS = {
    "1": {},
    "3 sum": {"microbatches": 3, "reduction": "sum"},
    "3 mean": {"microbatches": 3},
    "3 running mean": {"microbatches": 3, "reduction": "running_mean"},
    "1 float32": {"dtype": jnp.float32},
    "3 float32": {"microbatches": 3, "dtype": "float32"},
    "3 by parameter": {"microbatches": 3, "dtype": wide_kernels},
    "1 weighted": {"weight": tokens},
    "3 weighted": {"microbatches": 3, "weight": tokens},
    "3 weighted by parameter": {"microbatches": 3, "weight": tokens, "dtype": wide_kernels},
}


@pytest.mark.parametrize(
    ("name", "replicas", "has_state"),
    list(itertools.product(ACCUMULATIONS, [1, 2], [False, True])),
)
def test_every_pair_of_options(name, replicas, has_state):
    options = ACCUMULATIONS[name]
    optimizer = optax.chain(optax.clip(10.0), optax.sgd(0.05, momentum=0.9))
    loss_fn = with_state if has_state else mlp_loss
    state = {"mean": np.zeros(3, np.float32), "calls": np.int32(0)} if has_state else None
    per_step = options.get("microbatches", 1) * replicas
    elements = ELEMENTS[: 4 * per_step]
    trainer = tr.Trainer(
        loss_fn,
        optimizer,
        mlp(),
        accumulation=tr.Accumulation(**options),
        replicas=replicas,
        model_state=state,
        steps_per_execution=3,
    )
    history = trainer.fit(elements, steps=4)
    dtype = options.get("dtype")
    params, losses, after = plain_accumulated_training(
        loss_fn,
        optimizer,
        mlp(),
        elements,
        microbatches=options.get("microbatches", 1),
        replicas=replicas,
        reduction=options.get("reduction", "mean"),
        weight=options.get("weight"),
        dtype=dtype if dtype is wide_kernels else lambda p: dtype or p.dtype,
        model_state=state,
    )
    assert_close(trainer.params, params)
    assert_close(history.each("loss"), losses)
    if has_state:
        assert_close(trainer.model_state, jax.tree.map(np.asarray, after))
        assert trainer.model_state["calls"] == 4 * options.get("microbatches", 1)
    if "weight" not in options:
        assert_close(history.loss, losses.mean((1, 2)))


def test_replicas_equal_one_with_the_large_batch():
    large = [
        tuple(np.concatenate(leaves) for leaves in zip(a, b, strict=True))
        for a, b in zip(ELEMENTS[::2], ELEMENTS[1::2], strict=True)
    ]
    two = tr.Trainer(mlp_loss, optax.adam(0.01), mlp(), replicas=2)
    one = tr.Trainer(mlp_loss, optax.adam(0.01), mlp())
    both = two.fit(ELEMENTS, steps=18), one.fit(large, steps=18)
    assert_close(two.params, one.params)
    assert_close(both[0].loss, both[1].loss)


def test_the_same_seed_gives_the_same_twice_also_with_replicas():
    def noisy(params, x, y):
        return mlp_loss(params, x + jax.random.normal(tr.key(), x.shape), y)

    def train():
        trainer = tr.Trainer(noisy, optax.adam(0.01), mlp(), replicas=2, accumulation=2, seed=3)
        return trainer.fit(ELEMENTS, steps=9).each("loss"), trainer.params

    assert_bits_equal(train(), train())


# -- 16 bits ------------------------------------------------------------------------------------


def steep(params, x):
    """A gradient of 60,000 x: two of them overflow float16, whose largest number is 65,504."""
    return (params["w"] * x).sum(), {}


@pytest.mark.parametrize(
    ("dtype", "reduction", "expected"),
    [
        (None, "sum", np.inf),
        (jnp.float32, "sum", 8 * 60000.0),
        (jnp.float32, "mean", 60000.0),
        (None, "running_mean", 60000.0),
        (None, "mean", 60000.0),
    ],
)
def test_float16_gradients_that_overflow(dtype, reduction, expected):
    params = {"w": np.ones(2, np.float16)}
    elements = [(np.full(2, 60000, np.float16),)] * 8
    seen = {}

    def remember(grads, state, params=None):
        seen["dtype"] = jax.tree.leaves(grads)[0].dtype
        return jax.tree.map(lambda g: -g, grads), state

    trainer = tr.Trainer(
        steep,
        optax.GradientTransformation(lambda p: (), remember),
        params,
        accumulation=tr.Accumulation(8, dtype=dtype, reduction=reduction),
    )
    wide = jax.tree.map(lambda p: p.astype(np.float32), params)
    trainer.fit(elements, steps=1)
    assert seen["dtype"] == (dtype or np.float16)
    assert trainer.params["w"].dtype == np.float16
    # The update is cast when it is applied; in float16, -60000 + 1 is -60000.
    with np.errstate(over="ignore"):
        after = (wide["w"] - np.float32(expected)).astype(np.float16)
    assert_close(trainer.params["w"], after)


def test_the_optimizer_keeps_its_dtypes():
    params = {"w": np.ones(2, np.float16)}
    trainer = tr.Trainer(
        steep, optax.adam(1e-3), params, accumulation=tr.Accumulation(2, dtype=jnp.float32)
    )
    before = jax.tree.map(lambda leaf: leaf.dtype, trainer.state.optimizer_state)
    trainer.fit([(np.full(2, 3, np.float16),)] * 4, steps=2)
    after = jax.tree.map(lambda leaf: leaf.dtype, trainer.state.optimizer_state)
    assert before == after
    assert np.float16 in jax.tree.leaves(after)


# -- once a step --------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 1), (3, 1), (3, 2)])
def test_schedules_decay_averages_and_counters_tick_once_a_step(microbatches, replicas):
    optimizer = optax.chain(
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda count: -0.1 / (1 + count)),
        optax.ema(0.5),
    )
    trainer = tr.Trainer(
        lambda params, x, y: 0.0 * mlp_loss(params, x, y)[0],
        optimizer,
        mlp(),
        accumulation=microbatches,
        replicas=replicas,
        steps_per_execution=4,
    )
    trainer.fit(ELEMENTS, steps=6)
    counts = [
        int(leaf)
        for leaf in jax.tree.leaves(trainer.state.optimizer_state)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    assert counts
    assert set(counts) == {6}
    params, state = jax.tree.map(jnp.asarray, mlp()), optimizer.init(mlp())
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(6):
        updates, state = optimizer.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(trainer.params, params)


# -- optimizers that need the loss --------------------------------------------------------------


def plateau(rate=0.1, momentum=None):
    slower = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.02)
    return optax.chain(optax.sgd(rate, momentum), slower)


NEED_THE_LOSS = {
    "alone": (plateau, {}),
    "polyak": (lambda: optax.polyak_sgd(1.0), {}),
    "microbatches on replicas": (plateau, {"accumulation": 2, "replicas": 2}),
    "weighted": (plateau, {"accumulation": tr.Accumulation(2, weight=lambda x, y: jnp.ones(()))}),
    "sharded": (lambda: plateau(1e-4, 0.9), {"replicas": 2, "shard_optimizer_state": True}),
    "scaled": (plateau, {"loss_scale": 8.0}),
}


@pytest.mark.parametrize("case", NEED_THE_LOSS)
def test_optimizers_get_the_loss_of_the_step(case):
    optimizer, options = NEED_THE_LOSS[case]
    network = mlp(hidden=400) if case == "sharded" else mlp()  # small leaves are not sharded
    trainer = tr.Trainer(mlp_loss, optimizer(), network, **options)
    together = tr.Accumulation.of(options.get("accumulation")).microbatches
    together *= options.get("replicas", 1)
    history = trainer.fit(ELEMENTS, steps=len(ELEMENTS) // together)
    params, rule = network, optimizer()
    state = rule.init(params)
    gradient = jax.jit(jax.value_and_grad(lambda *given: mlp_loss(*given)[0]))
    for first in range(0, len(ELEMENTS), together):
        found = [gradient(params, *element) for element in ELEMENTS[first : first + together]]
        loss, grads = jax.tree.map(lambda *parts: sum(parts) / together, *found)
        updates, state = rule.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
    assert_close(trainer.params, params)
    assert_close(trainer.state.optimizer_state, state)
    if case != "polyak":
        assert state[1].scale < 1, "the rate was lowered"
    assert len(history.loss) == len(ELEMENTS) // together


def test_pipelines_do_not_give_the_loss():
    stages = tr.Pipeline([lambda w, x: x * w, lambda w, h: (h * w).mean()], accumulation=4)
    with pytest.raises(OptionError, match="In a pipeline the optimizer gets nothing but gradients"):
        tr.Trainer(stages, plateau(), [jnp.ones(()), jnp.ones(())])
