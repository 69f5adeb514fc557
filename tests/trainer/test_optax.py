"""Everything that optax exports: equal to the plain loop, bit for bit, or refused by a sentence."""

import inspect
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_loss, plain_scan, regression
from tailrace.errors import OptionError

ELEMENTS = regression(6)

GIVEN = {
    "base_optimizer": optax.sgd(0.1, 0.9),
    "adv_optimizer": optax.sgd(0.05),
    "b1": 0.9,
    "clipping": 0.1,
    "decay": 0.9,
    "inner": optax.sgd(0.1, 0.9),
    "k": 3,
    "learning_rate": 0.05,
    "max_backtracking_steps": 4,
    "max_consecutive_errors": 2,
    "max_delta": 0.1,
    "max_linesearch_steps": 4,
    "max_norm": 0.1,
    "momentum": 0.9,
    "optimizer": optax.sgd(0.1, 0.9),
    "opt": optax.sgd(0.1),
    "eta": 0.01,
    "gamma": 0.5,
    "key": 1,
    "step_size": -0.1,
    "step_size_fn": lambda count: -0.1,
    "threshold": 0.1,
    "weight_decay": 0.1,
}
"""Arguments of optimizers, by name."""

SEARCH = ("value", "grad", "value_fn")
NEEDS = {
    "lbfgs": SEARCH,
    "scale_by_backtracking_linesearch": SEARCH,
    "scale_by_zoom_linesearch": SEARCH,
    "polyak_sgd": ("value",),
    "scale_by_polyak": ("value",),
    "momo": ("value",),
    "momo_adam": ("value",),
    "reduce_on_plateau": ("value",),
    "hutchinson_estimator_diag_hessian": ("obj_fn",),
    "sophia": ("obj_fn",),
    "sam in one step": ("grad_fn",),
}
"""The extra arguments of those that need some."""

APART = {
    "lookahead": "has parameters of its own",
    "differentially_private_aggregate": "refused",
    "dpsgd": "refused",
    "scale_by_muon": "takes a tree that only optax.contrib.muon makes",
}


def exported():
    """What optax and optax.contrib export and what can be made of the arguments above."""
    found = {
        "multi steps of one": optax.MultiSteps(optax.sgd(0.1, 0.9), 1),
        "multi steps": optax.MultiSteps(optax.sgd(0.1, 0.9), 3),
        "sam in one step": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
    }
    for module in (optax, optax.contrib):
        for name, made in inspect.getmembers(module, inspect.isfunction):
            wanted = [
                p.name
                for p in inspect.signature(made).parameters.values()
                if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
            ]
            if name in APART or name.startswith("_") or not set(wanted) <= set(GIVEN):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    optimizer = made(**{each: GIVEN[each] for each in wanted})
                except Exception:  # not one that makes an optimizer
                    continue
            if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
                found[name] = optimizer
    return found


OPTIMIZERS = exported()

ROUNDED = {"adan", "scale_by_adan", "adaptive_grad_clip"}
"""Those in which XLA's CPU compiler fuses differently around a loop of another form."""


def case(name):
    """Parts of optimizers that are in the table themselves are for the whole product."""
    part = name.startswith(("scale_by", "schedule_free_", "add_", "clip", "normal", "momo_"))
    return pytest.param(name, marks=pytest.mark.exhaustive if part else ())


@pytest.fixture(autouse=True)
def promoting():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scanned(optimizer, needs):
    """Parameters, state and losses of a hand-written scan."""

    def one(carry, x, y):
        params, state = carry

        def value_fn(params):
            return mlp_loss(params, x, y)[0]

        value, grads = jax.value_and_grad(value_fn)(params)
        known = {
            "value": value,
            "grad": grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, _: jax.grad(value_fn)(params),
        }
        updates, after = optimizer.update(
            grads, state, params, **{name: known[name] for name in needs}
        )
        after = jax.tree.map(lambda now, old: now.astype(jnp.asarray(old).dtype), after, state)
        return (optax.apply_updates(params, updates), after), value

    params = jax.tree.map(jnp.asarray, mlp())
    state = jax.tree.map(jnp.asarray, optimizer.init(params))
    (params, state), losses = plain_scan(one, (params, state), ELEMENTS)
    return params, state, losses


