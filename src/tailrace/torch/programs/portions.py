"""Dispatches the execution of a call whole, or in portions if its elements must be transferred.

    whole:     copy all ──▶ compute all ──▶
    portions:  copy 1 │ copy 2    │ copy 3    │
                      │ compute 1 │ compute 2 │ compute 3 ──▶

While one portion computes, the elements of the next ones are transferred. Steps, results and their
order are those of the whole. Values of the last step only are computed by the last portion, so that
the loops of the others need not carry them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.spans.span import span, waiting_for
from tailrace.feeds import dispatch_table
from tailrace.jaxprs.walk import BRANCH, WHILE, walk
from tailrace.program.running.dispatch_lengths import good_piece, pieces
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.result_packing import start_copying
from tailrace.program.tracing.tap_selection import Sight
from tailrace.taps.frame import Emission
from tailrace.taps.tap import Mode, StopOnNonfinite
from tailrace.torch.calls.call_blocks import CallBlocks


def lengths_of(steps: int, nbytes: int, period: int = 1, ending: bool = False) -> tuple[int, ...]:
    """The lengths of the portions of a call.

    Args:
        steps: the steps of the call.
        nbytes: the bytes of its elements.
        period: portions are multiples of this.
        ending: whether to end with a separate short portion.

    >>> lengths_of(100, 5 << 20, ending=True), lengths_of(100, 5 << 20), lengths_of(100, 1 << 20)
    ((49, 49, 2), (50, 50), (100,))
    """
    units, rest = divmod(steps, period)
    count = min(nbytes // dispatch_table.PORTION_BYTES, dispatch_table.MOST_PORTIONS, units)
    # A period must not be cut: its taps look at the last of its steps.
    if count < 2 or rest:
        return (steps,)
    # The values of the last step leave in a short portion of their own: programs of the long ones
    # have less to carry.
    if ending:
        each = max(1, (units - 1) // count)
        whole = (units - 1) // each
        lengths = [*[each] * whole, units - whole * each]
    else:
        lengths = list(pieces(units, good_piece(units, -(-units // count))))
    return tuple(length * period for length in lengths)


@dataclasses.dataclass
class Sent:
    """What has left the portions of a call so far, in transfer from the device.

    Attributes:
        parts: the emissions of each portion.
        ready: an array that is ready when the last of them has finished.
        steps: their steps.
    """

    parts: list[dict[Hashable, Emission]] = dataclasses.field(default_factory=list)
    ready: Any = None
    steps: int = 0


class Portions:
    """The execution of a call, in as many dispatches as pay off.

    Args:
        runner: runs the steps.
        sight: the observed tensors.
        steps: the steps per call.
        resident: whether the elements of calls are on the device already.
    """

    def __init__(self, runner: LoopRunner, sight: Sight, steps: int, resident: bool) -> None:
        self._runner, self._period = runner, sight.period
        self._transfers = on_accelerator(runner)
        last = [one for one in sight.chosen if one.tap.mode is Mode.FINAL]
        self.lengths: tuple[int, ...] = (steps,)
        if not resident and self._transfers and _divisible(runner, sight):
            nbytes = runner.bytes_per_pass * steps
            self.lengths = lengths_of(steps, nbytes, sight.period, ending=bool(last))
        # Many small results as one array: each copy from an accelerator has a fixed cost.
        runner.packed = self._transfers
        self._body = runner
        if last and len(self.lengths) > 1:
            # A second program without the values of the last step: its loop has less to carry.
            others = [one for one in sight.chosen if one.tap.mode is not Mode.FINAL]
            self._body = runner.observing(dataclasses.replace(sight, chosen=others).wanted)
        # Looked up once: a call of one short step would spend more on this than on its dispatch.
        placement, each = runner.placement, runner.elements_per_pass
        self._sharding, self._replicas = placement.shared_out, placement.replicas
        self._each = each // placement.local_replicas
        several = len(self.lengths) > 1
        self.counts = tuple(length * each for length in self.lengths) if several else ()
        """The number of elements of each portion; empty if the call is dispatched whole."""

    @property
    def runners(self) -> tuple[LoopRunner, LoopRunner]:
        """What runs all portions but the last, and what runs that one."""
        return self._body, self._runner

    def compile(self, state: LoopState) -> None:
        """Compile the programs of a call."""
        for length in dict.fromkeys(self.lengths[:-1]):
            self._body.compiled(state, length, self._period)
        self._runner.compiled(state, self.lengths[-1], self._period)

    def dispatch(
        self,
        state: LoopState,
        numbers: Numbers,
        arrays: list[Any],
        sent: Sent,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        """Start a call on its elements, stacked; does not wait for it.

        Args:
            state: where its state is on the device.
            numbers: its seed and its first step.
            arrays: its elements.
            sent: gets what leaves each portion, also if a later one fails.
            moved: called with the number of steps after each portion: the state is that after them.
        """
        blocks = CallBlocks(arrays, self.counts, self._sharding, self._replicas)
        each = self._each
        for number, length in enumerate(self.lengths, start=1):
            runner = self._runner if number == len(self.lengths) else self._body
            with span("infeed copy", elements=length * each):
                block = blocks.take(length * each)
            emitted, sent.ready = runner.dispatch(state, length, numbers, 0, self._period, block)
            sent.parts.append(emitted)
            sent.steps += length
            if moved is not None:
                moved(length)
            numbers = numbers.after(length)

    def results(self, sent: Sent) -> dict[Hashable, Emission]:
        """Wait for a call; its emissions, on the host."""
        if self._transfers:
            # All copies are started before the first is waited for.
            start_copying([list(part.values()) for part in sent.parts])
        with waiting_for(sent.ready, "outfeed copy"):
            return joined(sent.parts)


def joined(parts: Sequence[Mapping[Hashable, Emission]]) -> dict[Hashable, Emission]:
    """The emissions of the portions of a call, joined step by step.

    Values that only the last portion has belong to the last step.
    """
    # In this order, because the earlier ones can be read while the last one computes.
    *body, last = [_on_host(part) for part in parts]
    if not body:
        return last
    return {
        key: jax.tree.map(_concatenated, *(part[key] for part in body if key in part), emission)
        for key, emission in last.items()
    }


def _on_host(part: Mapping[Hashable, Emission]) -> dict[Hashable, Emission]:
    """The emissions of a portion, on the host."""
    leaves, structure = jax.tree.flatten(list(part.values()))
    values = jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])
    return dict(zip(part, values, strict=True))


def on_accelerator(runner: LoopRunner) -> bool:
    """Whether elements must be transferred to the program's device."""
    return runner.placement.device.platform != "cpu"


def _divisible(runner: LoopRunner, sight: Sight) -> bool:
    """Whether the portions of a call are bit-equal to the whole."""
    if runner.placement.mesh is not None:
        return False  # several devices: emissions have other shapes
    places = {place.position: place for place in walk(runner.traced.jaxpr.eqns)}
    for one in sight.chosen:
        mode = one.tap.mode
        if mode is Mode.SUM or isinstance(one.tap, StopOnNonfinite):
            return False  # sums of sums are rounded differently; a guard replays the whole
        around = places[one.entry.position].inside
        if mode is Mode.FINAL and any(a.kind in (BRANCH, WHILE) for a in around):
            return False  # the last value may be older than the last portion
    return True


def _concatenated(*arrays: Any) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
