"""The placement of a training's state: devices, memory, sharded or replicated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.trees import Tree
from tailrace.devices.devices import Device, resolve_replicas
from tailrace.devices.shardings import ModelSharding
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_runner import place_pipeline
from tailrace.program.memory.activation_offload import HeldActivations, activations_on_host
from tailrace.program.memory.host_memory import check_activations
from tailrace.program.memory.optimizer_state import (
    StateKeeping,
    check_options,
    keep_state,
    log_decisions,
)
from tailrace.program.running.placement import Placement
from tailrace.trainer.random_keys import is_key


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Decisions about memory.

    Attributes:
        keeping: how optimizer state is held; None for replicated on the devices.
        held_activations: offloads activations to host memory; None for no offload.
        decisions: messages about the decisions, with reasons.
    """

    keeping: StateKeeping | None = None
    held_activations: HeldActivations | None = None
    decisions: tuple[str, ...] = ()

    @property
    def all_decisions(self) -> tuple[str, ...]:
        """All decisions, including those made while the step was traced."""
        return (*self.decisions, *getattr(self.held_activations, "said", ()))


def placement_of(
    pipeline: Pipeline | None,
    replicas: int | None,
    sharding: ModelSharding | None = None,
    device: Device | None = None,
) -> Placement:
    """The placement; a pipeline's as far as it is known before tracing."""
    if pipeline is not None:
        return place_pipeline(pipeline, replicas)
    if sharding is not None:
        return Placement(sharding=sharding)
    return Placement(resolve_replicas(replicas), chosen=device)


def plan_memory(
    forms: Tree,
    placement: Placement,
    taps: Sequence[Any],
    *,
    share: bool,
    offload_state: bool | None,
    offload_activations: bool,
    microbatches: int,
    pipelined: bool,
) -> MemoryPlan:
    """Decide from the options and the capabilities of the devices.

    Args:
        forms: the shapes of optimizer state.
        placement: the devices.
        taps: the taps; an observed leaf stays on the device.
        share: whether to shard optimizer state over replicas.
        offload_state: whether to offload optimizer state; None: where it pays.
        offload_activations: whether to offload activations.
        microbatches: the number of microbatches per step.
        pipelined: whether the model is a pipeline.
    """
    check_options(share, offload_state)
    check_activations(offload_activations)
    keeping, held, decisions = None, None, ()
    # None asks to offload where it pays, which depends on the devices.
    if share or offload_state is not False:
        kept = keep_state(
            forms,
            placement,
            taps,
            share=share,
            offload_state=offload_state,
            microbatches=microbatches,
            pipelined=pipelined,
        )
        log_decisions(kept, requested=share or bool(offload_state))
        keeping, decisions = None if kept.changes_nothing else kept, kept.decisions
    if offload_activations:
        held, said = activations_on_host(placement.device, pipelined, placement.local_replicas)
        decisions += said
    return MemoryPlan(keeping, held, decisions)


def on_host(value: jax.Array) -> jax.Array | np.ndarray:
    """A copy in host memory; random keys are unchanged."""
    # NumPy has no dtype for random keys.
    return jnp.copy(value) if is_key(value) else np.array(value)