def without_keys(tree):
    def one(leaf):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if keys else leaf

    return jax.tree.map(one, tree)


@pytest.mark.parametrize("name", [case(name) for name in OPTIMIZERS])
def test_equal_to_the_plain_loop(name):
    trainer = tr.Trainer(mlp_loss, OPTIMIZERS[name], mlp(), steps_per_execution=3)
    history = trainer.fit(ELEMENTS, steps=6, progress=False)
    params, state, losses = scanned(OPTIMIZERS[name], NEEDS.get(name, ()))
    assert_equal = assert_close if name in ROUNDED else assert_bits_equal
    assert_equal(trainer.params, params)
    assert_equal(without_keys(trainer.state.optimizer_state), without_keys(state))
    assert_equal(history.loss, losses)


def test_most_of_optax_is_in_the_table():
    assert len(OPTIMIZERS) > 100
    assert set(NEEDS) <= set(OPTIMIZERS)
    assert {"adam", "muon", "prodigy", "schedule_free", "apply_if_finite"} <= set(OPTIMIZERS)


def test_lookahead_trains_fast_parameters_and_evaluates_slow_ones():
    optimizer = optax.lookahead(optax.sgd(0.1, 0.9), 3, 0.5)
    start = optax.LookaheadParams.init_synced(mlp())
    trainer = tr.Trainer(mlp_loss, optimizer, start)
    trainer.fit(ELEMENTS, steps=5, progress=False)

    def one(carry, x, y):
        params, state = carry
        grads = jax.grad(mlp_loss, has_aux=True)(params.fast, x, y)[0]
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jax.tree.map(jnp.asarray, start)
    (params, state), _ = plain_scan(one, (start, optimizer.init(start)), ELEMENTS[:5])
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(trainer.state.optimizer_state, state)
    slow = tr.Trainer(mlp_loss, optax.sgd(0.1), params.slow).evaluate(ELEMENTS)
    assert trainer.evaluate(ELEMENTS) == slow
    with pytest.raises(OptionError, match="Received: another optimizer"):
        tr.Trainer(mlp_loss, optax.sgd(0.1), start)
    with pytest.raises(OptionError, match=r"optax.LookaheadParams.init_synced\(params\)"):
        tr.Trainer(mlp_loss, optimizer, mlp())


def test_multi_steps(caplog):
    with caplog.at_level(logging.WARNING, "tailrace"):
        one = tr.Trainer(mlp_loss, optax.MultiSteps(optax.sgd(0.1, 0.9), 1), mlp())
        assert not caplog.records
        tr.Trainer(mlp_loss, optax.MultiSteps(optax.sgd(0.1, 0.9), 3), mlp())
    assert "Trainer(accumulation=...) does it once, and is cheaper" in caplog.text
    bare = tr.Trainer(mlp_loss, optax.sgd(0.1, 0.9), mlp())
    for trainer in (one, bare):
        trainer.fit(ELEMENTS, steps=6, progress=False)
    assert_bits_equal(one.params, bare.params)


def test_multi_steps_in_a_pipeline():
    stages = [
        lambda w, x, y: (jnp.tanh(x * w), y),
        lambda w, h, y: ((h.sum(-1) * w - y) ** 2).mean(),
    ]
    start = [np.float32(1), np.float32(0.5)]

    def whole(params, x, y):
        return stages[1](params[1], *stages[0](params[0], x, y))

    optimizer = optax.MultiSteps(optax.sgd(0.1, 0.9), 2)
    pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 0])
    trainers = [
        tr.Trainer(pipeline, optimizer, start),
        tr.Trainer(whole, optimizer, start, accumulation=4),
    ]
    for trainer in trainers:
        trainer.fit(ELEMENTS * 2, steps=3, progress=False)
    assert_close(trainers[0].params, trainers[1].params)


