"""Sums and means over replicas in every dtype, by every way that leads to one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import run, use

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import Variable, ipu_compiler, loops, optimizers, pipelining_ops
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue
from tailrace.compat.ipu.ops.cross_replica_ops import cross_replica_mean, cross_replica_sum

FLOATS = ["float32", "float16", "bfloat16"]
DTYPES = [*FLOATS, "int32", "uint32", "int8", "uint8", "bool"]
LARGE = {"float16": 40_000.0, "bfloat16": 1e37, "float32": 1e37, "int8": 100, "uint8": 200}
"""Large values; those of 16 and 8 bits have a mean of their dtype, and no sum."""


def values_of(dtype, replicas=2):
    """A value for each replica, among them the largest that have a mean."""
    large = LARGE.get(dtype, 3)
    return np.stack([np.asarray([large, n, 1]) for n in range(replicas)]).astype(jnp.dtype(dtype))


def mine(values):
    """The value of this replica."""
    return jnp.asarray(values)[tr.replica()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_is_that_of_jax_numpy(dtype):
    use(2)
    values = values_of(dtype)
    (found,) = run(lambda: cross_replica_mean(mine(values)))
    assert_bits_equal(found, jnp.mean(jnp.asarray(values), axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_keeps_its_dtype(dtype):
    use(2)
    values = values_of(dtype)[:, 1:]
    (found,) = run(lambda: cross_replica_sum(mine(values)))
    expected = values.sum(0) if dtype == "bool" else values[0] + values[1]
    assert_bits_equal(found, jnp.asarray(expected, jnp.int32 if dtype == "bool" else dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8", "uint8", "bool"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_of_neighbours(dtype, size):
    use(4)
    values = values_of(dtype, 4)[:, 1:]
    out = IPUOutfeedQueue()

    def body():
        x = mine(values)
        return out.enqueue([cross_replica_sum(x, size), cross_replica_mean(x, size, "named")])

    run(lambda: loops.repeat(1, body))
    found = [np.asarray(each)[0] for each in out.dequeue()]
    grouped = jnp.asarray(values).reshape(4 // size, size, -1)
    sums = grouped.sum(1, dtype=jnp.int32 if dtype == "bool" else dtype)
    expected = [jnp.repeat(each, size, axis=0) for each in (sums, grouped.mean(1))]
    assert_close(found, expected)
    assert [x.dtype for x in found] == [x.dtype for x in expected]


def test_the_second_argument_is_the_size_of_a_group():
    use(4)
    out = IPUOutfeedQueue()
    run(lambda: loops.repeat(1, lambda: out.enqueue(cross_replica_sum(tr.replica(), 2))))
    assert out.dequeue().tolist() == [[1, 1, 5, 5]]


def test_gradients_stay_in_their_group():
    use(4)
    weights = jnp.float32([1, 2, 3, 4])
    out = IPUOutfeedQueue()

    def loss(x):
        return cross_replica_sum(x * mine(weights), 2) * mine(weights)

    run(lambda: loops.repeat(1, lambda: out.enqueue(jax.grad(loss)(jnp.float32(1)))))
    # The gradient of a sum is the sum of the gradients: 1 * (1 + 2), 2 * (1 + 2), 3 * (3 + 4), ...
    assert out.dequeue().tolist() == [[3, 6, 21, 28]]


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        (3, ipu.errors.InvalidArgumentError, "must divide the number of replicas, 4. Received: 3"),
        (0, ipu.errors.InvalidArgumentError, "Received: 0"),
        ("sum", TypeError, "replica_group_size, a number of replicas, must be an integer"),
    ],
)
def test_a_group_divides_the_replicas(size, error, text):
    use(4)
    with pytest.raises(error, match=text):
        run(lambda: loops.repeat(1, lambda x: cross_replica_sum(x, size), [1.0]))


# -- what is made of means --------------------------------------------------------------------------


class Descent(optimizers.Optimizer):
    """Takes the gradient away."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            var.assign_sub(grad.astype(var.dtype))


