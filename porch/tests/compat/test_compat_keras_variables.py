"""Variables, models and optimizers of Keras in programs of the original's kind."""

import jax.numpy as jnp
import numpy as np
import pytest
from counting import run, use

from oracles import assert_close
from tailrace.compat.ipu import GradientTape, ipu_compiler, loops, optimizers, pipelining_ops
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue

keras = pytest.importorskip("keras")


def batches(count):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(4, 1)).astype(np.float32))
        for _ in range(count)
    ]


def model_of(seed=0):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
    model.build((4, 3))
    return model


def opened(data):
    queue = IPUInfeedQueue(data)
    queue.initializer()
    return queue


def test_a_training_loop_with_a_tape_equals_keras_own():
    model, plain = model_of(), model_of()
    data, losses = batches(6), IPUOutfeedQueue()
    opt, queue = keras.optimizers.Adam(0.1), opened(data)

    def step(x, y):
        with GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        opt.build(model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return losses.enqueue(loss)

    opt.build(model.trainable_variables)
    run(lambda: loops.repeat(6, step, [], queue))

    plain.compile(keras.optimizers.Adam(0.1), "mse")
    expected = [plain.train_on_batch(x, y) for x, y in data]
    assert_close(losses.dequeue(), np.float32(expected))
    assert_close(model.get_weights(), plain.get_weights())
    assert int(opt.iterations.value) == 6


def test_accumulation_around_an_optimizer_of_keras():
    model, plain = model_of(), model_of()
    data = batches(4)
    queue = opened(data)
    opt = optimizers.GradientAccumulationOptimizerV2(
        keras.optimizers.SGD(0.1, momentum=0.9), 2, reduction_method="mean"
    )
    run(
        lambda: loops.repeat(
            4, lambda x, y: opt.minimize(keras.ops.mean((model(x) - y) ** 2)), [], queue
        )
    )
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for first, second in (data[:2], data[2:]):
        plain.train_on_batch(
            np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])
        )
    assert_close(model.get_weights(), plain.get_weights())
    assert len(opt.variables()) > 2


def test_a_custom_optimizer_casts_gradients():
    """The seed's own: an SGD whose apply_gradients casts what was accumulated."""
    seen = []

    class CastGradientsSGD(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            grads_and_vars = list(grads_and_vars)
            seen[:] = [grad.dtype for grad, _ in grads_and_vars]
            return super().apply_gradients(
                [(keras.ops.cast(g, v.dtype), v) for g, v in grads_and_vars]
            )

    w = keras.Variable(1.0, dtype="float16", name="w")
    opt = optimizers.GradientAccumulationOptimizerV2(
        CastGradientsSGD(0.25), 4, dtype=np.float32, reduction_method="mean"
    )
    run(lambda: loops.repeat(4, lambda: opt.minimize(w * keras.ops.cast(2, "float16")), []))
    assert seen == [jnp.float32]
    assert float(w.value) == 0.5


def test_replicas_average_gradients_of_keras():
    use(2)
    model, plain = model_of(), model_of()
    data = batches(4)
    queue = opened(data)
    opt = optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
    run(
        lambda: loops.repeat(
            2, lambda x, y: opt.minimize(keras.ops.mean((model(x) - y) ** 2)), [], queue
        )
    )
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    for first, second in (data[:2], data[2:]):
        plain.train_on_batch(
            np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])
        )
    assert_close(model.get_weights(), plain.get_weights())


def test_state_of_layers_is_carried():
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((4, 2))
    x = np.float32(np.arange(8).reshape(4, 2))
    program = ipu_compiler.compile(
        lambda x: loops.repeat(2, lambda x: x + 0 * layer(x, training=True), [x]), [x]
    )
    program()
    assert_close(np.asarray(layer.moving_mean), 0.75 * x.mean(axis=0))


def test_a_keras_optimizer_does_not_change_other_variables():
    from tailrace.compat.ipu import Variable

    w = Variable(1.0)
    opt = optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="A Keras optimizer changes variables of Keras"):
        run(lambda: opt.minimize(w * w))


# -- optimizers that a program makes ----------------------------------------------------------------


class Halving(keras.optimizers.SGD):
    """A subclass with arguments and an `apply_gradients` of its own."""

    def __init__(self, learning_rate, share=0.5, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.share = share

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g * self.share, v) for g, v in grads_and_vars])


MADE = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.25, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    ),
    "subclass": lambda: Halving(1.0),
}


def stepped(make, inside, way):
    """A variable after three calls of a program, whose optimizer is made inside or outside of it."""
    w = keras.Variable(np.float32(2))
    outside = make()
    taken = (lambda: make()) if inside else (lambda: outside)
    losses = IPUOutfeedQueue()

    def pipelined():
        return pipelining_ops.pipeline(
            [lambda x: w * x, lambda y: y * y],
            4,
            inputs=[1.5],
            outfeed_queue=losses,
            optimizer_function=lambda loss: pipelining_ops.OptimizerFunctionOutput(
                taken(), loss, variables=[w]
            ),
            reduction_method="mean",
        )

    def looped():
        def body():
            loss = (w * 1.5) ** 2
            taken().apply_gradients(zip(GradientTape().gradient(loss, [w]), [w], strict=True))

        return loops.repeat(1, body)

    program = ipu_compiler.compile(pipelined if way == "pipeline" else looped)
    for _ in range(3):
        program()
    return w.value


@pytest.mark.parametrize("way", ["pipeline", "loop"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_an_optimizer_made_inside_is_one_made_outside(make, way):
    use(2 if way == "pipeline" else 1)
    assert_close(stepped(make, True, way), stepped(make, False, way))