class Compared(optax.GradientTransformationExtraArgs):
    """Plain descent that keeps how far the loss and gradient at the same point are from the step's."""

    def __new__(cls):
        def update(grads, state, params, *, value, grad, value_fn):
            again, slope = jax.value_and_grad(value_fn)(params)
            parts = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), slope, grad))
            updates = jax.tree.map(lambda g: -0.1 * g, grads)
            return updates, jnp.stack([jnp.abs(again - value), *parts])

        return super().__new__(cls, lambda params: jnp.ones(4), update)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_scale": 8.0},
        {"offload_optimizer_state": True},
        {"precision": "bfloat16"},
        {"observe": ["activation/*", "grad/*"]},
    ],
)
def test_a_loss_evaluated_again_is_the_same(options):
    """The same batch, state and keys; nothing of it is listed a second time."""

    def loss_fn(params, state, x, y):
        noise = jax.random.normal(tr.key(), x.shape, x.dtype)
        loss, aux = mlp_loss(params, x + noise * state.astype(x.dtype), y)
        return loss, (state + 1, aux)

    trainer = tr.Trainer(loss_fn, Compared(), mlp(), model_state=jnp.float32(0), **options)
    plain = tr.Trainer(loss_fn, optax.sgd(0.1), mlp(), model_state=jnp.float32(0), **options)
    found = trainer.fit(ELEMENTS, steps=5, progress=False)
    expected = plain.fit(ELEMENTS, steps=5, progress=False)
    assert_bits_equal(found.loss, expected.loss)
    assert_bits_equal(trainer.state.optimizer_state, np.zeros(4, np.float32))
    assert float(trainer.model_state) == 5
    kinds = [[e.name for e in t.tensors() if e.kind == "activation"] for t in (trainer, plain)]
    assert kinds[0] == kinds[1]


def test_what_is_refused():
    per_example = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=1)
    with pytest.raises(OptionError, match=r"gradient of each example.*tr.Trainer.from_step"):
        tr.Trainer(mlp_loss, optax.chain(per_example, optax.sgd(0.1)), mlp())
    for options in ({"accumulation": 2}, {"replicas": 2}):
        with pytest.raises(OptionError, match="by value_fn=, as a line search does"):
            tr.Trainer(mlp_loss, optax.lbfgs(), mlp(), **options)
    stages = tr.Pipeline([lambda w, x: x * w, lambda w, h: (h * w).mean()], accumulation=4)
    with pytest.raises(OptionError, match="Received: one that needs value, grad, value_fn"):
        tr.Trainer(stages, optax.lbfgs(), [jnp.ones(()), jnp.ones(())])

    def update(grads, state, params, *, temperature):
        return grads, state

    other = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(OptionError, match="required keyword-only argument: 'temperature'"):
        tr.Trainer(mlp_loss, other, mlp())


@pytest.mark.parametrize("start", [0, 0.0, jnp.int32(0)])
def test_numbers_in_a_state_are_promoted_as_in_a_scan(start):
    """An int of Python's that is counted in halves stayed 0; one that has a dtype keeps it."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g * (1 + state), grads), state + jnp.float32(0.5)

    optimizer = optax.GradientTransformation(lambda params: start, update)
    trainer = tr.Trainer(mlp_loss, optimizer, mlp())
    trainer.fit(ELEMENTS, steps=4, progress=False)
    has_dtype = hasattr(start, "dtype")
    assert float(trainer.state.optimizer_state) == (0 if has_dtype else 2)
    if not has_dtype:
        plain = jnp.float32(start)
        params, state, _ = scanned(optimizer._replace(init=lambda params: plain), ())
        other = tr.Trainer(mlp_loss, optimizer, mlp())
        other.fit(ELEMENTS, steps=6, progress=False)
        assert_bits_equal(other.params, params)
        assert_bits_equal(other.state.optimizer_state, state)
