"""Taps never change a bit: parameters and losses are the same with and without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_steps import elements, loss_fn, network

import tailrace as tr
from oracles import assert_bits_equal

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
}

STACK = {
    "stack": np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32),
    "out": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32),
}

EVERYTHING = {
    "stats": [tr.Tap("*")],
    "tensor": [tr.Tap("*", reduce="tensor")],
    "histogram": [tr.Tap(["grad/*", "activation/*"], reduce="histogram")],
    "sum": [tr.Tap("*", mode="sum", reduce="tensor")],
    "final": [tr.Tap("*", mode="final", reduce="norm")],
    "every": [tr.Tap("*", mode=tr.every(3))],
    "two": [tr.Tap("*", mode=tr.every(2), reduce="norm"), tr.Tap("grad/*", reduce="tensor")],
    "gradients": [tr.Tap("grad/*")],
}


def trained(loss, data, params, observe, optimizer="momentum", steps=7, **options):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes in some of its rules
        trainer = tr.Trainer(
            loss, OPTIMIZERS[optimizer](), params, steps_per_execution=4, observe=observe, **options
        )
        history = trainer.fit(data, steps=steps)
    assert bool(observe) == bool(len(trainer.records))
    return trainer.state, np.asarray(history.loss)


@functools.cache
def untapped(loss):
    """The state and the losses without any tap."""
    return trained(loss, elements(7), network() if loss is loss_fn else STACK, ())


@pytest.mark.parametrize("taps", EVERYTHING)
def test_whatever_is_tapped(taps):
    assert_bits_equal(trained(loss_fn, elements(7), network(), EVERYTHING[taps]), untapped(loss_fn))


@pytest.mark.parametrize(("optimizer", "seed"), [("sgd", 1), ("adam", 2), ("clipped", 3)])
def test_whatever_trains(optimizer, seed):
    data, params = elements(7, seed), network(seed)
    plain = trained(loss_fn, data, params, (), optimizer)
    assert_bits_equal(trained(loss_fn, data, params, [tr.Tap("*")], optimizer), plain)


@pytest.mark.parametrize(("microbatches", "replicas"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("taps", ["stats", "every"])
def test_with_microbatches_and_replicas(taps, microbatches, replicas):
    options = {"accumulation": microbatches, "replicas": replicas, "steps": 5}
    data = elements(5 * microbatches * replicas)
    plain = trained(loss_fn, data, network(), (), **options)
    assert_bits_equal(trained(loss_fn, data, network(), EVERYTHING[taps], **options), plain)


def noisy(params, x, y):
    """A loss with dropout, a scan of layers, recomputation, a branch and a loop."""

    def layer(h, w):
        with jax.named_scope("layer"):
            return jnp.tanh(h @ w), None

    keep = jax.random.bernoulli(tr.key(), 0.7, x.shape)
    h, _ = jax.lax.scan(jax.checkpoint(layer), jnp.where(keep, x, 0.0), params["stack"])
    h = jax.lax.cond(h.sum() > 0, lambda h: h * 1.5, lambda h: jnp.sin(h), h)
    noise = jax.random.normal(tr.key(), h.shape) * 0.01
    h = jax.nn.gelu(h @ params["out"]) + noise[:, :2]
    return ((h - y) ** 2).mean()


@pytest.mark.parametrize("taps", ["stats", "tensor", "gradients"])
def test_random_keys_branches_and_recomputation(taps):
    assert_bits_equal(trained(noisy, elements(7), STACK, EVERYTHING[taps]), untapped(noisy))


def summed(params, x, y):
    """A gradient that is a product with a vector, which XLA adds to a sum in one kernel."""
    with jax.named_scope("hidden"):
        hidden = tr.stage_boundary(jnp.tanh(x @ params["stack"][0]))
    return ((hidden @ params["out"][:, 0] - y[:, 0]) ** 2).mean()


@pytest.mark.parametrize("staged", [False, True])
def test_gradients_that_are_summed(staged):
    accumulation = tr.Accumulation(4, reduction="sum")

    def run(taps):
        model = tr.Pipeline(summed, accumulation=accumulation) if staged else summed
        options = {} if staged else {"accumulation": accumulation}
        return trained(model, elements(20), STACK, taps, "adam", steps=5, **options)

    plain = run(())
    assert_bits_equal(run(EVERYTHING["gradients"]), plain)


def normalized(params, x, y):
    """`jnp.var` is a jit of its own: differentiation adds up what flows back through it first."""
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["stack"][0])
    with jax.named_scope("norm"):
        h = tr.stage_boundary(h)
        h = (h - jnp.mean(h, axis=0)) * jax.lax.rsqrt(jnp.var(h, axis=0) + 1e-3)
    return ((h @ params["out"] - y) ** 2).mean()


@pytest.mark.parametrize("staged", [False, True])
def test_inside_functions_that_are_jitted(staged):
    def run(taps):
        model = tr.Pipeline(normalized, accumulation=4) if staged else normalized
        return trained(model, elements(20), STACK, taps, "sgd", steps=5)

    inside = tr.Tap(["activation/norm:var/square", "cotangent/norm:var/square"])
    assert_bits_equal(run([inside]), run(()))


def constants(params, x, y):
    """Programs inside that return constants: literals, not values."""
    h = x @ params["out"]
    h = h + jax.lax.cond(x.min() < 0, lambda: 0.5, lambda: 0.0)
    h = h + jax.lax.switch(jnp.int32(x[0, 0] > 0), [lambda: 1.0, lambda: 2.0])
    carry, ones = jax.lax.scan(lambda c, row: (c * row.sum(), 1.0), params["stack"][0, 0, 0], x)
    return ((h - y) ** 2).mean() * jax.jit(lambda: 2.0)() + jnp.tanh(carry) * ones.sum()


@pytest.mark.parametrize("taps", ["stats", "gradients"])
def test_constants_that_inner_programs_return(taps):
    assert_bits_equal(trained(constants, elements(7), STACK, EVERYTHING[taps]), untapped(constants))


def means(params, x, y):
    """A sum of numbers, in which a product that is written to memory is rounded before it is added."""
    found = [params["stack"], params["out"], x, y, params["stack"]]
    sums = 0.0
    for each in found:
        sums = sums + jnp.tanh(each).mean()
    return sums


@pytest.mark.parametrize("reduce", ["norm", "tensor"])
def test_the_last_of_each_number(reduce):
    taps = [tr.Tap("activation/*", mode="final", reduce=reduce)]
    assert_bits_equal(trained(means, elements(7), STACK, taps), untapped(means))


SINGLE = {"scale": np.float32(0.7), "shift": np.full(1, 0.3, np.float32), "out": STACK["out"]}


def scaled(params, x, y):
    return ((params["scale"] * jnp.tanh(x @ params["out"]) + params["shift"] * 0.3 - y) ** 2).mean()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_parameters_of_a_single_value(optimizer):
    plain = trained(scaled, elements(7), SINGLE, (), optimizer)
    for taps in ("stats", "histogram", "final"):
        found = trained(scaled, elements(7), SINGLE, EVERYTHING[taps], optimizer)
        assert_bits_equal(found, plain)


def test_rows_of_a_scan_in_a_checkpoint_that_nothing_reads():
    @jax.checkpoint
    def last(b):
        one_pass = lambda c, _: (jnp.tanh(b + 2), b + 0.5)  # noqa: E731
        return jax.lax.scan(one_pass, b, None, 3, reverse=True)[0]

    def loss(params, x, y):
        return ((last(params["out"][0]) - y) ** 2).mean()

    taps = [tr.Tap("cotangent/*")]
    assert_bits_equal(
        trained(loss, elements(7), STACK, taps), trained(loss, elements(7), STACK, ())
    )


def staged(params, x, y):
    """The parameters of both stages are cast before the first one."""
    with jax.named_scope("first"):
        h = tr.stage_boundary(jnp.tanh(x @ params["stack"][0] + params["stack"][1, 0]))
    with jax.named_scope("second"):
        return ((h @ params["out"][:, 0] - y[:, 0]) ** 2).mean()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_stages_of_narrow_floats(precision):
    def run(taps):
        model = tr.Pipeline(staged, accumulation=4)
        return trained(model, elements(20), STACK, taps, "adam", steps=5, precision=precision)

    plain = run(())
    for taps in (["activation/*"], ["cotangent/*"]):
        assert_bits_equal(run(taps), plain)


def test_a_cast_that_two_stages_use():
    def shared(params, x, y):
        h = tr.stage_boundary(jnp.tanh(x @ params["stack"][0]))
        return ((jnp.tanh(h @ params["stack"][0]) @ params["out"] - y) ** 2).mean()

    def run(taps):
        trainer = tr.Trainer(
            tr.Pipeline(shared, accumulation=4),
            optax.sgd(0.1),
            STACK,
            observe=taps,
            precision="bfloat16",
        )
        trainer.fit(elements(4), steps=1)
        return trainer

    plain, tapped = run(()), run([tr.Tap(["cotangent/:convert_element_type*"], reduce="tensor")])
    assert_bits_equal(tapped.state, plain.state)
    # As of a weight that several stages use: each has a gradient of its own.
    parts = [f"cotangent/:convert_element_type.1@{stage}" for stage in (0, 1)]
    assert set(parts) <= set(tapped.records.names), tapped.records.names
    assert tapped.records[parts[0]].values.any()
    assert tapped.records[parts[1]].values.any()


def test_the_result_of_an_observed_function():
    def step(params, x, y):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, aux

    x, y = elements(1)[0]
    plain = jax.jit(step)(network(), x, y)
    observed, records = tr.observe(step, [tr.Tap("*", reduce="tensor"), "*"])(network(), x, y)
    assert_bits_equal(observed, plain)
    assert len(records) > 20
