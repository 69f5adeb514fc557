"""`tr.key()`, `tr.step()`, `tr.microbatch()`, `tr.replica()`: the same whatever the schedule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import ProgramError
from tailrace.program import compile as program_module


def draw():
    return jax.random.bits(tr.key(), (), jnp.uint32)


def drawn(steps, microbatches=2, calls=2, replicas=1, seed=0, times=1):
    """All numbers of a program [steps, microbatches, (replicas,) calls]."""
    outfeed = tr.OutfeedQueue()

    def microbatch(_):
        outfeed.enqueue(jnp.stack([draw() for _ in range(calls)]))
        return ()

    def step(_):
        return tr.repeat(microbatches, microbatch, ())

    program = tr.compile(lambda: tr.repeat(steps, step, ()), replicas=replicas, seed=seed)
    for _ in range(times):
        program()
    found = outfeed.dequeue()
    return found.reshape(times * steps, microbatches, *found.shape[1:])


@pytest.fixture(scope="module")
def six_steps():
    return drawn(6)


def test_all_differ(six_steps):
    with_replicas = drawn(3, replicas=2)
    assert len(np.unique(six_steps)) == six_steps.size
    assert len(np.unique(with_replicas)) == with_replicas.size


def test_the_first_replica_draws_what_one_alone_would(six_steps):
    assert_bits_equal(drawn(3, replicas=2)[:, :, 0], six_steps[:3])


def test_the_seed_chooses_and_repeats(six_steps):
    assert_bits_equal(drawn(6), six_steps)
    assert not np.isin(drawn(6, seed=1), six_steps).any()


def test_the_number_of_executions_does_not_matter(six_steps):
    assert_bits_equal(drawn(2, times=3), six_steps)
    assert_bits_equal(drawn(3, times=2), six_steps)


def test_pieces_do_not_matter(six_steps, monkeypatch):
    monkeypatch.setattr(program_module, "piece_within", lambda length, size: 2)
    assert_bits_equal(drawn(6), six_steps)


def test_a_while_loop_counts_its_steps():
    outfeed = tr.OutfeedQueue()

    def body(v):
        outfeed.enqueue({"step": tr.step(), "bits": draw()})
        return v + 1

    program = tr.compile(lambda v: tr.while_loop(lambda v: v < 3, body, v, maximum_iterations=5))
    program(jnp.int32(0))
    program(jnp.int32(1))
    assert program.steps == 5
    found = outfeed.dequeue()
    assert found["step"].tolist() == [0, 1, 2, 3, 4]
    assert len(np.unique(found["bits"])) == 5


def test_a_program_without_loops_is_a_step():
    program = tr.compile(lambda: (tr.step(), draw()))
    steps, bits = zip(*(jax.tree.map(int, program()) for _ in range(3)), strict=True)
    assert len(set(bits)) == 3
    assert steps == (0, 1, 2)


def test_a_weak_carry_draws_the_same():
    """JAX may trace a body twice; the number of a call may not depend on that."""

    def bits(start):
        def body(v):
            return v + jax.random.uniform(tr.key(), (), jnp.float32)

        return tr.compile(lambda: tr.repeat(3, body, start))()

    assert_bits_equal(bits(0.0), bits(jnp.float32(0)))


def test_recomputation_replays_the_key():
    def loss(w, x):
        mask = jax.random.bernoulli(tr.key(), 0.5, (8,))
        return jnp.where(mask, jnp.sin(w * x), 0.0).sum()

    def train(loss):
        infeed = tr.InfeedQueue([np.full(8, i, np.float32) for i in range(6)])
        body = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)  # noqa: E731
        return tr.compile(lambda w: tr.repeat(6, body, w, infeed=infeed))(jnp.float32(1))

    plain = train(loss)
    np.testing.assert_allclose(train(jax.checkpoint(loss)), plain, rtol=1e-6)

    def without(w, x):
        return jnp.sin(w * x).sum()

    assert not np.allclose(train(without), plain)


@pytest.mark.parametrize("around", ["value_and_grad", "jit", "scan", "vmap"])
def test_keys_in_transformed_code(around):
    outfeed = tr.OutfeedQueue()

    def noisy(w):
        data = outfeed.enqueue(jax.random.key_data(tr.key()))
        return w * jax.random.normal(jax.random.wrap_key_data(data), ())

    def body(w):
        if around == "value_and_grad":
            value, grad = jax.value_and_grad(noisy)(w)
            return w + 0 * value + 0 * grad
        if around == "jit":
            return w + 0 * jax.jit(noisy)(w)
        if around == "scan":
            out = jax.lax.scan(lambda c, _: (noisy(c), None), w, length=2)[0]
            return w + 0 * out
        return w + 0 * jax.vmap(noisy)(jnp.stack([w, w])).sum()

    tr.compile(lambda w: tr.repeat(4, body, w))(jnp.float32(1))
    found = outfeed.dequeue().reshape(4, -1, 2)
    assert len({tuple(row) for row in found[:, 0]}) == 4


def test_counters_in_nested_loops():
    outfeed = tr.OutfeedQueue()

    def inner(_):
        outfeed.enqueue({"step": tr.step(), "microbatch": tr.microbatch(), "r": tr.replica()})
        return ()

    def middle(_):
        return tr.repeat(2, inner, ())

    program = tr.compile(lambda: tr.repeat(2, lambda _: tr.repeat(3, middle, ()), ()), replicas=2)
    program()
    program()
    found = outfeed.dequeue()
    expected = list(itertools.product(range(4), range(6)))
    assert found["step"][:, 0].tolist() == [s for s, _ in expected]
    assert found["microbatch"][:, 0].tolist() == [m for _, m in expected]
    assert found["step"].dtype == np.int32
    assert found["r"].tolist() == [[0, 1]] * 24


def test_two_loops_of_a_program_go_on_counting():
    outfeeds = [tr.OutfeedQueue(), tr.OutfeedQueue()]

    def both(v):
        for outfeed in outfeeds:
            v = tr.repeat(3, lambda v, o=outfeed: v + 0 * o.enqueue(tr.step()), v)
        return v

    program = tr.compile(both)
    program(jnp.int32(0))
    assert program.steps == 6
    program(jnp.int32(0))
    assert [o.dequeue().tolist() for o in outfeeds] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


# -- sentences ----------------------------------------------------------------------------------


def test_a_jitted_function_called_twice():
    shared = jax.jit(lambda w: w + jax.random.normal(tr.key(), ()))
    with pytest.raises(
        ProgramError, match="in a jitted function that the step calls more than once"
    ):
        tr.compile(lambda w: tr.repeat(2, lambda w: shared(shared(w)), w))(jnp.float32(0))


def test_a_differentiated_repeat():
    def loss(w):
        return tr.repeat(3, lambda h: h * w * jax.random.normal(tr.key(), ()), jnp.float32(1))

    with pytest.raises(ProgramError, match="differentiation moved it out of the loop"):
        tr.compile(lambda w: jax.grad(loss)(w))(jnp.float32(2))


@pytest.mark.parametrize("name", ["key", "step", "microbatch", "replica"])
def test_outside_a_program(name):
    with pytest.raises(ProgramError, match=rf"tr.{name}\(\) means something only inside a program"):
        getattr(tr, name)()


@pytest.mark.parametrize("name", ["cross_replica_mean", "cross_replica_sum"])
def test_reductions_outside_a_program(name):
    with pytest.raises(ProgramError, match=rf"tr.{name} means something only inside a program"):
        getattr(tr, name)(1.0)
