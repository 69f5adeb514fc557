"""What happens when a guard has stopped the training: find out why, and say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.data.adapters import rows_read
from tailrace.devices.processes.distributed import process_index
from tailrace.errors import NonFiniteError
from tailrace.feeds.feed import Staged
from tailrace.feeds.infeed import InfeedQueue
from tailrace.messages import listed
from tailrace.program.nonfinite import INFEED, find_culprit, step_block
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.taps.frame import Ambient, Emission, Frame
from tailrace.taps.wanted import FiniteKey, fine
from tailrace.trainer.executions import Results, Ticket


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
    results: Results,
    ticket: Ticket,
    bad: BadStep,
    *,
    runner: LoopRunner,
    state: LoopState,
    seed: int,
    microbatches: int,
) -> Results:
    """Go back to the state before a bad step; the results before it, with the failure.

    Args:
        results: those of all steps of the execution.
        ticket: the execution, with the inputs that were kept for its guard.
        bad: the first bad step.
        runner: its program.
        state: the buffers of the program, which become those before the step.
        seed: the seed of random keys.
        microbatches: the number of microbatches per step.
    """
    kept, origin, feed = bad.step, ticket.origin, runner.infeeds[0]
    assert origin is not None
    # The state is recomputed here, after the fact: keeping the old one in every step would cost
    # a read and a write of all of it.
    runner.rewind(state, origin, kept)
    failure = diagnose(
        runner,
        state,
        origin.elements[feed],
        bad,
        first_step=ticket.first_step,
        seed=seed,
        microbatches=microbatches,
        reading=ticket.reading,
    )
    # For the error: the rows of the bad step alone, of all its microbatches and local replicas.
    per_step = microbatches * runner.placement.local_replicas
    rows = slice(kept * per_step, (kept + 1) * per_step)
    failure.elements = feed.elements_of([leaf[rows] for leaf in origin.elements[feed].host])
    weights, elements, reading = results.weights, results.elements, results.reading
    # Of the steps that count, for an audit of the run: the others are read again, or never.
    if reading is not None:
        reading = (*reading[:2], reading[2] // ticket.steps * kept)
    return dataclasses.replace(
        results,
        steps=kept,
        scalars={name: values[:kept] for name, values in results.scalars.items()},
        weights=weights[:kept] if weights is not None else None,
        failure=failure,
        fingerprint={},  # the gradients belong to a step that does not count
        elements=elements[:kept] if elements is not None else None,
        reading=reading,
    )


def too_many_skipped(steps: Sequence[int], limit: int) -> NonFiniteError:
    """The error for a fit that skipped more steps than it may."""
    shown = ", ".join(map(str, steps[-5:]))
    error = NonFiniteError(
        f"{len(steps)} steps of this fit were skipped because a watched tensor was not finite, more "
        f"than limit={limit}; the latest: {shown}. None of them changed the state. Look at their data "
        f"with trainer.explain_step, lower the learning rate, or raise the limit."
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
) -> NonFiniteError:
    """Replay the bad step from the elements kept on the host; the error that describes it."""
    step, replica, names = bad
    replicas, local = runner.placement.replicas, runner.placement.local_replicas
    # The elements of a replica are on the host of the process that feeds it.
    owner = replica // local
    # Before the processes part: reading the state is something that all of them must do.
    args = [jnp.asarray(leaf) for leaf in runner.layout.carried_by(state, replica)]
    if owner != process_index():
        error = NonFiniteError(
            f"Not finite in step {first_step + step}, replica {replica}: {', '.join(names[:3])}. "
            f"Process {owner}, which computes that replica, says which operation it was. The "
            f"parameters are those before that step."
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
    if culprit is not None and from_data:
        numbered = culprit.dataset_row >= 0
        without = f": dataset.without([{culprit.dataset_row}])" if numbered else ""
        advice = f"Correct the data, or leave that row out{without}."
    error = NonFiniteError(
        f"Not finite in {which}: {shown}.{why} The parameters are those before that step. {advice}"
    )
    error.step, error.culprit = number, culprit
    return error


def _row_in_dataset(feed: object, reading: tuple[int, int, int], place: int, row: int) -> int:
    """The number in the dataset of a row of the element at `place` of an execution; -1 for none."""
    if not isinstance(feed, InfeedQueue) or row < 0:
        return -1
    epoch, first, _ = reading
    numbers = rows_read(feed.dataset, epoch, first + place, 1)
    return -1 if numbers is None else int(numbers[0][row])
