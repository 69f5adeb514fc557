"""Automatic loss scaling, by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import run, use

from tailrace.compat.ipu import Variable, ipu_compiler, loops, optimizers
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue
from tailrace.compat.ipu.optimizers import ALSGradientAccumulationOptimizer, ALSOptimizer
from tailrace.compat.ipu.pipelining_ops import OptimizerFunctionOutput, pipeline


class Keeping(optimizers.Optimizer):
    """Keeps the gradient it is given."""

    def __init__(self):
        super().__init__()
        self.kept = Variable(np.float16(0), trainable=False)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.kept.assign(grads_and_vars[0][0])


def scales(opt, slope, passes):
    """The scale in each pass over a loss with this gradient."""
    w, out = Variable(np.float16(1)), IPUOutfeedQueue()

    def body():
        sent = out.enqueue(opt.loss_scaling_factor)
        return sent, opt.minimize(w * slope)

    run(lambda: loops.repeat(passes, body, []))
    return out.dequeue().tolist()


def test_the_scale_grows_and_the_gradient_stays():
    inner = Keeping()
    opt = ALSOptimizer(inner, update_frequency=2, max_loss_scaling_factor=8)
    # Looked at in every third update (the counter is 2 then), and never 8 or more.
    assert scales(opt, np.float16(3), 9) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert float(inner.kept) == 3
    assert float(opt.loss_scaling_factor) == 4
    assert float(opt.previous_loss_scaling_factor) == 2
    assert int(opt.update_counter) == 0


def test_the_scale_shrinks_when_gradients_are_large():
    opt = ALSOptimizer(Keeping(), initial_loss_scaling_factor=16, update_frequency=1)
    # 1000 * 16 is above 2^13, 1000 * 8 is not: it swings around the edge.
    assert scales(opt, np.float16(1000), 5) == [16, 8, 16, 8, 16]
    opt.reset()
    assert float(opt.loss_scaling_factor) == 16
    assert opt.histogram.tolist() == [0, 0]
    assert opt.decrease_factor == 0.5


def test_statistics():
    opt = ALSOptimizer(Keeping(), update_frequency=8, lpf_alpha=0.5)
    scales(opt, np.float16(3), 2)
    assert opt.histogram.tolist() == [0.75, 0]
    assert opt.normalized_histogram.tolist() == [0.75, 0]
    opt = ALSOptimizer(
        Keeping(), update_frequency=8, accumulate_statistics_over_update_period=False
    )
    scales(opt, np.float16(3), 2)
    assert opt.histogram.tolist() == [0, 0]
    assert int(opt.update_counter) == 2


def test_accumulated_and_over_replicas():
    use(2)
    w = Variable(1.0)
    als = ALSOptimizer(
        optimizers.CrossReplicaOptimizer(optax.sgd(0.5)),
        initial_loss_scaling_factor=4,
        update_frequency=1,
    )
    opt = ALSGradientAccumulationOptimizer(als, 2)
    ipu_compiler.compile(lambda: loops.repeat(4, lambda: opt.minimize(w * 3), []))()
    # Two updates with the sum of two gradients; no float16 gradient is large, so the scale grows.
    assert float(w) < 1
    assert float(als.loss_scaling_factor) == 16


RULES = [
    ({"initial_loss_scaling_factor": 3}, "initial_loss_scaling_factor must be a power of two"),
    ({"increase_factor": 3}, "increase_factor must be a power of two"),
    ({"max_loss_scaling_factor": 100}, "max_loss_scaling_factor must be a power of two"),
    ({"update_frequency": 0}, "update_frequency must be nonzero and positive"),
    ({"ratio_threshold": 1.0}, "ratio_threshold must be greater than 0 and less than 1"),
    ({"initial_loss_scaling_factor": 2**15}, "must be less than max_loss_scaling_factor"),
    ({"initial_loss_scaling_factor": 2**14}, "also times increase_factor"),
]


@pytest.mark.parametrize(("options", "message"), RULES)
def test_rules(options, message):
    with pytest.raises(ValueError, match=message):
        ALSOptimizer(optax.sgd(0.1), **options)


def test_what_is_refused():
    with pytest.raises(ValueError, match="als_optimizer must be an ALSOptimizer"):
        ALSGradientAccumulationOptimizer(optax.sgd(0.1), 2)
    with pytest.raises(NotImplementedError, match="captured_grads_only"):
        ALSOptimizer(optax.sgd(0.1), captured_grads_only=True)
    use(2)
    w = Variable(1.0)
    with pytest.raises(ValueError, match="ALSOptimizer computes gradients in a way of its own"):
        run(
            lambda x: pipeline(
                [lambda x: w * x, lambda x: x],
                4,
                inputs=[x],
                outfeed_queue=IPUOutfeedQueue(),
                optimizer_function=lambda loss: OptimizerFunctionOutput(
                    ALSOptimizer(optax.sgd(0.1)), loss
                ),
            ),
            jnp.float32(1),
        )
