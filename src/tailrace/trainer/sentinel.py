"""The sentinel: a share of executions is run twice, and the state is checked between executions.

A bit that flips in memory or in a processor raises nothing. Two checks find it:

* at rest: the digests of the state before an execution are those after the one before it;
* at work: an execution that is run again on a copy of its state, with the same elements, has the same
  fingerprints and losses.

An execution that is run twice sends out the digest of every tensor of every step, both times. So the
first tensor that differs, in the order of the program, is known: what a fault did spreads to all
others, and cannot be asked for afterwards. In a pipeline the leaves of the state are compared.

A corruption while an unchecked execution runs is missed: with a share of 0.01, in 99 of 100 cases. One
that recurs (a defective device) is missed n times with a probability of 0.99^n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import listed
from tailrace.errors import CorruptionError, OptionError
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.tracing.tap_selection import Sight
from tailrace.records.records import Records, take_records
from tailrace.taps.bit_digests import bit_digest, host_digest, joined
from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Tap
from tailrace.trainer.executions import Ticket
from tailrace.trainer.state_digests import StateDigests


def is_watched(entry: Entry) -> bool:
    """All tensors but cotangents, which would need operations of their own to be seen."""
    return entry.kind != "cotangent"


WATCHED = Tap(is_watched, reduce=bit_digest)
"""What executions that are run twice send out."""

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
        sight: the tensors whose digests both runs emitted; None if none.
        replicas: the number of replicas.
    """

    expected: Any
    found: Any
    emitted: Any = None
    digests: Any = None
    sight: Sight | None = None
    replicas: int = 1


class Sentinel:
    """Decides which executions are checked, and compares.

    Args:
        share: the fraction of executions that are run again, from 0 to 1.
        digests: computes the digests of the state.
        seed: the seed of the choice.
    """

    def __init__(self, share: float, digests: StateDigests, seed: int) -> None:
        self.share, self.digests, self._seed = share, digests, seed
        self.sights: dict[LoopRunner, Sight] = {}
        """The tensors that are compared, by program."""
        self._loud: dict[LoopRunner, LoopRunner] = {}
        self._after: Any = None
        self.injected: Callable[[LoopState], None] | None = None
        """Called between the checks of a state and its use: where tests flip bits."""

    def expects(self, words: jax.Array | None) -> None:
        """The digests that the next execution must find; None where the state is set from outside."""
        self._after = words

    def watch(self, runner: LoopRunner, sight: Sight) -> None:
        """A program's executions that are run twice send out what `sight` has of WATCHED."""
        self.sights[runner] = sight

    def dispatch(
        self, runner: LoopRunner, state: LoopState, step: int, run: Callable[..., Any]
    ) -> tuple[Any, Any, Watch]:
        """Dispatch an execution, and a second time if it is chosen; nothing is waited for.

        Args:
            runner: the loop.
            state: the buffers that it works on.
            step: the first step.
            run: `run(runner, state)` dispatches; with `block` on given elements.
        """
        # Digests are taken in any case, whether this execution is chosen or not: corruption at rest is
        # found for the price of reading the state once.
        watch = Watch(self._after, self.digests.take(runner, state, None)[0])
        # Before the run, which overwrites the state; a second state on the device, so only if chosen.
        copy = state.copied() if self.chooses(step) else None
        if self.injected is not None:
            self.injected(state)
        if copy is None:
            return (*run(runner, state), watch)
        loud = self._looking(runner)
        compile_s = loud.compile_s
        # One program for both: another one may round differently.
        with loud.fixed.unchanged():
            emitted, ready = run(loud, state)
            origin, taken = loud.origin, loud.taken
            # With the elements of the first run, which are still on the device: reading them again
            # could give others, and would not test what the device computes.
            watch.emitted, _ = run(loud, copy, block=taken[runner.infeeds[0]], following=0)
        watch.digests = self.digests.after(loud, copy, watch.emitted)
        watch.sight, watch.replicas = self.sights.get(runner), runner.placement.replicas
        # The second run has replaced it; the ticket must have the inputs of the first.
        runner.origin = origin
        if loud is runner:
            runner.executions -= 1  # for everything else it is one execution
        else:
            runner.executions += 1
            runner.compile_s += loud.compile_s - compile_s
        return emitted, ready, watch

    def _looking(self, runner: LoopRunner) -> LoopRunner:
        """The same loop, of which the digests of tensors leave as well."""
        sight = self.sights.get(runner)
        if sight is None:
            return runner
        if runner not in self._loud:
            wanted = {position: [*wants] for position, wants in runner.wanted.items()}
            for position, wants in sight.wanted.items():
                wanted.setdefault(position, []).extend(wants)
            self._loud[runner] = runner.observing(wanted)
        loud = self._loud[runner]
        # Each time, not once: a fit may have changed them since, and a loop with other room is
        # another program, which may round differently.
        loud.capacity, loud.muted, loud.packed = runner.capacity, runner.muted, runner.packed
        loud.keep_elements = runner.keep_elements
        return loud

    def chooses(self, step: int) -> bool:
        """Whether the execution that begins with a step runs twice; all processes choose alike."""
        # A function of seed and step, not a random number: all processes must choose the same
        # executions, and a resumed fit those of the fit it continues.
        chance = host_digest(np.array([self._seed, step], np.int64), "sentinel")
        return chance < self.share * 2**64

    # -- comparing ------------------------------------------------------------------------------

    def check(
        self,
        ticket: Ticket,
        marks: Mapping[str, int],
        losses: np.ndarray,
        others: np.ndarray | None,
    ) -> None:
        """Raise if the state changed at rest, or if two runs of an execution differ.

        Args:
            ticket: the execution.
            marks: its fingerprints.
            losses: its losses.
            others: the losses of the second run; None if there was none.
        """
        watch, first = ticket.watch, ticket.first_step
        if watch.expected is not None:
            pairs = zip(
                self.digests.names, joined(watch.expected), joined(watch.found), strict=True
            )
            if names := [name for name, before, now in pairs if before != now]:
                raise _corrupted(first, names, f"between executions, before step {first}")
        if watch.emitted is None or others is None:
            return
        # As if the second run had been an execution of its own: the same code makes its
        # fingerprints, so only the bits can differ.
        second = dataclasses.replace(ticket, emitted=watch.emitted, digests=watch.digests)
        found = self.digests.of(second, others)[0]
        # By group first: the digests of single tensors are read only if something differs.
        if groups := [group for group in ORDER if marks.get(group) != found.get(group)]:
            step, names = self._first(ticket, second, losses, others)
            raise _corrupted(step, names or groups, f"in step {step}: two runs of it differ")

    def _first(
        self, ticket: Ticket, second: Ticket, losses: np.ndarray, others: np.ndarray
    ) -> tuple[int, list[str]]:
        """The first step in which two runs differ, and the tensors in the order of the program."""
        if ticket.watch.sight is not None and (found := _differing(ticket, second)):
            step = min(found.values())
            return step, [name for name, first in found.items() if first == step]
        # Without digests of tensors, losses tell the step, and the state at the end which leaves.
        pairs = zip(losses, others, strict=True)
        differ = [n for n, (one, other) in enumerate(pairs) if one.tobytes() != other.tobytes()]
        # Losses equal, state different: the fault came after the last loss was computed, as far as
        # one can see.
        step = ticket.first_step + (differ[0] if differ else ticket.steps - 1)
        leaves = zip(
            self.digests.names, joined(ticket.digests[0]), joined(second.digests[0]), strict=True
        )
        return step, [name for name, one, other in leaves if one != other]


