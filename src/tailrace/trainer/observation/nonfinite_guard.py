"""What happens when a guard has stopped the training: find out why, and say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import listed
from tailrace.data.adapters import rows_read
from tailrace.devices.processes.distributed import process_index
from tailrace.errors import NonFiniteError
from tailrace.feeds.feed import Staged
from tailrace.feeds.infeed import InfeedQueue
from tailrace.program.nonfinite import INFEED, find_culprit, step_block
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.taps.frame import Ambient, Emission, Frame
from tailrace.taps.wanted import FiniteKey, fine
from tailrace.trainer.executions import Ticket
from tailrace.trainer.state_digests import StateDigests

WATCH_UPDATES = (
    'tr.stop_on_nonfinite(["loss", "grad/*", "update/*"]) finds a bad update before it is applied.'
)


class BadStep(NamedTuple):
    """A step with values that are not finite.

    Attributes:
        step: its number within the execution.
        replica: the first replica concerned.
        names: the tensors concerned.
    """

    step: int
    replica: int
    names: list[str]


def first_bad_step(emitted: Mapping[Hashable, Emission], replicas: int) -> BadStep | None:
    """The first step of an execution with a flag down."""
    found: list[BadStep] = []
    for key, down in _flags_down(emitted, replicas):
        if down.any():
            step = int(np.argmax(down.any(axis=0)))
            names = [name for name, _ in key]  # pyright: ignore[reportGeneralTypeIssues]
            found.append(BadStep(step, int(np.argmax(down[:, step])), names))
    return min(found, key=lambda bad: bad.step, default=None)


def bad_steps(emitted: Mapping[Hashable, Emission], replicas: int) -> np.ndarray:
    """Which steps of an execution had a flag down on some replica: 1 or 0 each, float32."""
    found: Any = 0
    for _, down in _flags_down(emitted, replicas):
        found = found | down.any(axis=0)
    return np.asarray(found, np.float32)


def _flags_down(
    emitted: Mapping[Hashable, Emission], replicas: int
) -> Iterator[tuple[FiniteKey, np.ndarray]]:
    """For each guarded group of tensors, whether it was not finite: [replicas, steps]."""
    for key, emission in emitted.items():
        if isinstance(key, FiniteKey):
            flags = np.asarray(fine(jax.tree.map(np.asarray, emission)))
            # Emissions of a single replica have no dim for it.
            flags = flags if replicas > 1 else flags[None]
            # A step of several microbatches has a flag for each: one that is down is enough.
            yield key, np.logical_not(flags.reshape(replicas, flags.shape[1], -1).all(axis=2))


def stopped(
    ticket: Ticket,
    bad: BadStep,
    *,
    runner: LoopRunner,
    state: LoopState,
    seed: int,
    microbatches: int,
    digests: StateDigests | None,
    trained: str = "parameters",
) -> tuple[Ticket, NonFiniteError]:
    """Go back to the state before a bad step; the execution of the steps before it, and the failure.

    Args:
        ticket: the execution, with the inputs that were kept for its guard.
        bad: the first bad step.
        runner: its program.
        state: the buffers of the program, which become those before the step.
        seed: the seed of random keys.
        microbatches: the number of microbatches per step.
        digests: computes fingerprints, if they were requested.
        trained: what is trained, in words.
    """
    kept, origin, feed = bad.step, ticket.origin, runner.infeeds[0]
    assert origin is not None
    # The state is recomputed here, after the fact: keeping the old one in every step would cost
    # a read and a write of all of it.
    again = runner.rewind(state, origin, kept)
    # What it emits counts: a sum over the execution, or the values of its last step, cannot be cut.
    emitted, ready = ticket.emitted, ticket.ready
    marks = None
    if again is not None:
        emitted, ready = again
        marks = None if digests is None else digests.after(runner, state, emitted)
    failure = diagnose(
        runner,
        state,
        origin.elements[feed],
        bad,
        first_step=ticket.first_step,
        seed=seed,
        microbatches=microbatches,
        reading=ticket.reading,
        trained=trained,
    )
    # For the error: the rows of the bad step alone, of all its microbatches and local replicas.
    per_step = microbatches * runner.placement.local_replicas
    rows = slice(kept * per_step, (kept + 1) * per_step)
    failure.elements = feed.elements_of([leaf[rows] for leaf in origin.elements[feed].host])
    reading = ticket.reading
    # Of the steps that count, for an audit of the run: the others are read again, or never.
    if reading is not None:
        reading = (*reading[:2], reading[2] // ticket.steps * kept)
    shorter = dataclasses.replace(
        ticket, steps=kept, emitted=emitted, ready=ready, digests=marks, reading=reading, watch=None
    )
    return shorter, failure


def too_many_skipped(steps: Sequence[int], limit: int) -> NonFiniteError:
    """The error for a fit that skipped more steps than it may."""
    shown = ", ".join(map(str, steps[-5:]))
    last = max(2, limit + 1)
    advice = (
        "Look at their data with trainer.explain_step, lower the learning rate, or raise the limit."
    )
    if len(steps) >= last and steps[-1] - steps[-last] == last - 1:
        advice = (
            "They follow one another, so the state may hold the NaN or Inf, and not the data: look at "
            "trainer.params, and go back with trainer.rewind. " + WATCH_UPDATES
        )
    error = NonFiniteError(
        f"{len(steps)} steps of this fit were skipped because a watched tensor was not finite, more "
        f"than limit={limit}; the latest: {shown}. None of them changed the state. {advice}"
    )
    error.step = steps[-1]
    return error


def diagnose(
    runner: LoopRunner,
    state: LoopState,
    staged: Staged,
    bad: BadStep,
    *,
    first_step: int,
    seed: int,
    microbatches: int,
    reading: tuple[int, int, int] | None = None,
    trained: str = "parameters",
) -> NonFiniteError:
    """Replay the bad step from the elements kept on the host; the error that describes it."""
    step, replica, names = bad
    are = "parameters are those" if trained == "parameters" else f"{trained} is that"
    as_before = f"The {are} before that step."
    replicas, local = runner.placement.replicas, runner.placement.local_replicas
    # The elements of a replica are on the host of the process that feeds it.
    owner = replica // local
    # Before the processes part: reading the state is something that all of them must do.
    args = [jnp.asarray(leaf) for leaf in runner.layout.carried_by(state, replica)]
    if owner != process_index():
        error = NonFiniteError(
            f"Not finite in step {first_step + step}, replica {replica}: {', '.join(names[:3])}. "
            f"Process {owner}, which computes that replica, says which operation it was. {as_before}"
        )
        error.step = first_step + step
        return error
    start = step * microbatches * local + replica % local
    rows = slice(start, start + microbatches * local, local)
    infeed = runner.infeeds[0]
    elements = infeed.elements_of([leaf[rows] for leaf in staged.host])
    number = first_step + step
    # As the program has them: `tr.key()` draws what it drew then, dropout included.
    ambient = Ambient(jax.random.key(jnp.uint32(seed % 2**32)), number, replica)
    frame = Frame(ambient, {infeed: step_block(elements)})
    found = find_culprit(runner.traced, args, frame)
    culprit = found.culprit
    from_data = culprit is not None and culprit.operation == INFEED
    if culprit is not None and from_data and reading is not None:
        place = start + culprit.microbatch * local
        number_of_row = _row_in_dataset(infeed, reading, place, culprit.row)
        culprit = dataclasses.replace(culprit, dataset_row=number_of_row)
    # Flags say which tensors were bad, a replay also in which order: the first is nearest the cause.
    names = list(dict.fromkeys(name for name in found.bad if name in names)) or names
    shown = listed([*map(repr, names)])
    which = f"step {number}" + (f", replica {replica}" if replicas > 1 else "")
    if culprit is not None and microbatches > 1:
        which += f", microbatch {culprit.microbatch}"
    why = f" {culprit}." if culprit else " A replay of the step on its own was finite."
    advice = "Lower the learning rate, clip gradients, or look at the row."
    if culprit is None and found.bad:
        why, advice = _not_made(found.bad, args)
    if culprit is not None and from_data:
        numbered = culprit.dataset_row >= 0
        without = f": dataset.without([{culprit.dataset_row}])" if numbered else ""
        advice = f"Correct the data, or leave that row out{without}."
    error = NonFiniteError(f"Not finite in {which}: {shown}.{why} {as_before} {advice}")
    error.step, error.culprit = number, culprit
    return error


def _not_made(bad: Sequence[str], state: Sequence[Any]) -> tuple[str, str]:
    """Why a step is not finite though none of its operations made a NaN or Inf; what to change.

    Args:
        bad: the tensors of the step that are not finite, in program order.
        state: the state before the step.
    """
    held = [name for name in dict.fromkeys(bad) if name.startswith(("param/", "state/"))]
    if held or not all(map(_is_finite, state)):
        which = "The state of the optimizer or model"
        if held:
            what = "parameters" if held[0].startswith("param/") else "values of the state"
            which = f"The {what} ({listed([*map(repr, held)])})"
        return (
            f" {which} held it before the step: an earlier update made it, or it was there from the "
            f"start.",
            f"Go back further with trainer.rewind, or lower the learning rate. {WATCH_UPDATES}",
        )
    return " A constant of the program holds it.", "Correct the loss function."


def _is_finite(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jnp.inexact) or bool(jnp.isfinite(leaf).all())


def _row_in_dataset(feed: object, reading: tuple[int, int, int], place: int, row: int) -> int:
    """The number in the dataset of a row of the element at `place` of an execution; -1 for none."""
    if not isinstance(feed, InfeedQueue) or row < 0:
        return -1
    epoch, first, _ = reading
    numbers = rows_read(feed.dataset, epoch, first + place, 1)
    return -1 if numbers is None else int(numbers[0][row])
