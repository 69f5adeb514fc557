"""Where a training's state lives: which devices, which memory, in shares or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.devices.devices import resolve_replicas
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_runner import place_pipeline
from tailrace.program.memory.activation_offload import HeldActivations, activations_on_host
from tailrace.program.memory.host_memory import check_activations
from tailrace.program.memory.optimizer_state import StateKeeping, check_options, decide
from tailrace.program.running.executable import Placement


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What was decided about memory.

    Attributes:
        keeping: how the optimizer's state is held; None: whole, on each device.
        held_activations: what keeps activations in host memory; None: nothing does.
        decisions: sentences that say what was decided, and why.
    """

    keeping: StateKeeping | None = None
    held_activations: HeldActivations | None = None
    decisions: tuple[str, ...] = ()

    def optimizer_forms(self, forms: Any) -> Any:
        """The shapes of the optimizer's state as it is held."""
        return forms if self.keeping is None else self.keeping.held_forms

    def with_fingerprints(self, params: Any) -> MemoryPlan:
        """The same, and what fingerprints need."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        sentence = (
            f"Fingerprints: gradients of at most {size / 1e6:,.1f} MB a device are kept until "
            f"the execution has ended."
        )
        return dataclasses.replace(self, decisions=(*self.decisions, sentence))

    @property
    def all_decisions(self) -> tuple[str, ...]:
        """With what was found out while the step was traced."""
        return (*self.decisions, *getattr(self.held_activations, "said", ()))


def placement_of(pipeline: Pipeline | None, replicas: int | None) -> Placement:
    """The devices; of a pipeline, as far as they are known before it is traced."""
    if pipeline is not None:
        return place_pipeline(pipeline, replicas)
    return Placement(resolve_replicas(replicas))


def plan_memory(
    forms: Any,
    placement: Placement,
    taps: Sequence[Any],
    *,
    share: bool,
    offload_state: bool | None,
    offload_activations: bool,
    microbatches: int,
    pipelined: bool,
) -> MemoryPlan:
    """Decide from what was asked for and what the devices can do.

    Args:
        forms: the shapes of the optimizer's state.
        placement: the devices.
        taps: what is observed; a tapped leaf stays where it can be seen.
        share: each replica keeps one share of the optimizer's state.
        offload_state: the state is in host memory between updates; None: where it pays.
        offload_activations: activations wait in host memory for the backward pass.
        microbatches: of a step.
        pipelined: whether stages have devices of their own.
    """
    check_options(share, offload_state)
    check_activations(offload_activations)
    keeping, held, decisions = None, None, ()
    if share or offload_state is not False:
        keeping, decisions = decide(
            forms,
            placement,
            taps,
            share=share,
            offload_state=offload_state,
            microbatches=microbatches,
            pipelined=pipelined,
        )
    if offload_activations:
        held, said = activations_on_host(placement.device, pipelined, placement.local_replicas)
        decisions += said
    return MemoryPlan(keeping, held, decisions)


def on_host(value: Any) -> Any:
    """A copy in the host's memory; a random key stays what it is."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jnp.copy(value) if is_key else np.array(value)
