"""Gradients of activations, and values of earlier passes."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import infeed, run

from oracles import assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import Variable, ipu_compiler, loops, optimizers
from tailrace.compat.ipu.eager.backprop import GradientCaptureContext, GradientCaptureTape
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue
from tailrace.compat.ipu.ops.grad_util_ops import capture_upstream_gradients
from tailrace.compat.ipu.ops.internal_ops import fifo


def test_a_tape_captures_what_flows_back():
    w = Variable(2.0)

    def net():
        with GradientCaptureTape() as tape:
            h = capture_upstream_gradients(w * 3.0, tag="h")
            loss = h * h
        return [loss, tape.gradient(loss, w), *tape.captured_gradients["h"]]

    # loss = (3w)^2: 36; d/dw = 2 * 6 * 3; d/dh = 2 * 6
    assert run(net) == [36, 36, 12]


def test_a_context_captures_for_an_optimizer():
    w, seen, queue = Variable(1.0), IPUOutfeedQueue(), infeed(4)
    opt = optimizers.IpuOptimizer(optax.sgd(0.1))

    def body(x):
        with GradientCaptureContext() as context:
            h = capture_upstream_gradients({"a": w * x}, tag="h")
            done = opt.minimize(h["a"] ** 2)
        return done, seen.enqueue(context.captured_gradients["h"])

    run(lambda: loops.repeat(4, body, [], queue))
    value, expected = 1.0, []
    for x in range(4):
        expected.append(2 * value * x)
        value -= 0.1 * 2 * value * x * x
    (found,) = seen.dequeue()
    assert_close(found, np.float32(expected))
    assert_close(w.value(), jnp.float32(value))


def test_rules_of_capturing():
    with pytest.raises(RuntimeError, match="may only be used within the context of"):
        run(lambda: capture_upstream_gradients(jnp.float32(1)))

    def twice():
        with GradientCaptureTape():
            capture_upstream_gradients(jnp.float32(1), tag="a")
            capture_upstream_gradients(jnp.float32(1), tag="a")

    with pytest.raises(ValueError, match="under the tag 'a' already"):
        run(twice)
    assert ipu.ops.grad_util_ops.capture_upstream_gradients is capture_upstream_gradients
    assert ipu.eager.backprop.GradientCaptureTape is GradientCaptureTape


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_fifo_returns_what_came_before(depth):
    out, queue = IPUOutfeedQueue(), infeed(100, (2,))
    program = ipu_compiler.compile(
        lambda: loops.repeat(4, lambda x: out.enqueue(fifo(x + 1, depth)), [], queue)
    )
    program()
    program()
    expected = np.concatenate([np.zeros(depth), np.arange(1, 9)])[:8]
    np.testing.assert_array_equal(out.dequeue()[:, 0], expected.astype(np.float32))
