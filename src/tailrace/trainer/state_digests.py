"""The digests of a training's state and elements, taken on the devices after an execution.

The training program computes them from its results, behind a barrier: so its steps are the same with
and without fingerprints, to the last bit, and the device does not wait for another program. State in
host memory is read by a separate program, which is dispatched after the execution; so is the state
that a sentinel checks before an execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.feeds.feed import Staged
from tailrace.jaxprs.marks import path_name
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.device_program import CLOSING
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.step.train_state import TrainState
from tailrace.records.fingerprints import elements_fingerprint, loss_fingerprint, state_groups
from tailrace.taps.bit_digests import digest_rows, joined, total
from tailrace.taps.frame import Emission
from tailrace.taps.wanted import DigestKey
from tailrace.trainer.executions import Ticket


class StateDigests:
    """Digests of what an engine trains.

    Args:
        form: the training state, as shapes.
        keeping: how the optimizer's state is held, if not plainly.
    """

    def __init__(self, form: TrainState, keeping: StateKeeping | None) -> None:
        paths = jax.tree_util.tree_flatten_with_path(form)[0]
        self.names = [path_name(path) for path, _ in paths]
        self._sizes: list[int | None] = [None] * len(paths)
        if keeping is not None:
            first = len(jax.tree.leaves(form.params))
            wholes = zip(jax.tree.leaves(keeping.forms), keeping.shared, strict=True)
            for number, (whole, shared) in enumerate(wholes, start=first):
                # A sharded leaf is padded to a multiple of the number of shards. Padding is left
                # out of the digest, which then is the same for every number of replicas.
                self._sizes[number] = math.prod(whole.shape) if shared else None
        self.programs: dict[LoopRunner, Any] = {}
        """The separate programs, by the runner whose state they read."""

    def join(self, runner: LoopRunner) -> None:
        """Let the programs of a runner compute the digests, if they can."""
        if runner.layout.on_devices:
            held, compute = runner.layout.held, self._computing(runner)
            runner.closing = lambda left, elements: compute(held(left), *elements)

    def after(self, runner: LoopRunner, state: LoopState, emitted: dict[Hashable, Emission]) -> Any:
        """The digests after the latest execution, taken out of what it emitted, if it has them."""
        found = emitted.pop(CLOSING, None)
        if found is not None:
            return found.value
        (feed,) = runner.infeeds
        # Now, not when results are read: the next dispatch overwrites the state.
        return self.take(runner, state, runner.taken.get(feed))

    def take(self, runner: LoopRunner, state: LoopState, staged: Staged | None) -> Any:
        """The digests of the leaves of the state, and of each element; nothing is waited for."""
        if runner not in self.programs:
            self.programs[runner] = jax.jit(self._computing(runner))
        # From the block on the device, padding included: hashing on the host would take a core from the
        # training. Rows beyond the steps are cut off when it is read.
        block = () if staged is None else tuple(staged.device)
        with runner.placement.within():
            return self.programs[runner](runner.layout.held(state), block)

    def of(self, ticket: Ticket, losses: np.ndarray) -> tuple[dict[str, int], np.ndarray | None]:
        """The fingerprints of an execution, and the digests of its elements; waits for them."""
        words, elements = ticket.digests
        if elements is not None:
            elements = element_digests(elements, *losses.shape)
        found = fingerprint_of(
            self.names, words, ticket.emitted, losses, elements, ticket.first_step
        )
        return found, elements

    def _computing(self, runner: LoopRunner) -> Callable[[Sequence[Any], tuple[Any, ...]], Any]:
        """A function of the arrays of a state, and of a block of elements; in a program."""
        placement = runner.placement
        # The dims in front of an element's own: microbatches of the block, and replicas if there
        # are any.
        dims, whole = 1 if placement.mesh is None else 2, placement.sharding is not None
        (paths,) = (feed.spec().paths for feed in runner.infeeds)

        def compute(held: Sequence[Any], block: tuple[Any, ...]) -> Any:
            leaves = zip(block, paths, strict=bool(block))
            rows = [digest_rows(leaf, f"element{path}", dims, whole) for leaf, path in leaves]
            elements = total(jnp.stack(rows)) if rows else None
            found = (runner.layout.digests(held, self.names, self._sizes), elements)
            if placement.mesh is None:
                return found
            # Replicated, so that every process can read the digests alone.
            return lax.with_sharding_constraint(found, placement.everywhere)

        return compute


def element_digests(words: jax.Array, steps: int, microbatches: int, replicas: int) -> np.ndarray:
    """The digest of each element of an execution, [steps, microbatches, replicas]."""
    found = joined(words)[: steps * microbatches]
    return found.reshape(steps, microbatches, replicas)


def fingerprint_of(
    names: Sequence[str],
    digests: jax.Array,
    emitted: Mapping[Hashable, Emission],
    losses: np.ndarray,
    elements: np.ndarray | None,
    first_step: int,
) -> dict[str, int]:
    """The fingerprints of an execution by group.

    Args:
        names: the names of the leaves of the state.
        digests: the digests of those leaves.
        emitted: what left the program; the digests of gradients are in it.
        losses: [steps, microbatches, replicas].
        elements: the digests of its elements, likewise.
        first_step: the first step of the execution.
    """
    found = state_groups(names, joined(digests))
    for key, emission in emitted.items():
        if isinstance(key, DigestKey):  # one; in a pipeline, one for each device
            # Of the first replica: gradients that the optimizer receives are equal on all.
            each = joined(np.asarray(emission.value).reshape(-1, len(key), 2)[0])
            found["gradients"] = sum(map(int, each), start=found.get("gradients", 0)) % 2**64
    found["loss"] = loss_fingerprint(losses, first_step)
    if elements is not None:
        found["elements"] = elements_fingerprint(elements, first_step)
    return found
