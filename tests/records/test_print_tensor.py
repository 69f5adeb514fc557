"""`tr.print_tensor`: once for each value that is made, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import OptionError, ProgramError


def lines(capfd):
    jax.effects_barrier()
    return [line for line in capfd.readouterr().err.splitlines() if ":" in line]


def test_forward_and_gradient_once_for_each_pass(capfd):
    def body(x):
        def loss(w):
            h = tr.print_tensor(x * w, "h")
            tr.print_tensor(h + 1, "unused")
            return h**2

        return x + jax.grad(loss)(1.0)

    result = tr.compile(lambda x: tr.repeat(2, body, x))(1.0)
    # x = 1: h = 1, gradient of the loss in h = 2; x becomes 1 + 2 * 1.
    assert lines(capfd) == [
        "h: 1.000",
        "unused: 2.000",
        "h_gradient: 2.000",
        "h: 3.000",
        "unused: 4.000",
        "h_gradient: 6.000",
    ]
    assert float(result) == 21.0


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_inside_transformations_it_prints_once(wrap, capfd):
    def loss(w):
        return (wrap(lambda w: tr.print_tensor(w * 2, "w", print_gradient=False))(w) ** 2).sum()

    tr.compile(jax.grad(loss))(3.0)
    assert lines(capfd) == ["w: 6.000"]


def test_in_a_scan_over_layers(capfd):
    def loss(ws):
        def layer(h, w):
            return tr.print_tensor(h * w, "layer"), None

        return jax.lax.scan(layer, jnp.float32(1), ws)[0]

    tr.compile(jax.grad(loss))(jnp.array([2.0, 3.0]))
    assert lines(capfd) == [
        "layer: 2.000",
        "layer: 6.000",
        "layer_gradient: 1.000",
        "layer_gradient: 3.000",
    ]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_unused_in_loops_that_are_differentiated(wrap, capfd):
    def layer(h, w):
        tr.print_tensor(h + 10 * w, "scan")
        return h * w, None

    def half(_, h):
        tr.print_tensor(h, "fori")
        return h / 2

    @wrap
    def loss(ws):
        h, _ = jax.lax.scan(layer, jnp.float32(1), ws)
        return jax.lax.fori_loop(0, 2, half, h)

    found = tr.compile(jax.grad(loss))(jnp.array([2.0, 3.0]))
    assert lines(capfd) == ["scan: 21.00", "scan: 32.00", "fori: 6.000", "fori: 3.000"]
    assert_bits_equal(found, np.float32([0.75, 0.5]))


def test_in_a_trainer_once_for_each_microbatch(capfd):
    def loss_fn(w, x):
        return tr.print_tensor((x * w).mean(), "mean", print_gradient=False)

    trainer = tr.Trainer(loss_fn, optax.sgd(0.0), jnp.ones(()), accumulation=2)
    trainer.fit([np.full(3, i, np.float32) for i in range(4)], steps=2)
    assert lines(capfd) == ["mean: 0.000", "mean: 1.000", "mean: 2.000", "mean: 3.000"]


def test_replicas_say_who_they_are(capfd):
    infeed = tr.InfeedQueue([np.float32(1), np.float32(2)])

    def body(total, x):
        return total + tr.cross_replica_sum(tr.print_tensor(x, "x"))

    tr.compile(lambda t: tr.repeat(1, body, t, infeed=infeed), replicas=2)(0.0)
    assert sorted(lines(capfd)) == ["x (replica 0): 1.000", "x (replica 1): 2.000"]


def test_outside_a_program(capfd):
    assert tr.print_tensor(np.float32([1, 2]), "x", digits=3) is not None
    assert lines(capfd) == ["x: (1.00, 2.00)"]
    with pytest.raises(ProgramError, match="prints an array. Received: dict"):
        tr.print_tensor({"a": 1})
    with pytest.raises(OptionError, match=r"title is a text. Received: title=array\("):
        tr.print_tensor(jnp.ones(2), title=np.ones(2))
    with pytest.raises(OptionError, match=r"print_gradient is True or False. Received: .*array\("):
        tr.print_tensor(jnp.ones(2), print_gradient=np.ones(2))
    with pytest.raises(OptionError, match="float_format is one of"):
        tr.print_tensor(1.0, float_format="octal")


def test_in_a_plain_jit_it_prints_too(capfd):
    """Outside of any program of ours, by JAX's own callback; the result is the plain one."""

    def loss(w, x):
        return (tr.print_tensor(w * x, "product") ** 2).sum()

    found = jax.jit(jax.value_and_grad(loss))(jnp.float32(2), jnp.float32(3))
    jax.effects_barrier()
    assert sorted(lines(capfd)) == ["product: 6.000", "product_gradient: 12.00"]
    assert [float(value) for value in found] == [36.0, 36.0]
    jax.jit(lambda n: tr.print_tensor(n, "count"))(jnp.int32(4))
    jax.effects_barrier()
    assert lines(capfd) == ["count: 4"]
