"""Trainers that differ in numbers only share one executable, and compute what the plain scan does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.jaxprs.free_numbers import free_numbers
from tailrace.jaxprs.value_graph import ValueGraph

pytestmark = pytest.mark.usefixtures("_promotion")
ROWS = np.random.default_rng(0).normal(size=(16, 8, 3)).astype(np.float32)


@pytest.fixture
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def params():
    rng = np.random.default_rng(1)
    return {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float32),
        "c": np.float32(0.7),
    }


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss with numbers of its own."""

    gain: float = 1.7
    decay: float = 0.013
    keep: float = 0.77

    def __call__(self, w, x):
        keep = jax.random.bernoulli(jax.random.key(3), self.keep, x.shape)
        hidden = self.gain * jnp.tanh(jnp.where(keep, x / self.keep, 0) @ w["a"] + w["b"])
        scores = jax.nn.log_softmax(hidden)
        return -scores[:, 0].mean() * w["c"] + self.decay * jnp.sum(w["a"] ** 2)


def plain(loss_fn, optimizer):
    def step(state, x):
        w, held = state
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        updates, held = optimizer.update(grads, held, w)
        return (optax.apply_updates(w, updates), held), loss

    w = jax.tree.map(jnp.asarray, params())
    scan = jax.jit(lambda state, xs: lax.scan(step, state, xs))
    (w, _), losses = scan((w, optimizer.init(w)), ROWS)
    return w, np.asarray(losses)


def trained(loss_fn, optimizer, **options):
    trainer = tr.Trainer(loss_fn, optimizer, params(), steps_per_execution=8, **options)
    return trainer, trainer.fit(iter(ROWS), steps=16).loss


OPTIMIZERS = {
    "sgd": lambda lr: optax.sgd(lr, momentum=1 - 3 * lr),
    "adamw": lambda lr: optax.adamw(lr, weight_decay=lr / 3, eps=lr / 1000),
    "clipped": lambda lr: optax.chain(optax.clip_by_global_norm(3 * lr), optax.adam(lr)),
    "rmsprop": lambda lr: optax.rmsprop(lr, momentum=0.71),
    "schedule": lambda lr: optax.lion(optax.cosine_decay_schedule(lr, 24)),
}


@pytest.mark.cpu  # a GPU chooses, for each program it compiles, how to compute matrix products
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_gives_what_the_plain_scan_gives(name):
    loss_fn, optimizer = Loss(gain=1.3, decay=0.0031), OPTIMIZERS[name](0.013)
    w, losses = plain(loss_fn, optimizer)
    trainer, found = trained(loss_fn, optimizer)
    assert_bits_equal(found, losses)
    assert_bits_equal(trainer.params, w)


def test_a_sweep_compiles_once(compilations):
    rates = [0.0123, 0.1 / 3, 0.3]
    losses = [
        trained(Loss(1 + rate), optax.adamw(rate, weight_decay=rate / 3), seed=number)[1][-1]
        for number, rate in enumerate(rates)
    ]
    assert len(compilations) == 1
    assert len(set(losses)) == 3
    trained(Loss(), optax.adamw(0.5))  # a power of two
    assert len(compilations) == 2
    trained(Loss(), optax.adamw(0.1, b1=0.8))
    assert len(compilations) == 3


def test_so_do_sweeps_over_replicas_with_taps_and_evaluation(compilations):
    def run(rate):
        trainer = tr.Trainer(
            Loss(),
            optax.adam(rate),
            params(),
            replicas=2,
            accumulation=2,
            observe=[tr.Tap("grad/*", mode=tr.every(2))],
        )
        trainer.fit(iter(ROWS), steps=4)
        return trainer.params, trainer.evaluate(list(ROWS), lambda w, x: rate * jnp.tanh(x).max())

    (first, one), (second, two) = run(0.013), run(0.03)
    assert len(compilations) == 2  # one to train, one to evaluate
    assert not np.array_equal(first["a"], second["a"])
    assert one["loss"] < two["loss"]


def test_so_do_optimizers_of_pipelines(compilations):
    def run(rate):
        trainer = tr.Trainer(
            tr.Pipeline([lambda w, x: jnp.tanh(x @ w), lambda w, h: ((h - w) ** 2).mean()],
                        accumulation=4, device_mapping=[0, 1]),
            optax.adam(rate),
            [params()["a"], params()["b"]],
        )  # fmt: skip
        return trainer.fit(iter(ROWS), steps=4).loss

    first, second = run(0.013), run(0.03)
    assert len(compilations) == 1
    assert not np.array_equal(first, second)


L = 0.3


def _scaled(x, y):
    return (L * jnp.tanh(x)).sum()


def _shifted(x, y):
    return jnp.exp(x + L)


def _bounded(x, y):
    return jnp.maximum(x, L)


def _twice(x, y):
    return 2.0 * (L * jnp.tanh(x))


def _folded_products(x, y):
    return (x * 2.1) * L


def _folded_sums(x, y):
    return (x + 2.1) + L


def _divided(x, y):
    return x / L


def _fused(x, y):
    return L * x + x * y


def _spread(x, y):
    return (L * x) * y.sum()


def _compared(x, y):
    return jnp.where(x.sum() < L, x, y)


def _computed(x, y):
    return x * jnp.sqrt(jnp.float32(L))


def _power(x, y):
    return x**L


def _branch(x, y):
    return lax.cond(x.sum() > 0, lambda: L * x, lambda: x)


def _of_nothing(x, y):
    return x * 2.1 + (x[:0].sum() + L) * 1.7


def _of_constants(x, y):
    return x + jnp.tanh(jnp.full(3, 0.2)) * L


def _written_there(x, y):
    return 0.3 * jnp.tanh(x)


FREE = [_scaled, _shifted, _bounded, _twice]
BOUND = [
    _of_nothing,
    _of_constants,
    _folded_products,
    _folded_sums,
    _divided,
    _fused,
    _spread,
    _compared,
    _power,
    _branch,
    _written_there,
]


@pytest.mark.parametrize("function", [*FREE, *BOUND], ids=lambda f: f.__name__)
def test_which_numbers_are_free(function):
    x = jnp.ones((4, 3))
    found = free_numbers(ValueGraph(jax.make_jaxpr(function)(x, x).jaxpr.eqns), on_cpu=True)
    assert [float(value) for value in found.values] == pytest.approx([L] * (function in FREE))


def test_on_an_accelerator_a_matrix_product_takes_a_factor_of_its_own():
    x = jnp.ones((3, 3))
    for on_cpu in (True, False):
        once = jax.make_jaxpr(lambda x: L * (x @ x))(x).jaxpr.eqns
        twice = jax.make_jaxpr(lambda x: (L * (x @ x), (x @ x).sum()))(x).jaxpr.eqns
        both = jax.make_jaxpr(lambda x: [L * (p := x @ x), p.sum()])(x).jaxpr.eqns
        assert len(free_numbers(ValueGraph(once), on_cpu).values) == on_cpu
        assert len(free_numbers(ValueGraph(twice), on_cpu).values) == on_cpu
        assert len(free_numbers(ValueGraph(both), on_cpu).values) == 1


def test_a_number_of_one_line_is_one_argument():
    def layer(x):
        return jnp.tanh(x) * L

    eqns = jax.make_jaxpr(lambda x: layer(layer(layer(x))).sum())(jnp.ones(3)).jaxpr.eqns
    found = free_numbers(ValueGraph(eqns), on_cpu=True)
    assert (len(found.values), len(found.places)) == (1, 3)
