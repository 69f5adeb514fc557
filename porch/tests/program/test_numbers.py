"""The numbers of a dispatch (seed, step, offset): made by the dispatch before, or sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.program.running.executable import Numbers, Placement
from tailrace.program.running.loop_runner import LoopRunner


@pytest.fixture
def sent(monkeypatch):
    """The numbers that were sent to the devices."""
    found = []
    as_array = Numbers.as_array

    def noted(self):
        found.append(self)
        return as_array(self)

    monkeypatch.setattr(Numbers, "as_array", noted)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_numbers_are_sent_only_where_they_are_not_foreseen(replicas, sent):
    out = tr.OutfeedQueue()

    def body(count):
        out.enqueue((tr.step(), jax.random.bits(tr.key(), dtype=jnp.uint32)))
        return count + 1

    runner = LoopRunner(
        lambda count, _: tr.repeat(1, body, count), jnp.int32(0), (), Placement(replicas)
    )
    known = runner.begin(jnp.int32(0), ())

    def run(length, numbers):
        emitted, _ = runner.dispatch(known, length, numbers)
        value = [np.asarray(leaf) for leaf in emitted[out].value]
        return value if replicas == 1 else [leaf[0] for leaf in value]

    run(3, Numbers(7, 0)), run(2, Numbers(7, 3))  # compiled: lowering asks for numbers too
    sent.clear()
    first = run(3, Numbers(7, 0))
    assert sent == [Numbers(7, 0)]
    second, third = run(2, Numbers(7, 3)), run(3, Numbers(7, 5))
    assert len(sent) == 1, "they go on where the dispatch before ended"
    steps, bits = (np.concatenate(parts) for parts in zip(first, second, third, strict=True))
    assert_bits_equal(steps, np.arange(8, dtype=np.int32))
    assert len(set(bits.tolist())) == 8
    again = run(3, Numbers(7, 5))
    other = run(3, Numbers(8, 8))
    assert sent[1:] == [Numbers(7, 5), Numbers(8, 8)], "another step, another seed"
    assert_bits_equal(again[1], third[1])
    assert not set(other[1].tolist()) & set(bits.tolist())
    assert_bits_equal(other[0], np.arange(8, 11, dtype=np.int32))
    assert_bits_equal(run(2, Numbers(8, 11))[0], np.arange(11, 13, dtype=np.int32))
    assert len(sent) == 3


def test_a_trainer_sends_them_once(sent):
    trainer = tr.Trainer(
        lambda p, x: ((p * x + jax.random.normal(tr.key())) ** 2).mean(),
        optax.sgd(0.1),
        jnp.float32(1),
        steps_per_execution=2,
    )
    trainer.fit([np.ones(3, np.float32)] * 6)
    after_first = len(sent)
    trainer.fit([np.ones(3, np.float32)] * 6)
    assert trainer.step == 12
    assert len(sent) <= after_first + 1
