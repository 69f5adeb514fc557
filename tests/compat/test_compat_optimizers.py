"""Gradients, and the optimizers around optimizers, against the sums worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import infeed, run, use

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.compat import ipu
from tailrace.compat.ipu import GradientTape, Variable, ipu_compiler, loops, optimizers
from tailrace.compat.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tailrace.compat.ipu.graph.named_variables import forget_variables, get_variable, variable_scope
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedQueue


class Descent(optimizers.Optimizer):
    """Plain descent, as programs of the original write an optimizer."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            var.assign_sub(self.rate * grad.astype(var.dtype))


# -- gradients of a value -------------------------------------------------------------------------


def test_a_loss_that_was_computed_is_differentiated():
    w, b = Variable(2.0, name="w"), Variable(np.float32([1, 2]), name="b")
    x = np.float32([3, 4])

    def net():
        loss = jnp.sum((w * x + b) ** 2)
        return [loss, *GradientTape().gradient(loss, [w, b])]

    loss, dw, db = run(net)
    expected = jax.value_and_grad(lambda w, b: jnp.sum((w * x + b) ** 2), (0, 1))(
        jnp.float32(2), jnp.float32([1, 2])
    )
    assert_close([loss, [dw, db]], [expected[0], list(expected[1])])


def test_what_was_written_before_counts_from_there():
    w = Variable(3.0)

    def net():
        first = GradientTape().gradient(w * w, w)  # 6
        w.assign_sub(first)  # -3
        return first, GradientTape().gradient(w * w * w, w), w  # 27

    assert run(net) == [6, 27, -3]
    assert float(w) == -3


def test_an_outfeed_on_the_way_to_the_loss_sends_once():
    w, out, queue = Variable(1.0), IPUOutfeedQueue(), infeed(5)

    def body(x):
        y = w * x
        out.enqueue(y)
        return Descent(0.1).minimize(y * y)

    run(lambda: loops.repeat(5, body, [], queue))
    value, seen = 1.0, []
    for x in range(5):
        seen.append(value * x)
        value -= 0.1 * 2 * value * x * x
    assert_close(out.dequeue(), np.float32(seen))
    assert_close(w.value(), jnp.float32(value))


def test_a_scan_on_the_way_to_the_loss():
    w = Variable(1.1)

    def net():
        end, _ = jax.lax.scan(lambda c, _: (c * w.value(), None), jnp.float32(1), length=5)
        return GradientTape().gradient(end, w)

    assert_close(run(net)[0], jnp.float32(5 * 1.1**4))


def test_default_variables_are_the_trainable_ones_touched():
    w, fixed = Variable(1.0), Variable(1.0, trainable=False)
    run(lambda: Descent(0.5).minimize(3 * w * fixed))
    assert (float(w), float(fixed)) == (-0.5, 1.0)
    with pytest.raises(ValueError, match="No variables to optimize"):
        run(lambda: Descent(0.5).minimize(jnp.float32(1)))
    with pytest.raises(TypeError, match="A loss is a float"):
        run(lambda: Descent(0.5).minimize(jnp.int32(1), var_list=[w]))


def test_a_gradient_hidden_in_a_jit_is_refused():
    w = Variable(2.0)
    hidden = jax.jit(lambda x: GradientTape().gradient(w * x, w))
    with pytest.raises(tr.TailraceError, match="A gradient is asked for inside of 'jit'"):
        run(lambda: hidden(jnp.float32(3)))


def test_a_step_is_counted():
    w, step = Variable(1.0), Variable(np.int32(0), trainable=False)
    run(lambda: loops.repeat(3, lambda: Descent(0.5).minimize(lambda: w * w, step), []))
    assert int(step) == 3


