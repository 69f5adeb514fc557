"""Counts as programs of the original give them: integers of Python and numpy, inputs of the program."""

import jax.numpy as jnp
import numpy as np
import pytest
from counting import infeed, run, use

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, loops, pipelining_ops
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue

KINDS = {
    "int": int,
    "int32": np.int32,
    "int64": np.int64,
    "array": lambda n: np.asarray(n, np.int32),
    "jax": jnp.int32,
}


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("given", ["from around", "as an input"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_passes_of_a_loop(kind, given, fed):
    queue, passes = infeed(10) if fed else None, kind(4)

    def body(v, *x):
        return v + (x[0] if x else 1)

    def net(v, *n):
        return loops.repeat(n[0] if n else passes, body, [v], queue)

    inputs = [0.0, passes] if given == "as an input" else [0.0]
    assert run(net, *inputs)[0] == (6 if fed else 4)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("given", ["from around", "as an input"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_mini_batches_of_a_pipeline(kind, given, trains):
    use(2)
    out = IPUOutfeedQueue()
    w = ipu.Variable(2.0, name="w")
    counts = kind(4), kind(3)

    class Descent(ipu.optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            for grad, var in grads_and_vars:
                var.assign_sub(0.5 * grad)

    def net(x, *n):
        count, repeats = n or counts
        return pipelining_ops.pipeline(
            [lambda x: w * x, lambda y: y + 1],
            count,
            repeat_count=repeats,
            inputs=[x],
            outfeed_queue=out,
            optimizer_function=(
                lambda loss: pipelining_ops.OptimizerFunctionOutput(Descent(), loss)
            )
            if trains
            else None,
        )

    inputs = [1.5, *counts] if given == "as an input" else [1.5]
    program = ipu_compiler.compile(net, inputs)
    program()
    found = out.dequeue()
    assert np.shape(found[0] if isinstance(found, list) else found) == (12,)
    if trains:
        assert w.value() == 2 - 3 * 0.5 * 1.5 * 4


def test_another_count_for_the_same_program():
    out = IPUOutfeedQueue()
    queue = infeed(10)

    def net(n):
        return loops.repeat(n, lambda x: out.enqueue(x), [], queue)

    program = ipu_compiler.compile(net, [np.int32(2)])
    for count in (2, 3, 2):
        program(np.int32(count))
        assert len(out.dequeue()) == count


@pytest.mark.parametrize("count", [2.0, np.float32(2), [2], "2"])
def test_a_count_is_an_integer(count):
    with pytest.raises(TypeError, match="A count is an integer. Received"):
        run(lambda: loops.repeat(count, lambda: None))
    with pytest.raises(TypeError, match="A count is an integer. Received"):
        run(lambda: pipelining_ops.pipeline([lambda: 1.0, lambda x: x], count))


def test_a_count_that_only_the_program_knows():
    use(2)
    with pytest.raises(tr.TailraceError, match="gradient_accumulation_count of a pipeline must be"):
        run(lambda x: pipelining_ops.pipeline([lambda: 1.0, lambda y: y], x.astype(int)), 4.0)
