"""The sentinel: a share of executions is run twice, and the state is checked between executions.

A bit that flips in memory or in a processor raises nothing. Two checks find it:

* at rest: the digests of the state before an execution are those after the one before it;
* at work: an execution that is run again on a copy of its state, with the same elements, has the same
  fingerprints and losses.

A corruption while an unchecked execution runs is missed: with a share of 0.01, in 99 of 100 cases. One
that recurs (a defective device) is missed n times with a probability of 0.99^n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.errors import CorruptionError, OptionError
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.taps.bit_digests import host_digest, joined
from tailrace.trainer.executions import Ticket
from tailrace.trainer.state_digests import StateDigests

ORDER = ("loss", "gradients", "parameters", "optimizer", "model_state")
"""Groups in the order in which a step makes them."""


@dataclasses.dataclass
class Watch:
    """What is to be compared when an execution is collected.

    Attributes:
        expected: digests after the execution before; None if there was none, or the state was set.
        found: digests before this one.
        emitted: what the second run emitted; None if there was none.
        digests: those after the second run.
    """

    expected: Any
    found: Any
    emitted: Any = None
    digests: Any = None


class Sentinel:
    """Decides which executions are checked, and compares.

    Args:
        share: of executions that are run again, from 0 to 1.
        digests: of the state.
        seed: chooses which.
    """

    def __init__(self, share: float, digests: StateDigests, seed: int) -> None:
        self.share, self.digests, self._seed = share, digests, seed
        self._after: Any = None
        self.injected: Callable[[LoopState], None] | None = None
        """Called between the checks of a state and its use: where tests flip bits."""

    def expects(self, words: Any) -> None:
        """The digests that the next execution must find; None where the state is set from outside."""
        self._after = words

    def dispatch(
        self, runner: LoopRunner, state: LoopState, step: int, run: Callable[..., Any]
    ) -> tuple[Any, Any, Watch]:
        """Dispatch an execution, and a second time if it is chosen; nothing is waited for.

        Args:
            runner: of the loop.
            state: what it works on.
            step: the first one.
            run: dispatches on a state; with `block` on given elements.
        """
        watch = Watch(self._after, self.digests.take(runner, state, None)[0])
        copy = state.copied() if self._chooses(step) else None
        if self.injected is not None:
            self.injected(state)
        emitted, ready = run(state)
        if copy is not None:
            origin, taken = runner.origin, runner.taken
            watch.emitted, _ = run(copy, block=taken[runner.infeeds[0]], following=0)
            watch.digests = self.digests.take(runner, copy, None)
            runner.executions, runner.origin = runner.executions - 1, origin
        return emitted, ready, watch

    def _chooses(self, step: int) -> bool:
        chance = host_digest(np.array([self._seed, step], np.int64), "sentinel")
        return chance < self.share * 2**64

    # -- comparing ------------------------------------------------------------------------------

    def check(
        self, ticket: Ticket, marks: Mapping[str, int], losses: np.ndarray, others: Any
    ) -> None:
        """Raise if the state changed at rest, or if two runs of an execution differ.

        Args:
            ticket: the execution.
            marks: its fingerprints.
            losses: its losses.
            others: the losses of the second run.
        """
        watch, first = ticket.watch, ticket.first_step
        if watch.expected is not None:
            pairs = zip(
                self.digests.names, joined(watch.expected), joined(watch.found), strict=True
            )
            if names := [name for name, before, now in pairs if before != now]:
                raise _corrupted(first, names, f"between executions, before step {first}")
        if watch.emitted is None:
            return
        second = dataclasses.replace(ticket, emitted=watch.emitted, digests=watch.digests)
        found = self.digests.of(second, others)[0]
        if groups := [group for group in ORDER if marks.get(group) != found.get(group)]:
            pairs = zip(losses, others, strict=True)
            differ = [n for n, (one, other) in enumerate(pairs) if one.tobytes() != other.tobytes()]
            step = first + (differ[0] if differ else ticket.steps - 1)
            raise _corrupted(step, groups, f"in step {step}: two runs of it differ")


def flip(array: Any, index: int, bit: int) -> Any:
    """An array with one bit of one value flipped: what a fault does."""
    host = np.array(array)
    raw = host.reshape(-1).view(np.uint8)
    raw[index * host.dtype.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    return jax.device_put(host, array.sharding)


def check_share(share: Any) -> float:
    """What `sentinel=` was given."""
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if share is not None and not (number and 0 <= share <= 1):
        raise OptionError(
            f"sentinel is the share of executions that are run twice, from 0 to 1, or None. "
            f"Received: sentinel={share!r}."
        )
    return 0.0 if share is None else float(share)


def _corrupted(step: int, names: Sequence[str], where: str) -> CorruptionError:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    error = CorruptionError(
        f"Silent corruption {where}: {shown}. The same computation gave other bits, so a memory or a "
        f"processor is at fault, or the program is not deterministic. Nothing after it was kept: go on "
        f"from a checkpoint, on another device."
    )
    error.step, error.names = step, tuple(names)
    return error