def test_a_training_loop_equals_the_native_one_to_the_last_bit():
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 1))]
    data = [rng.normal(size=(4, 8)).astype(np.float32) for _ in range(6)]

    def loss_of(weights, x):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x[:, :1]) ** 2)

    rule, outfeed, infeed_queue = (
        optax.sgd(0.1, momentum=0.9),
        tr.OutfeedQueue(),
        tr.InfeedQueue(data),
    )

    def native(state, x):
        weights, kept = state
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        updates, kept = rule.update(grads, kept, weights)
        outfeed.enqueue(loss)
        return optax.apply_updates(weights, updates), kept

    weights = [jnp.asarray(w) for w in start]
    program = tr.compile(lambda state: tr.repeat(6, native, state, infeed=infeed_queue))
    weights, _ = program((weights, rule.init(weights)))

    variables, losses = [Variable(w) for w in start], IPUOutfeedQueue()
    opt, queue = optimizers.IpuOptimizer(rule), IPUInfeedQueue(data)
    queue.initializer()

    def body(x):
        loss = loss_of([v.value() for v in variables], x)
        return losses.enqueue(loss), opt.minimize(loss)

    run(lambda: loops.repeat(6, body, [], queue))
    assert_bits_equal([v.value() for v in variables], weights)
    assert_bits_equal(losses.dequeue(), outfeed.dequeue())


# -- accumulation ---------------------------------------------------------------------------------


def train(optimizer, passes, queue=None, w=None):
    """Minimise w * x over the elements 0, 1, 2, ...; returns w."""
    w = Variable(10.0, name="w") if w is None else w
    queue = queue or infeed(100)
    run(lambda: loops.repeat(passes, lambda x: optimizer.minimize(w * x), [], queue))
    return w


@pytest.mark.parametrize(
    "method", ["SUM", "mean", GradientAccumulationReductionMethod.RUNNING_MEAN]
)
@pytest.mark.parametrize("kind", ["descent", "optax"])
def test_one_update_for_several_mini_batches(method, kind):
    inner = Descent(0.5) if kind == "descent" else optax.sgd(0.5)
    opt = optimizers.GradientAccumulationOptimizerV2(inner, 4, reduction_method=method)
    w = train(opt, 8)
    total = sum(range(8)) if method == "SUM" else sum(range(8)) / 4
    assert_close(w.value(), jnp.float32(10 - 0.5 * total))


def test_the_older_one_sums():
    w = train(optimizers.GradientAccumulationOptimizer(optax.sgd(0.5, momentum=0.9), 4), 8)
    trace, value = 0.0, 10.0
    for total in (0 + 1 + 2 + 3, 4 + 5 + 6 + 7):
        trace = 0.9 * trace + total
        value -= 0.5 * trace
    assert_close(w.value(), jnp.float32(value))


def test_state_is_kept_between_calls_of_a_program():
    w, queue = Variable(1.0), infeed(100)
    opt = optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1, momentum=0.9), 2)
    program = ipu_compiler.compile(
        lambda: loops.repeat(4, lambda x: opt.minimize((w * x - 1) ** 2), [], queue)
    )
    program()
    program()

    plain = tr.Trainer(
        lambda w, x: (w * x - 1) ** 2,
        optax.sgd(0.1, momentum=0.9),
        jnp.float32(1),
        accumulation=tr.Accumulation(2, reduction="sum"),
    )
    plain.fit([np.float32(i) for i in range(8)], steps=4)
    assert_close(w.value(), plain.params)


@pytest.mark.parametrize(
    "opt",
    [
        optimizers.CrossReplicaOptimizer(optax.sgd(0.5)),
        optimizers.CrossReplicaOptimizer(Descent(0.5)),
    ],
)
def test_gradients_are_averaged_over_replicas(opt):
    use(2)
    assert_close(train(opt, 4).value(), jnp.float32(10 - 0.5 * sum(range(8)) / 2))


@pytest.mark.parametrize(
    "kind",
    [
        optimizers.CrossReplicaGradientAccumulationOptimizerV2,
        optimizers.CrossReplicaGradientAccumulationOptimizer,
    ],
)
def test_accumulated_and_averaged(kind):
    use(2)
    assert_close(train(kind(optax.sgd(0.5), 4), 8).value(), jnp.float32(10 - 0.5 * 120 / 2))


def test_replicas_that_would_drift_apart_are_refused():
    use(2)
    with pytest.raises(tr.TailraceError, match="would drift apart"):
        train(Descent(0.5), 4)


