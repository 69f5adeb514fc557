"""The shardings of what a training step computes, where the model is sharded over a mesh.

XLA's partitioner decides how the rest is divided. What a step leaves is where it found it: otherwise a
loop would hold it in another way than the arrays that enter it, and move it in every step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tailrace.base.trees import Tree
from tailrace.devices.shard_rules import FSDP
from tailrace.devices.shardings import ModelSharding
from tailrace.program.step.train_state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class StepSharding:
    """Where a step's values are.

    Attributes:
        state: the sharding of each leaf of the training state.
        gathered: for parameters that are whole while the loss is computed, their sharding then; None
            if the partitioner decides.
    """

    state: TrainState
    gathered: Tree = None

    @classmethod
    def of(cls, model: ModelSharding, params: Tree, forms: Tree, model_state: Tree) -> StepSharding:
        """The shardings for parameters and model state on a mesh, and an optimizer's state."""
        own = jax.tree.map(_sharding_of, params)
        state = TrainState(
            own,
            model.of_state(forms, params),
            jax.tree.map(_sharding_of, model_state),
            cast("Any", model.replicated),
        )
        # Left to itself, the partitioner may move activations in place of weights.
        return cls(state, jax.tree.map(_without_fsdp, own) if model.shard == FSDP else None)

    def keep(self, state: TrainState) -> TrainState:
        """The state that a step leaves."""
        return lax.with_sharding_constraint(state, self.state)

    def keep_gradients(self, grads: Tree) -> Tree:
        """Gradients that are held from one microbatch to the next: each where its parameter is."""
        return lax.with_sharding_constraint(grads, self.state.params)

    def scatter(self, grads: Tree) -> Tree:
        """The gradients of gathered parameters, each device with its part."""
        return grads if self.gathered is None else self.keep_gradients(grads)

    def gather(self, params: Tree) -> Tree:
        """The parameters as the loss reads them."""
        if self.gathered is None:
            return params
        return lax.with_sharding_constraint(params, self.gathered)


def _sharding_of(leaf: jax.Array) -> Any:
    return leaf.sharding


def _without_fsdp(sharding: NamedSharding) -> NamedSharding:
    dims = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec]
    kept = [tuple(axis for axis in axes if axis != FSDP) or None for axes in dims]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))
