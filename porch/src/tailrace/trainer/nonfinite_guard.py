"""What happens when a guard has stopped the training: find out why, and say it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.devices.processes.distributed import process_index
from tailrace.errors import NonFiniteError
from tailrace.feeds.feed import Staged
from tailrace.program.nonfinite import find_culprit, step_block
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.taps.frame import Ambient, Emission, Frame
from tailrace.taps.wanted import FiniteKey, fine


def first_bad_step(
    emitted: Mapping[Hashable, Emission], replicas: int
) -> tuple[int, int, list[str]] | None:
    """The first step of an execution with a flag down, its replica, and the tensors concerned."""
    found: list[tuple[int, int, list[str]]] = []
    for key, emission in emitted.items():
        if isinstance(key, FiniteKey):
            flags = np.asarray(fine(jax.tree.map(np.asarray, emission)))
            flags = flags if replicas > 1 else flags[None]
            down = np.logical_not(flags.reshape(replicas, flags.shape[1], -1).all(axis=2))
            if down.any():
                step = int(np.argmax(down.any(axis=0)))
                names = [name for name, _ in key]  # pyright: ignore[reportGeneralTypeIssues]
                found.append((step, int(np.argmax(down[:, step])), names))
    return min(found, key=lambda item: item[0]) if found else None


def bad_steps(emitted: Mapping[Hashable, Emission], replicas: int) -> np.ndarray:
    """Which steps of an execution had a flag down on some replica: 1 or 0 each, float32."""
    found: Any = 0
    for key, emission in emitted.items():
        if isinstance(key, FiniteKey):
            flags = np.asarray(fine(jax.tree.map(np.asarray, emission)))
            flags = flags if replicas > 1 else flags[None]
            down = np.logical_not(flags.reshape(replicas, flags.shape[1], -1).all(axis=2))
            found = found | down.any(axis=0)
    return np.asarray(found, np.float32)


def too_many_skipped(steps: Sequence[int], limit: int) -> NonFiniteError:
    """What to say when a fit skipped more steps than it may."""
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
    bad: tuple[int, int, list[str]],
    *,
    first_step: int,
    seed: int,
    microbatches: int,
) -> NonFiniteError:
    """Replay the bad step from the elements kept on the host; the error that tells about it."""
    step, replica, names = bad
    replicas, local = runner.placement.replicas, runner.placement.local_replicas
    owner = replica // local
    args = [jnp.asarray(leaf) for leaf in runner.carried_by(state, replica)]
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
    ambient = Ambient(jax.random.key(jnp.uint32(seed % 2**32)), number, replica)
    frame = Frame(ambient, {infeed: step_block(elements)})
    found = find_culprit(runner.traced, args, frame)
    culprit = found.culprit
    names = list(dict.fromkeys(name for name in found.bad if name in names)) or names
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")
    which = f"step {number}" + (f", replica {replica}" if replicas > 1 else "")
    if culprit is not None and microbatches > 1:
        which += f", microbatch {culprit.microbatch}"
    why = f" {culprit}." if culprit else " A replay of the step on its own was finite."
    error = NonFiniteError(
        f"Not finite in {which}: {shown}.{why} The parameters are those before that step. Lower the "
        f"learning rate, clip gradients, or look at the row."
    )
    error.step, error.culprit = number, culprit
    return error