def test_the_dtype_of_the_accumulators():
    seen = []

    class Remembering(Descent):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            seen[:] = [grad.dtype for grad, _ in grads_and_vars]
            return super().apply_gradients(grads_and_vars)

    highest = np.finfo(np.float16).max
    for dtype, expected in (
        (None, np.float16),
        (np.float32, np.float32),
        (lambda var: np.float32 if var.dtype == np.float16 else None, np.float32),
    ):
        w = Variable(np.float16(1))
        opt = optimizers.GradientAccumulationOptimizerV2(
            Remembering(0.0), 8, dtype=dtype, reduction_method="mean"
        )
        run(lambda w=w, opt=opt: loops.repeat(8, lambda: opt.minimize(w * highest), []))
        assert seen == [np.dtype(expected)]
    # Eight times the highest number there is in float16, added up in float32: no overflow.
    w = Variable(np.float16(1))
    sums = Variable(np.float32(0), trainable=False)

    class Keeping(optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            sums.assign(grads_and_vars[0][0])

    opt = optimizers.GradientAccumulationOptimizerV2(Keeping(), 8, dtype=np.float32)
    run(lambda: loops.repeat(8, lambda: opt.minimize(w * highest), []))
    assert float(sums) == 8 * float(highest)


def test_an_outfeed_in_the_update_sends_once_an_update():
    out = IPUOutfeedQueue()

    class Sending(Descent):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            out.enqueue(grads_and_vars[0][0])
            return super().apply_gradients(grads_and_vars)

    train(optimizers.GradientAccumulationOptimizerV2(Sending(0.5), 4), 8)
    assert out.dequeue().tolist() == [6, 22]


def test_mapped_gradients():
    x, y, z = (Variable(v) for v in (1.0, 2.0, 3.0))
    opt = optimizers.MapGradientOptimizer(optax.sgd(1.0), lambda grad, var: grad + 0.01 * var)

    def net():
        pairs = opt.compute_gradients(x * y + x * z + y * z, [x, y, z])
        return [grad for grad, _ in pairs]

    assert_close(run(net), [jnp.float32(v) for v in (5.01, 4.02, 3.03)])
    mapped = optimizers.MapGradientOptimizer(Descent(1.0), lambda grad, var: grad * grad)
    total = sum(i * i for i in range(4))  # of each mini-batch, before they are added
    opt = optimizers.GradientAccumulationOptimizerV2(mapped, 4)
    assert_close(train(opt, 4).value(), jnp.float32(10 - total))
    with pytest.raises(ValueError, match="must be a callable"):
        optimizers.MapGradientOptimizer(optax.sgd(1.0), 3)


def test_an_optimizer_may_be_made_inside_of_the_body():
    """As bodies of the original do: what it keeps is found again in each trace, and each call."""
    w, queue = Variable(10.0), infeed(100)

    def body(x):
        opt = optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.5, momentum=0.9), 4)
        return opt.minimize(w * x)

    program = ipu_compiler.compile(lambda: loops.repeat(4, body, [], queue))
    program()
    program()
    trace, value = 0.0, 10.0
    for total in (0 + 1 + 2 + 3, 4 + 5 + 6 + 7):
        trace = 0.9 * trace + total
        value -= 0.5 * trace
    assert_close(w.value(), jnp.float32(value))


def test_other_variables_each_time_end_in_a_sentence():
    names = iter(range(10**6))
    with pytest.raises(tr.TailraceError, match="makes other variables each time"):
        run(lambda: get_variable(f"new{next(names)}") + 1)
    forget_variables()


# -- rules ----------------------------------------------------------------------------------------


