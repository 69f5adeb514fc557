"""The closed-form examples of the original's pipelines."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import infeed, run, use

import tailrace as tr
from oracles import assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import Variable, config, ipu_compiler, ipu_infeed_queue, loops, optimizers
from tailrace.compat.ipu.graph.named_variables import forget_variables, get_variable, variable_scope
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from tailrace.compat.ipu.pipelining_ops import (
    OptimizerFunctionOutput,
    PipelineSchedule,
    RecomputationMode,
    get_current_iteration_counter,
    pipeline,
    recomputation_checkpoint,
)

SCHEDULES = list(PipelineSchedule)


def same(*values):
    return values


def plus_one(x):
    return x + 1


def descent(rate, **options):
    return lambda loss, *_: OptimizerFunctionOutput(optax.sgd(rate), loss, **options)


# -- training -------------------------------------------------------------------------------------


def test_an_optimizer_with_a_variable_of_its_own():
    """Example 1: w -= 0.5 * (g + p)."""
    use(4)
    w, p = Variable(1.0, name="w"), Variable(2.0, trainable=False, name="p")

    class Pulled(optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            for grad, var in grads_and_vars:
                var.assign_sub(0.5 * (grad + p))

    program = ipu_compiler.compile(
        lambda x: pipeline(
            [lambda x: w * x, same, same, same],
            gradient_accumulation_count=8,
            inputs=[x],
            optimizer_function=lambda loss: OptimizerFunctionOutput(Pulled(), loss),
            outfeed_queue=IPUOutfeedQueue(IPUOutfeedMode.LAST),
        ),
        [1.0],
    )
    assert program() is None
    assert float(w) == -4
    p.assign(4)
    program()
    assert float(w) == -10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", ["SUM", "MEAN", "RUNNING_MEAN"])
def test_weights_are_frozen_during_an_execution(schedule, method):
    """Example 2: the loss is w * x + y, and the same for all mini-batches of one execution."""
    use(2)
    count, repeats, rate = 8, 2, 0.5
    w, losses = Variable(2.0), IPUOutfeedQueue()
    run(
        lambda x, y: pipeline(
            [lambda x, y: (w * x, y), lambda a, y: a + y],
            count,
            inputs=[x, y],
            repeat_count=repeats,
            optimizer_function=descent(rate),
            outfeed_queue=losses,
            outfeed_loss=True,
            pipeline_schedule=schedule,
            reduction_method=method,
        ),
        1.5,
        1.0,
    )
    move = rate * 1.5 * (count if method == "SUM" else 1)
    assert_close(w.value(), jnp.float32(2 - repeats * move))
    expected = np.repeat(np.float32([2 * 1.5 + 1, (2 - move) * 1.5 + 1]), count)
    assert_close(losses.dequeue(), expected)


def test_an_outfeed_mask():
    """Example 5: True is what is NOT sent out."""
    use(4)
    w, out = Variable(1.0), IPUOutfeedQueue()
    run(
        lambda x: pipeline(
            [lambda x: (x, w * x), *[lambda x, y: (x, y + 1)] * 3],
            8,
            inputs=[x],
            optimizer_function=lambda x, y: OptimizerFunctionOutput(optax.sgd(0.1), y),
            outfeed_queue=out,
            outfeed_mask=[True, False],
        ),
        1.0,
    )
    (found,) = out.dequeue()
    np.testing.assert_array_equal(found, np.full(8, 4, np.float32))


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_accumulated_outfeed(repeats):
    """Example 6: the sum over the mini-batches, once an execution."""
    use(2)
    w = Variable(1.0)

    def found(last, **options):
        out = IPUOutfeedQueue()
        run(
            lambda x: pipeline(
                [lambda x: w * x, last],
                8,
                inputs=[x],
                repeat_count=repeats,
                outfeed_queue=out,
                accumulate_outfeed=True,
                **options,
            ),
            1.0,
        )
        return out.dequeue()

    still = {"optimizer_function": descent(0.0)}
    for options in ({}, still):
        (one,) = found(lambda x: x, **options)
        np.testing.assert_array_equal(one, np.full(repeats, 8))
        first, second = found(lambda x: (x, 2 * x), **options)
        np.testing.assert_array_equal(first, np.full(repeats, 8))
        np.testing.assert_array_equal(second, np.full(repeats, 16))
    loss = found(lambda x: x, outfeed_loss=True, **still)
    np.testing.assert_array_equal(loss, np.full(repeats, 8))
    (wide,) = found(lambda x: x.astype(jnp.float16), accumulate_outfeed_dtype=np.float32)
    assert wide.dtype == np.float32


def test_elements_and_inputs_reach_the_first_stage():
    use(2)
    w, queue, out = Variable(1.0), infeed(100), IPUOutfeedQueue()
    program = ipu_compiler.compile(
        lambda scale: pipeline(
            [lambda scale, x: (w * x, scale), lambda y, scale: scale * y],
            4,
            inputs=[scale],
            infeed_queue=queue,
            repeat_count=2,
            optimizer_function=descent(0.25),
            outfeed_queue=out,
            outfeed_loss=True,
        ),
        [1.0],
    )
    program()
    value, losses = 1.0, []
    for first in (0, 4):
        losses += [value * x for x in range(first, first + 4)]
        value -= 0.25 * sum(range(first, first + 4))
    assert_close(w.value(), jnp.float32(value))
    assert_close(out.dequeue(), np.float32(losses))
    # The stream goes on, the input is another one, and the host has written the variable.
    w.assign(0.0)
    program(2.0)
    assert_close(w.value(), jnp.float32(-0.25 * 2 * sum(range(8, 16))))


def test_replicas_of_a_pipeline():
    use(4)
    w, queue, out = Variable(1.0), infeed(100), IPUOutfeedQueue()
    run(
        lambda: pipeline(
            [lambda x: w * x, same],
            4,
            infeed_queue=queue,
            optimizer_function=lambda loss: OptimizerFunctionOutput(
                optimizers.CrossReplicaOptimizer(optax.sgd(0.5)), loss
            ),
            outfeed_queue=out,
        )
    )
    assert_close(w.value(), jnp.float32(1 - 0.5 * sum(range(8)) / 2))
    (found,) = out.dequeue()
    np.testing.assert_array_equal(found, np.arange(8, dtype=np.float32).reshape(4, 2))


def test_mapped_gradients_are_those_of_each_mini_batch():
    use(2)
    w, queue = Variable(1.0), infeed(100)

    def function(loss):
        opt = optimizers.MapGradientOptimizer(optax.sgd(1.0), lambda grad, var: grad * grad + var)
        return OptimizerFunctionOutput(opt, loss)

    run(
        lambda: pipeline(
            [lambda x: w * x, lambda x: x],
            4,
            infeed_queue=queue,
            optimizer_function=function,
            outfeed_queue=IPUOutfeedQueue(),
        )
    )
    assert_close(w.value(), jnp.float32(1 - sum(x * x + 1 for x in range(4))))


def test_a_variable_of_several_stages_is_not_mapped():
    use(2)
    w = Variable(1.0)

    def function(loss):
        return OptimizerFunctionOutput(
            optimizers.MapGradientOptimizer(optax.sgd(1.0), lambda grad, var: grad * grad), loss
        )

    def call(**options):
        run(
            lambda: pipeline(
                [lambda x: w * x, lambda x: w * x],
                4,
                inputs=[2.0],
                outfeed_queue=IPUOutfeedQueue(),
                **options,
            )
        )

    with pytest.raises(ValueError, match="a variable that several stages use"):
        call(optimizer_function=function)
    call(optimizer_function=descent(0.125))
    assert float(w) == 1 - 0.125 * 4 * 4  # d/dw of 2 w^2 at 1, four times


def test_state_that_stages_write():
    use(2)
    w, seen, queue = Variable(1.0), Variable(0.0, trainable=False), infeed(100)

    def counting(x):
        seen.assign_add(x)
        return w * x

    run(
        lambda: pipeline(
            [counting, lambda x: x],
            4,
            infeed_queue=queue,
            repeat_count=2,
            optimizer_function=descent(0.5),
            outfeed_queue=IPUOutfeedQueue(),
        )
    )
    assert float(seen) == sum(range(8))


def test_stages_that_ask_for_their_variables_by_name():
    use(2)
    forget_variables()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (5, 1)))

    def stage0(x):
        with variable_scope("stage0"):
            w = get_variable("w", initializer=first)
        return jnp.tanh(x @ w)

    def stage1(h):
        with variable_scope("stage1"):
            w = get_variable("w", initializer=second)
        return jnp.mean((h @ w) ** 2)

    run(
        lambda x: pipeline(
            [stage0, stage1],
            4,
            inputs=[x],
            repeat_count=2,
            optimizer_function=lambda loss: OptimizerFunctionOutput(
                optax.sgd(0.1, momentum=0.9), loss
            ),
            outfeed_queue=IPUOutfeedQueue(),
            reduction_method="mean",
        ),
        x,
    )
    plain = tr.Trainer(
        lambda w, x: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2),
        optax.sgd(0.1, momentum=0.9),
        [first, second],
    )
    plain.fit([x, x], steps=2)
    found = [get_variable("stage0/w").value(), get_variable("stage1/w").value()]
    assert_close(found, plain.params)


def test_which_variables_are_trained():
    use(2)
    v, w = Variable(1.0), Variable(1.0)
    for options in (
        {"compute_gradients_args": ([w],)},
        {"compute_gradients_kwargs": {"var_list": [w]}},
    ):
        run(
            lambda options=options: pipeline(
                [lambda x: v * w * x, lambda x: x],
                4,
                inputs=[1.0],
                optimizer_function=descent(0.125, **options),
                outfeed_queue=IPUOutfeedQueue(),
            )
        )
    assert (float(v), float(w)) == (1.0, 0.0)


def test_batch_serialisation():
    """One update for count times iterations mini-batches; all of them are sent out."""
    use(1)
    w, queue, out = Variable(1.0), infeed(100), IPUOutfeedQueue()
    run(
        lambda: pipeline(
            [lambda x: w * x, lambda x: x],
            3,
            batch_serialization_iterations=2,
            infeed_queue=queue,
            repeat_count=2,
            optimizer_function=descent(0.0),
            outfeed_queue=out,
            outfeed_loss=True,
        )
    )
    np.testing.assert_array_equal(out.dequeue(), np.arange(12, dtype=np.float32))


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        (PipelineSchedule.Grouped, RecomputationMode.Auto),
        (PipelineSchedule.Grouped, RecomputationMode.RecomputeAndBackpropagateInterleaved),
        (PipelineSchedule.Sequential, RecomputationMode.Auto),
    ],
)
def test_recomputation_changes_nothing(schedule, mode):
    cfg = config.IPUConfig()
    cfg.auto_select_ipus = 2
    cfg.allow_recompute = True
    cfg.configure_ipu_system()
    w, queue = Variable(0.5), infeed(100)
    run(
        lambda: pipeline(
            [lambda x: jnp.tanh(recomputation_checkpoint(w * x)), lambda x: x * x],
            4,
            infeed_queue=queue,
            optimizer_function=descent(0.1),
            outfeed_queue=IPUOutfeedQueue(),
            pipeline_schedule=schedule,
            recomputation_mode=mode,
        )
    )
    value = jnp.float32(0.5)
    slope = sum(2 * jnp.tanh(value * x) * (1 - jnp.tanh(value * x) ** 2) * x for x in range(4))
    assert_close(w.value(), value - 0.1 * slope)


def test_accumulators_of_another_dtype():
    use(2)
    w = Variable(np.float16(1))
    seen = []

    class Remembering(optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            for grad, var in grads_and_vars:
                seen.append(grad.dtype)
                var.assign_sub(grad / 100000)

    run(
        lambda x: pipeline(
            [lambda x: w * x, lambda x: x],
            8,
            gradient_accumulation_dtype=np.float32,
            inputs=[x],
            optimizer_function=lambda loss: OptimizerFunctionOutput(Remembering(), loss),
            outfeed_queue=IPUOutfeedQueue(),
        ),
        np.float16(60000),
    )
    assert set(seen) == {np.dtype(np.float32)}
    assert_close(w.value(), jnp.float16(1 - 8 * 60000 / 100000))


def test_a_function_chooses_the_dtype_of_the_accumulator_of_each_variable():
    use(2)
    wide, narrow = (Variable(np.float16(1), name=name) for name in ("wide", "narrow"))
    seen = {}

    class Remembering(optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            for grad, var in grads_and_vars:
                seen[var.name] = grad.dtype
                var.assign_sub(jnp.asarray(grad / 1000, var.dtype))

    run(
        lambda x: pipeline(
            [lambda x: wide * x, lambda x: narrow * x],
            8,
            gradient_accumulation_dtype=lambda var: (
                np.float32 if var.name.startswith("wide") else var.dtype
            ),
            inputs=[x],
            optimizer_function=lambda loss: OptimizerFunctionOutput(Remembering(), loss),
            outfeed_queue=IPUOutfeedQueue(),
        ),
        np.float16(10),
    )
    assert {name.split(":")[0]: str(dtype) for name, dtype in seen.items()} == {
        "wide": "float32",
        "narrow": "float16",
    }
    assert_close(wide.value(), jnp.float16(1 - 8 * 10 / 1000))


# -- inference ------------------------------------------------------------------------------------


def test_inference_on_inputs():
    """Example 3."""
    use(4)
    out = IPUOutfeedQueue()
    run(
        lambda x: pipeline(
            [lambda x: 2 * x, plus_one, plus_one, plus_one], 8, inputs=[x], outfeed_queue=out
        ),
        42.0,
    )
    np.testing.assert_array_equal(out.dequeue(), np.full(8, 87, np.float32))


def test_inference_on_elements():
    """Example 4."""
    use(4)
    out, queue = IPUOutfeedQueue(), infeed(5, (1,))
    program = ipu_compiler.compile(
        lambda: pipeline(
            [lambda x: x * x, lambda x: x + x, lambda x: x],
            6,
            infeed_queue=queue,
            outfeed_queue=out,
        )
    )
    program()
    np.testing.assert_array_equal(out.dequeue(), np.float32([[0, 2, 8, 18, 32, 0]]).T)
    program()
    np.testing.assert_array_equal(out.dequeue(), np.float32([[2, 8, 18, 32, 0, 2]]).T)


@pytest.mark.parametrize("mapping", [[0, 1, 2], [2, 0, 1], [2, 2, 2]])
def test_the_device_mapping_changes_nothing(mapping):
    """Example 8, in its form: five values that repeat over twelve mini-batches."""
    use(4)
    out, queue = IPUOutfeedQueue(), infeed(5)
    run(
        lambda c: pipeline(
            [
                lambda c, x: (c, x * x),
                lambda c, x: (c, x + x),
                lambda c, x: x + c,
            ],
            12,
            inputs=[c],
            infeed_queue=queue,
            outfeed_queue=out,
            device_mapping=mapping,
        ),
        10.01,
    )
    expected = [2 * (i % 5) ** 2 + 10.01 for i in range(12)]
    assert_close(out.dequeue(), np.float32(expected))


def test_the_iteration_counter():
    """Example 9."""
    use(2)
    first, last = IPUOutfeedQueue(), IPUOutfeedQueue()

    def stage(x):
        return x, first.enqueue(get_current_iteration_counter())

    run(
        lambda x: pipeline(
            [stage, lambda x: get_current_iteration_counter()],
            10,
            inputs=[x],
            repeat_count=3,
            outfeed_queue=last,
        ),
        1.0,
    )
    np.testing.assert_array_equal(first.dequeue(), np.tile(np.arange(10), 3))
    np.testing.assert_array_equal(last.dequeue(), np.tile(np.arange(10), 3))


def test_the_iteration_counter_in_training():
    use(2)
    w, counters = Variable(1.0), IPUOutfeedQueue()
    run(
        lambda x: pipeline(
            [lambda x: w * x, lambda x: (x, get_current_iteration_counter())],
            4,
            inputs=[x],
            repeat_count=2,
            optimizer_function=descent(0.1),
            outfeed_queue=counters,
            outfeed_mask=[True, False],
        ),
        1.0,
    )
    np.testing.assert_array_equal(counters.dequeue()[0], np.tile(np.arange(4), 2))


def test_what_the_last_stage_of_an_inference_returns():
    use(2)

    def found(last):
        out = IPUOutfeedQueue()
        run(lambda x: pipeline([lambda x: x, last], 2, inputs=[x], outfeed_queue=out), 1.0)
        return out.dequeue()

    assert found(lambda x: x).tolist() == [1, 1]
    assert isinstance(found(lambda x: (x, x)), list)
    assert found(lambda x: {"b": x, "a": 2 * x})["a"].tolist() == [2, 2]


# -- concurrent stages ----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_concurrent_stages(training):
    use(4)
    v, w, out = Variable(2.0), Variable(3.0), IPUOutfeedQueue()
    options = {"optimizer_function": descent(0.125)} if training else {}
    run(
        lambda x: pipeline(
            [
                lambda x: x,
                [lambda x: v * x, lambda x: w * x],
                lambda a, b: a * b,
            ],
            6,
            inputs=[x],
            outfeed_queue=out,
            device_mapping=[0, [1, 2], 2],
            **options,
        ),
        1.0,
    )
    found = out.dequeue()
    np.testing.assert_array_equal(found[0] if training else found, np.full(6, 6, np.float32))
    if training:
        assert_close([v.value(), w.value()], [jnp.float32(2 - 0.75 * 3), jnp.float32(3 - 0.75 * 2)])


# -- queues in stages, models of Keras ------------------------------------------------------------


def test_a_queue_in_a_stage_has_every_mini_batch():
    use(2)
    w, queue, seen = Variable(1.0), infeed(100), IPUOutfeedQueue()

    def first(x):
        y = w * x
        return y, seen.enqueue({"y": y, "x": x})

    run(
        lambda: pipeline(
            [first, lambda y: y * y],
            4,
            infeed_queue=queue,
            repeat_count=2,
            optimizer_function=descent(0.01),
            outfeed_queue=IPUOutfeedQueue(),
        )
    )
    found = seen.dequeue()
    assert list(found) == ["y", "x"]
    np.testing.assert_array_equal(found["x"], np.arange(8, dtype=np.float32))
    move = sum(2 * 1.0 * x * x for x in range(4)) * 0.01
    weights = np.repeat(np.float32([1, 1 - move]), 4)
    assert_close(found["y"], weights * np.arange(8, dtype=np.float32))


def keras_stages(keras):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    layers[0].build((4, 3))
    layers[1].build((4, 8))
    return layers


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_of_keras_as_stages(schedule):
    keras = pytest.importorskip("keras")
    use(2)
    rng = np.random.default_rng(0)
    data = [
        (rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(4, 1)).astype(np.float32))
        for _ in range(8)
    ]
    queue = ipu_infeed_queue.IPUInfeedQueue(data)
    queue.initializer()
    first, second = keras_stages(keras)
    trained = [*first.trainable_variables, *second.trainable_variables]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def function(loss):
        return OptimizerFunctionOutput(optimizer, loss, variables=trained)

    losses = IPUOutfeedQueue()
    run(
        lambda: pipeline(
            [lambda x, y: (first(x), y), lambda h, y: keras.ops.mean((second(h) - y) ** 2)],
            4,
            infeed_queue=queue,
            repeat_count=2,
            optimizer_function=function,
            outfeed_queue=losses,
            outfeed_loss=True,
            pipeline_schedule=schedule,
            reduction_method="mean",
        )
    )
    plain = keras.Sequential(keras_stages(keras))
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for step in (data[:4], data[4:]):
        plain.train_on_batch(*(np.concatenate(part) for part in zip(*step, strict=True)))
    assert_close([np.asarray(v.value) for v in trained], plain.get_weights())
    assert losses.dequeue().shape == (8,)
    assert int(optimizer.iterations.value) == 2


def test_an_inference_whose_stages_write_runs_on_one_device():
    use(2)
    seen, out, queue = Variable(0.0, trainable=False), IPUOutfeedQueue(), infeed(100)

    def first(x):
        seen.assign_add(x)
        return x + seen

    run(lambda: pipeline([first, plus_one], 4, infeed_queue=queue, outfeed_queue=out))
    np.testing.assert_array_equal(out.dequeue(), np.float32([1, 3, 6, 10]))
    assert float(seen) == 6


def test_an_inference_reads_variables_and_is_replicated():
    use(4)
    w, out, queue = Variable(2.0), IPUOutfeedQueue(), infeed(100)
    program = ipu_compiler.compile(
        lambda: pipeline([lambda x: w * x, plus_one], 4, infeed_queue=queue, outfeed_queue=out)
    )
    program()
    found = out.dequeue()
    np.testing.assert_array_equal(found, 2 * np.arange(8, dtype=np.float32).reshape(4, 2) + 1)
    w.assign(3)
    program()
    np.testing.assert_array_equal(
        out.dequeue(), 3 * np.arange(8, 16, dtype=np.float32).reshape(4, 2) + 1
    )


def test_a_pipeline_beside_a_loop():
    use(2)
    w, out = Variable(1.0), IPUOutfeedQueue()

    def net(x, **options):
        start = loops.repeat(3, plus_one, [x])
        pipeline([lambda x: w * x, plus_one], 4, inputs=[start], outfeed_queue=out, **options)

    run(net, 1.0)
    assert out.dequeue().tolist() == [5] * 4
    with pytest.raises(
        ipu.errors.FailedPreconditionError, match="A training pipeline and a loop are in one"
    ):
        run(lambda x: net(x, optimizer_function=descent(0.1)), 1.0)