def mean_after(dtype, gradients):
    """Zero, less the mean of the gradients."""
    return -jnp.mean(jnp.asarray(gradients).reshape(-1), axis=0).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("way", ["cross replica", "accumulated", "pipeline", "native", "strategy"])
def test_gradients_whose_sum_overflows_have_a_mean(dtype, way):
    use(4 if way == "pipeline" else 2)
    gradients = np.full(4, LARGE[dtype]).astype(jnp.dtype(dtype))
    expected = mean_after(dtype, gradients)
    assert_close(WAYS[way](dtype, gradients), expected)


def through_a_loop(make):
    def way(dtype, gradients):
        w = Variable(jnp.zeros((), dtype), name="w")
        queue = IPUInfeedQueue(iter(gradients.astype(np.float32)[:, None]))
        queue.initializer()
        optimizer = make(Descent())
        count = 2 if isinstance(optimizer, optimizers.GradientAccumulationOptimizerV2) else 1
        run(
            lambda: loops.repeat(
                count, lambda g: optimizer.minimize(w * g[0].astype(dtype)), [], queue
            )
        )
        return w.value()

    return way


def pipelined(dtype, gradients):
    w = Variable(jnp.zeros((), dtype), name="w")
    queue = IPUInfeedQueue(iter(gradients.astype(np.float32)[:, None]))
    queue.initializer()

    def net():
        return pipelining_ops.pipeline(
            [lambda g: w * g[0].astype(dtype), lambda loss: loss.astype(jnp.float32)],
            2,
            infeed_queue=queue,
            outfeed_queue=IPUOutfeedQueue(),
            optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(Descent(), loss),
            pipeline_schedule=pipelining_ops.PipelineSchedule.Sequential,
            reduction_method="mean",
        )

    ipu_compiler.compile(net)()
    return w.value()


def native(dtype, gradients):
    trainer = tr.Trainer(
        lambda w, g: w * g[0],
        optax.sgd(1.0),
        jnp.zeros((), dtype),
        replicas=2,
        accumulation=tr.Accumulation(2, reduction="mean"),
    )
    trainer.fit([jnp.asarray(g)[None] for g in gradients], steps=1)
    return trainer.params


def by_strategy(dtype, gradients):
    from tailrace.compat.ipu.ipu_strategy import IPUStrategy

    return -IPUStrategy().run(
        lambda: IPUStrategy().all_reduce("mean", mine(jnp.asarray(gradients)))
    )


WAYS = {
    "cross replica": through_a_loop(optimizers.CrossReplicaOptimizer),
    "accumulated": through_a_loop(
        lambda opt: optimizers.CrossReplicaGradientAccumulationOptimizerV2(
            opt, 2, reduction_method="mean"
        )
    ),
    "pipeline": pipelined,
    "native": native,
    "strategy": by_strategy,
}


# -- how many replicas there are --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "replicas"), [([0, 1], 2), ([0, 1, 2], 1), ([[0, 1], 1], 2), ([0], 4)]
)
def test_shards_of_a_program_leave_fewer_replicas(shards, replicas, caplog):
    use(4)
    out = IPUOutfeedQueue()

    def body():
        x = jnp.float32(1)
        for shard in shards:
            with ipu.scopes.ipu_shard(shard):
                x = x + 1
        return out.enqueue(cross_replica_sum(x))

    run(lambda: loops.repeat(1, body))
    total = np.float32(replicas * (1 + len(shards)))
    assert np.ravel(out.dequeue()).tolist() == [total] * replicas
    assert "ipu_shard spread the operations" in caplog.text


@pytest.mark.parametrize("index", [-1, "0", True, [], [0, None]])
def test_a_shard_is_a_number(index):
    with (
        pytest.raises(ValueError, match="ipu_shard takes the number of a device"),
        ipu.scopes.ipu_shard(index),
    ):
        pass
