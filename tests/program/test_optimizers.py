"""`tr.optimizers`: averaging and accumulating in loops written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close, mlp, mlp_loss, regression
from tailrace.errors import OptionError, ProgramError, ReplicaError

ELEMENTS = regression(48)
accumulate, average = tr.optimizers.gradient_accumulation, tr.optimizers.cross_replica


@pytest.fixture(autouse=True)
def promoting():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def by_hand(optimizer, passes, replicas=1, observe=()):
    """Parameters after `passes` of a loop that uses `optimizer`, and the program."""
    infeed, params = tr.InfeedQueue(ELEMENTS), mlp()

    def body(carry, x, y):
        params, state = carry
        grads = jax.grad(mlp_loss, has_aux=True)(params, x, y)[0]
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = tr.compile(
        lambda carry: tr.repeat(passes, body, carry, infeed=infeed),
        replicas=replicas,
        observe=observe,
    )
    return program((params, optimizer.init(params)))[0], program


def by_trainer(optimizer, steps, **options):
    trainer = tr.Trainer(mlp_loss, optimizer, mlp(), **options)
    trainer.fit(ELEMENTS, steps=steps)
    return trainer.params


@pytest.mark.parametrize("reduction", ["sum", "mean", "running_mean"])
def test_accumulation_equals_the_trainer(reduction):
    schedule = optax.exponential_decay(0.05, 1, 0.5)  # ticks once a step, or this fails
    found, _ = by_hand(accumulate(optax.adamw(schedule), 4, reduction=reduction), 12)
    expected = by_trainer(
        optax.adamw(schedule), 3, accumulation=tr.Accumulation(4, reduction=reduction)
    )
    assert_close(found, expected)


def test_accumulators_of_another_dtype():
    half = jax.tree.map(lambda p: p.astype(jnp.float16), mlp())
    optimizer = accumulate(optax.sgd(0.1), 2, dtype=jnp.float32)
    state = optimizer.init(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.accumulated)} == {jnp.dtype("float32")}
    with jax.numpy_dtype_promotion("standard"):
        program = tr.compile(
            lambda s: tr.repeat(2, lambda s: optimizer.update(half, s, half)[1], s)
        )
        assert int(program(state).count) == 0


@pytest.mark.parametrize(
    "wrap",
    [lambda o: accumulate(average(o), 3), lambda o: average(accumulate(o, 3))],
    ids=["averaged once a step", "averaged each time"],
)
def test_with_replicas_in_either_order(wrap):
    found, _ = by_hand(wrap(optax.adam(0.05)), 6, replicas=2)
    assert_close(found, by_trainer(optax.adam(0.05), 2, accumulation=3, replicas=2))


def test_taps_see_all_three_gradients():
    tap = tr.Tap(["grad/*", "accumulated/*", "reduced/*"], reduce="norm")
    _, program = by_hand(accumulate(average(optax.sgd(0.1)), 3), 6, replicas=2, observe=[tap])
    name = "hidden/w" if "grad/hidden/w" in program.records else program.records.names[0][5:]
    grads, total, reduced = (
        program.records[f"{kind}/{name}"] for kind in ("grad", "accumulated", "reduced")
    )
    assert grads.steps.tolist() == np.repeat(np.arange(6), 2).tolist()
    assert grads.replicas.tolist() == [0, 1] * 6
    assert total.steps.tolist() == [2, 2, 5, 5]
    assert (reduced.steps.tolist(), reduced.replicas.tolist()) == ([2, 5], [-1, -1])


def test_bad_use_is_refused():
    with pytest.raises(ProgramError, match="over 4 microbatches inside a loop of 6 passes.*use 4"):
        by_hand(accumulate(optax.sgd(0.1), 4), 6)
    with pytest.raises(ReplicaError, match="would drift apart"):
        by_hand(accumulate(optax.sgd(0.1), 2), 4, replicas=2)
    with pytest.raises(OptionError, match="at least one microbatch"):
        accumulate(optax.sgd(0.1), 0)
    with pytest.raises(OptionError, match="its dtype is a float"):
        accumulate(optax.sgd(0.1), 2, dtype=jnp.int32)
    optimizer = accumulate(optax.sgd(0.1), 2)
    with pytest.raises(ProgramError, match="not inside a training loop"):
        tr.compile(lambda p: optimizer.update(p, optimizer.init(p), p)[0])(mlp())
    for outside in (optimizer, average(optax.sgd(0.1))):
        with pytest.raises(ProgramError, match="only inside a program"):
            outside.update(mlp(), outside.init(mlp()), mlp())
    with pytest.raises(OptionError, match="accumulated once, by the trainer"):
        tr.Trainer(mlp_loss, optax.chain(optax.clip(1.0), optimizer), mlp())