def _differing(ticket: Ticket, second: Ticket) -> dict[str, int]:
    """The tensors whose digests differ in two runs of an execution: the first step of each.

    In the order of the program: a value is made behind those that it is made of.
    """
    sides = []
    chosen = sorted(ticket.watch.sight.chosen, key=lambda one: one.entry.position)
    for emitted in (ticket.emitted, second.emitted):
        records = Records()
        for part in take_records(
            emitted,
            chosen,
            first_step=ticket.first_step,
            steps=ticket.steps,
            replicas=ticket.watch.replicas,
        ):
            records.add(part)
        sides.append(dict(records.items()))
    found = {}
    for key, one in sides[0].items():
        other = sides[1][key]
        differ = (one.values != other.values).reshape(len(one), -1).any(axis=1)
        if differ.any():
            found[key[0]] = int(one.steps[differ].min())
    return found


def flip(array: jax.Array, index: int, bit: int) -> jax.Array:
    """An array with one bit of one value flipped: what a fault does."""
    host = np.array(array)
    raw = host.reshape(-1).view(np.uint8)
    raw[index * host.dtype.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    return jax.device_put(host, array.sharding)


def check_share(share: object) -> float:
    """Parse the value of `sentinel=`."""
    if share is None:
        return 0.0
    if isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1:
        return float(share)
    raise OptionError(
        f"sentinel is the share of executions that are run twice, from 0 to 1, or None. "
        f"Received: sentinel={share!r}."
    )


def _corrupted(step: int, names: Sequence[str], where: str) -> CorruptionError:
    error = CorruptionError(
        f"Silent corruption {where}: {listed(names)}. The same computation gave other bits, so a "
        f"memory or a processor is at fault, or the program is not deterministic. Nothing after it was "
        f"kept: go on from a checkpoint, on another device."
    )
    error.step, error.names = step, tuple(names)
    return error