def test_rules_of_accumulation():
    make = optimizers.GradientAccumulationOptimizerV2
    with pytest.raises(ValueError, match="num_mini_batches must be a positive number"):
        make(optax.sgd(1.0), 0)
    with pytest.raises(ValueError, match="Cannot parse None as one of GradientAccumulationReduc"):
        make(optax.sgd(1.0), 2, reduction_method=None)
    with pytest.raises(ValueError, match="Cannot parse product.*SUM, MEAN, RUNNING_MEAN"):
        make(optax.sgd(1.0), 2, reduction_method="product")
    with pytest.raises(ValueError, match="optimizer state must be offloaded by using offload_weig"):
        make(optax.sgd(1.0), 2, False, True)
    failed = ipu.errors.FailedPreconditionError
    with pytest.raises(failed, match="Can't have runtime num mini batches"):
        make(optax.sgd(1.0), jnp.int32(2))
    with pytest.raises(failed, match="it must not be wrapped by any other optimizer"):
        optimizers.CrossReplicaOptimizer(make(optax.sgd(1.0), 2))
    message = "with 4 number of mini batches inside a loop with 6 iterations"
    with pytest.raises(failed, match=message):
        train(make(optax.sgd(1.0), 4), 6)
    w = Variable(1.0)
    with pytest.raises(failed, match="which is not inside a training loop"):
        run(lambda: make(optax.sgd(1.0), 2).minimize(w * w))
    with pytest.raises(failed, match="from an unexpected callsite"):
        run(
            lambda: loops.while_loop(
                lambda i: i < 4, lambda i: (i + 1, make(optax.sgd(1.0), 2).minimize(w * w)), [0]
            )
        )
    with pytest.raises(TypeError, match="An optimizer is an optax transformation, a Keras"):
        optimizers.CrossReplicaOptimizer("sgd")


def test_offloading_is_noted(caplog):
    optimizers.GradientAccumulationOptimizerV2(optax.sgd(1.0), 2, True)
    assert any("stays on the device" in record.message for record in caplog.records)


# -- variables ------------------------------------------------------------------------------------


def test_a_variable_is_an_array_with_a_name():
    v = Variable(np.arange(4, dtype=np.float32), name="v")
    assert v.shape == (4,)
    assert v.ndim == 1
    assert v[1] == 1
    np.testing.assert_array_equal(v.numpy(), np.arange(4))
    np.testing.assert_array_equal(np.asarray(2 * v + v), 3 * np.arange(4))
    np.testing.assert_array_equal(jnp.sum(v.value()), 6)
    v.assign(np.zeros(4)).assign_add(3)
    np.testing.assert_array_equal(v, np.full(4, 3))
    assert v.dtype == np.float32
    with pytest.raises(ValueError, match="A variable keeps its shape"):
        v.assign(1.0)
    assert Variable(lambda: 2).dtype == np.int32


def test_variables_are_carried_by_loops_in_loops():
    count, total = Variable(0, trainable=False), Variable(0.0, trainable=False)
    queue = infeed(100)

    def inner(x):
        count.assign_add(1)
        total.assign_add(x)

    def outer():
        loops.repeat(3, inner, [], queue)
        total.assign_add(100)

    program = ipu_compiler.compile(lambda: loops.repeat(2, outer, []))
    program()
    assert (int(count), float(total)) == (6, 215)
    total.assign(0)
    program()
    assert (int(count), float(total)) == (12, 251)


def test_a_while_loop_may_ask_a_variable():
    left = Variable(3, trainable=False)

    def body(v):
        left.assign_sub(1)
        return v + 1

    assert run(lambda v: loops.while_loop(lambda v: left.value() > 0, body, [v]), 0) == [3]
    assert int(left) == 0


def test_variables_are_made_outside_or_found_by_name():
    forget_variables()
    with pytest.raises(tr.TailraceError, match="use get_variable"):
        run(lambda: Variable(1.0) + 1)

    def net(x):
        with variable_scope("layer"):
            w = get_variable("w", shape=[2], initializer=jnp.ones)
        return Descent(0.5).minimize(jnp.sum(w * x), var_list=[w]), w

    program = ipu_compiler.compile(lambda x: net(x)[1], [np.float32([1, 2])])
    program()
    with variable_scope("layer"):
        w = get_variable("w")
    assert w.name == "layer/w"
    np.testing.assert_array_equal(w, [0.5, 0])
    with pytest.raises(ValueError, match="Trying to share variable layer/w, but specified shape"):
        get_variable("layer/w", shape=[3])


def test_a_program_that_does_another_thing_each_time():
    made = [Variable(1.0), Variable(2.0)]
    with pytest.raises(tr.TailraceError, match="must touch the same variables each time"):
        run(lambda: made.pop() + 1)
