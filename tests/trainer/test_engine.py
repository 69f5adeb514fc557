"""The engine alone, driven by a loop of the test: what front ends do."""

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, plain_training, regression
from tailrace.errors import FeedError, NonFiniteError, ProgramError
from tailrace.feeds.feed import HandedFeed, Staged
from tailrace.feeds.infeed import InfeedQueue
from tailrace.trainer.engine import Engine

ELEMENTS = regression(24)


def engine_of(**options):
    return Engine(mlp_loss, optax.sgd(0.1, momentum=0.9), mlp(), **options)


def expected(steps, first=0):
    params, losses = plain_training(
        mlp_loss, optax.sgd(0.1, momentum=0.9), mlp(), ELEMENTS[first : first + steps]
    )
    return params, losses


def test_tickets_are_collected_in_order_and_behind():
    engine = engine_of()
    feed = engine.use(ELEMENTS)
    tickets = [engine.dispatch(length) for length in (3, 5, 2)]
    assert [(one.first_step, one.steps) for one in tickets] == [(0, 3), (3, 5), (8, 2)]
    losses = [engine.collect(one).scalars["loss"][:, 0, 0] for one in tickets]
    params, plain = expected(10)
    assert_bits_equal(np.concatenate(losses), plain)
    assert_bits_equal(engine.state.params, params)
    assert (engine.step, engine.executions) == (10, 3)
    feed.rest()


def test_blocks_of_the_caller_with_room_for_more(compilations):
    """One program for all lengths up to the room; what the other rows hold does not matter."""
    engine = engine_of()
    engine.use(HandedFeed(InfeedQueue(ELEMENTS).spec()))
    engine.runner.capacity = 8
    start, losses = 0, []
    for length in (8, 3, 5):
        rows = ELEMENTS[start : start + length]
        host = [np.stack(leaves) for leaves in zip(*rows, strict=True)]
        room = [np.full((8, *leaf.shape[1:]), np.nan, leaf.dtype) for leaf in host]
        for rows, leaf in zip(room, host, strict=True):
            rows[:length] = leaf
        ticket = engine.dispatch(length, block=Staged(host, tuple(room), length, 1))
        losses.append(engine.collect(ticket).scalars["loss"][:, 0, 0])
        start += length
    params, plain = expected(16)
    assert_bits_equal(np.concatenate(losses), plain)
    assert_bits_equal(engine.state.params, params)
    assert len(compilations) == 1


def test_a_handed_feed_has_nothing_of_its_own():
    engine = engine_of()
    engine.use(HandedFeed(InfeedQueue(ELEMENTS).spec()))
    with pytest.raises(FeedError, match="Pass 4 to the dispatch"):
        engine.dispatch(4)


def test_the_state_can_be_replaced():
    engine, other = engine_of(), engine_of()
    engine.use(ELEMENTS).rest()
    engine.collect(engine.dispatch(4, following=0))
    other.state = jax.tree.map(np.asarray, engine.state)
    other.step = engine.step
    for one in (engine, other):
        one.use(ELEMENTS[4:])
        one.collect(one.dispatch(4, following=0))
    assert_bits_equal(other.state, engine.state)
    assert_bits_equal(other.state.params, expected(8)[0])


def test_a_guard_puts_the_reason_into_the_results():
    bad = list(ELEMENTS)
    bad[5] = jax.tree.map(lambda x: np.full_like(x, np.nan), bad[5])
    engine = engine_of(observe=[tr.stop_on_nonfinite("loss")])
    engine.use(bad)
    first, second = engine.dispatch(8), engine.dispatch(4)
    results = engine.collect(first)
    assert (results.steps, len(results.scalars["loss"])) == (5, 5)
    assert isinstance(results.failure, NonFiniteError)
    assert results.failure.step == engine.step == 5
    assert_bits_equal(engine.state.params, expected(5)[0])
    assert second.first_step == 8, "void: what it computed changed nothing"


def test_before_a_dataset():
    with pytest.raises(ProgramError, match="Call engine.use first"):
        engine_of().dispatch(1)
