"""A replay whose elements a front end hands over, block by block, as it did in the training.

    checkpoint, dataset ──▶ the front end's own loop ──▶ blocks ──▶ HandedReplay ──▶ Replay

Keras and PyTorch read data in loops of their own. Such a loop runs again from a checkpoint; its blocks
come here instead of to the program that trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.feeds.feed import Feed, Staged
from tailrace.trainer.checkpoints.snapshot import BUILD
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.comparison import Comparison, replay_of
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.recorded import Recorded
from tailrace.trainer.lookback.rerun import RunnerPair, has_taps


class HandedReplay:
    """Runs the blocks of a training again, up to a step and the end of its execution.

    Args:
        step: the step to look at.
        recorded: what is known of the training.
        note: the note of the checkpoint.
    """

    def __init__(self, step: int, recorded: Recorded, note: Mapping[str, Any]) -> None:
        self.step, self._recorded, self._note = step, recorded, note
        around = recorded.around(step)
        self._end = step + 1 if around is None else sum(around)
        # Keras numbers the names of metrics as they are made, and PyTorch keeps losses alone: what only
        # one of both has, says nothing.
        self._comparison = Comparison(recorded, all_known=False)
        self._seen: Results | None = None
        self._feed: Feed | None = None
        self._pairs: dict[Feed, RunnerPair] = {}
        self.done = False
        """Whether the step was seen, and its execution is over."""

    def take(self, engine: Engine, feed: Feed, block: Staged, exact: bool = False) -> None:
        """Run the steps of a block, up to the last one that matters.

        Args:
            engine: made for looking back, with its state at the block's start.
            feed: describes its elements.
            block: elements; its room is what the program of the training had.
            exact: whether that program was made for exactly these steps, not for any up to them.
        """
        if self.done:
            return
        if self._feed is not feed:
            engine.build_as_recorded(self._note.get(BUILD))
            engine.use(feed)
            self._feed = feed
            # One pair for each form of elements; its programs are compiled once, however many
            # blocks follow.
            self._pairs.setdefault(feed, RunnerPair(engine))
        count, first = engine.accumulation.microbatches, engine.step
        pair = self._pairs[feed]
        end = min(first + block.count // count, self._end)
        inside = (self.step, self.step + 1, *self._recorded.ends(first, end))
        # Cut where something is compared: around the step, and where recorded executions ended.
        cuts = sorted({first, end, *(cut for cut in inside if first < cut < end)})
        for start, stop in itertools.pairwise(cuts):
            looking, length = start == self.step, stop - start
            runner = pair.loud if looking else pair.silent
            part = portion(block, (start - first) * count, length * count)
            # The program that ran then, so that XLA rounds as it did: for exactly this length, or with
            # room for the longest.
            if exact and part.count == block.room:
                runner.capacity = None
            else:
                pair.set_longest(max(1, block.room // count))
                part = with_room(part, (runner.capacity or 0) * count)
            results = pair.run(length, looking, part)
            self._comparison.take(results, looking and has_taps(engine))
            if looking:
                self._seen = results
        self.done = engine.step >= self._end

    @property
    def found(self) -> Replay | None:
        """The result; None if the blocks ended before the step."""
        if self._seen is None:
            return None
        return replay_of(self._seen, self._comparison, self._note)


def portion(block: Staged, first: int, count: int) -> Staged:
    """Some of the elements of a block."""
    rows = slice(first * block.replicas, (first + count) * block.replicas)
    device = tuple(leaf[first : first + count] for leaf in block.device)
    return Staged([leaf[rows] for leaf in block.host], device, count, block.replicas)


def with_room(block: Staged, room: int) -> Staged:
    """A block with room for more elements on the device; what is there does not matter."""
    device = tuple(_padded(leaf, room) for leaf in block.device)
    return Staged(block.host, device, block.count, block.replicas)


def _padded(leaf: jax.Array | np.ndarray, room: int) -> jax.Array | np.ndarray:
    widths = ((0, room - len(leaf)), *[(0, 0)] * (leaf.ndim - 1))
    if isinstance(leaf, jax.Array):
        return jax.device_put(jnp.pad(leaf, widths), leaf.sharding)
    return np.pad(leaf, widths)
