"""Errors for a device without enough memory: the use of memory by part, and remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jax

from tailrace.base.messages import size_text
from tailrace.errors import DeviceMemoryError
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.step.train_state import TrainState
from tailrace.trainer.costs.explanation import explain, state_bytes
from tailrace.trainer.costs.memory_plan import MemoryPlan
from tailrace.trainer.executions import Ticket

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""What XLA says first where memory is not enough."""

_TEMPORARIES = "activations and temporaries"


class Training(Protocol):
    """What trains, as far as a shortage is described from it; `Engine` says what each is."""

    step: int
    memory: MemoryPlan
    form: TrainState

    @property
    def placement(self) -> Placement:
        """The devices."""
        ...

    @property
    def runner(self) -> LoopRunner:
        """The program in use."""
        ...

    @property
    def loop_state(self) -> LoopState:
        """What it works on."""
        ...


@contextmanager
def within_memory(engine: Training, length: int) -> Iterator[None]:
    """Turn XLA's out-of-memory error into a message about this training.

    Args:
        engine: the engine.
        length: the number of steps of the execution.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # XLA has one class for all errors; the kind is in the text only.
        if EXHAUSTED not in str(error):
            raise
        raise DeviceMemoryError(describe_shortage(engine, length, str(error))) from error


@contextmanager
def ended_within_memory(engine: Training, ticket: Ticket) -> Iterator[None]:
    """The same for an execution that was dispatched, and fails when its results are collected.

    The step is that before it. So is the state if a guard keeps what executions start from; otherwise
    the execution has consumed it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        engine.step = ticket.first_step
        # 0 steps: to the start of this execution, from the inputs that the guard has kept.
        if ticket.origin is not None:
            engine.runner.rewind(engine.loop_state, ticket.origin, 0)
        kept = ticket.origin is not None
        text = describe_shortage(engine, ticket.steps, str(error), kept)
        raise DeviceMemoryError(text) from error


def describe_shortage(
    engine: Training, length: int, said: str, survived: bool | None = None
) -> str:
    """The use of memory on each device, the remedies, and whether the state survived.

    Args:
        engine: the engine.
        length: the number of steps of the execution.
        said: what XLA said.
        survived: whether the state did; None: it did unless the execution has taken its arrays.
    """
    parts = _parts(engine, length)
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
    wanted = re.search(r"allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)", said)
    asked = f" when {wanted[1]} more were asked for" if wanted else ""
    # What a user must know next: whether the same trainer can continue.
    kept = (
        f"The trainer is as it was before this execution, at step {engine.step}."
        if (_is_whole(engine) if survived is None else survived)
        else "The state was lost with the execution: go back to a checkpoint."
    )
    return (
        f"The device does not have enough memory for an execution of {length} steps{asked}. On each "
        f"device: {listed or 'unknown'}. What would help: {'; '.join(_remedies(engine, parts))}. {kept}"
    )


def _parts(engine: Training, length: int) -> dict[str, int]:
    """Bytes on each device by purpose, largest first."""
    sizes = state_bytes(engine.form, engine.memory.keeping)
    try:  # XLA knows the rest, if the program could be compiled
        found = explain(engine.runner, engine.loop_state, length, {}, None).parts
    except Exception:  # this describes an error: another one must not take its place
        found = {}
    for theirs, ours in (
        ("elements", "elements of the execution"),
        ("results", "what taps and metrics return"),
        ("temporaries", _TEMPORARIES),
    ):
        sizes[ours] = found.get(theirs, 0)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _remedies(engine: Training, parts: dict[str, int]) -> list[str]:
    """Options that would help and are not in use, for the largest part first."""
    keeping, memory = engine.memory.keeping, engine.memory
    several = engine.placement.replicas > 1
    options = {
        # A step of the user's own has none of the options below.
        _TEMPORARIES: ["smaller batches", "jax.checkpoint around layers"]
        if "state" in parts
        else [
            "smaller batches with more accumulation=",
            "" if memory.held_activations else "offload_activations=True",
            "jax.checkpoint around layers",
            "precision='bfloat16'",
        ],
        "optimizer state": [
            "" if keeping is not None or not several else "shard_optimizer_state=True",
            "" if keeping is not None else "offload_optimizer_state=True",
        ],
        "parameters": ["a tr.Pipeline over several devices"],
        "elements of the execution": ["a smaller steps_per_execution"],
        "what taps and metrics return": ["a smaller steps_per_execution, or fewer taps"],
    }
    # Advice for the two largest parts: the rest would not help enough.
    known = [name for name in parts if parts[name] and name in options]
    chosen = known[:2] if parts.get(_TEMPORARIES) else [_TEMPORARIES, *known[:1]]
    if _TEMPORARIES not in chosen:  # smaller batches help whatever is large
        chosen.append(_TEMPORARIES)
    return [option for name in chosen for option in options[name] if option]


def _is_whole(engine: Training) -> bool:
    """Whether the state survived: a failed execution may have consumed its donated arrays."""
    leaves = jax.tree.leaves(engine.runner.carried(engine.loop_state))
    return not any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))
