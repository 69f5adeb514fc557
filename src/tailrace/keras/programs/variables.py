"""The variables of a Keras model as the trees that programs carry, and back.

Keras' trainer hands over four lists of arrays: trainable, non-trainable, optimizer and metric
variables. Programs carry trees whose leaves have names, because observers look for names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.program.step.training_step import TrainState

SCALE = "loss_scale"
"""The parameter, without a gradient, by which the loss is multiplied."""

_SEED = "seed_generator_state"
_GOLDEN = 0x9E3779B9
"""Replicas count seeds up in steps of this, so that none meets another's."""


def names_of(variables: Sequence[Any], outermost: str = "", prefix: str = "") -> list[str]:
    """A name for each variable: its path, without that of the outermost model, and unique."""
    found: list[str] = []
    for variable in variables:
        path = variable.path.removeprefix(f"{outermost}/") if outermost else variable.path
        name, number = f"{prefix}{path}", 0
        # Paths are not always unique, as with two layers of one name in a subclassed model.
        while name in found:
            number += 1
            name = f"{prefix}{path}#{number}"
        found.append(name)
    return found


@dataclasses.dataclass(eq=False)
class Variables:
    """Variables of one kind, and their names."""

    all: list[Any]
    names: list[str]

    def tree(self, values: Sequence[Any]) -> dict[str, Any]:
        """Values, in the order of the variables, by name."""
        return dict(zip(self.names, values, strict=True))

    def values(self, tree: dict[str, Any]) -> list[Any]:
        """Values by name, in the order of the variables."""
        return [tree[name] for name in self.names]


class Layout:
    """Which variables a compiled model has."""

    def __init__(self, model: keras.Model) -> None:
        optimizer: Any = getattr(model, "optimizer", None)
        name = model.name
        self.trainable = Variables(*_named(model.trainable_variables, name))
        self.others = Variables(*_named(model.non_trainable_variables, name))
        self.metrics = Variables(*_named(model.metrics_variables, name, "metrics/"))
        kept = [] if optimizer is None else optimizer.variables
        self.optimizer = Variables(*_named(kept))
        scaled: Any = scaling(optimizer)
        self.scale = (
            next(i for i, v in enumerate(kept) if v is scaled.dynamic_scale) if scaled else None
        )

        self.kinds = (self.trainable, self.others, self.optimizer, self.metrics)
        """In the order in which Keras hands them over."""
        self.variables = [variable for kind in self.kinds for variable in kind.all]
        self.names = [name for kind in self.kinds for name in kind.names]

    def same(self, model: keras.Model) -> bool:
        """Whether the model still has these variables."""
        pairs = (
            (self.trainable.all, model.trainable_variables),
            (self.others.all, model.non_trainable_variables),
            (self.metrics.all, model.metrics_variables),
            (self.optimizer.all, getattr(getattr(model, "optimizer", None), "variables", [])),
        )
        # By identity: variables of Keras compare by value.
        return all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)) for a, b in pairs
        )

    def rename(self, names: Sequence[str]) -> None:
        """Other names for the variables, in their order; of another number of variables, nothing."""
        if len(names) == len(self.names):
            rest = iter(names)
            for kind in self.kinds:
                kind.names = [next(rest) for _ in kind.names]
            self.names = list(names)

    def own_of_replicas(self, name: str) -> bool:
        """Whether each replica keeps its own value of a leaf of the model state."""
        return name.startswith("metrics/") or name.endswith(_SEED)


def scaling(optimizer: keras.optimizers.Optimizer | None) -> Any:
    """The optimizer that scales the loss, itself or inside others; None if none does."""
    while optimizer is not None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def _named(
    variables: Sequence[keras.Variable], outermost: str = "", prefix: str = ""
) -> tuple[list[Any], list[str]]:
    variables = list(variables)
    return variables, names_of(variables, outermost, prefix)


def for_replicas(variable: keras.Variable, value: object, replicas: int) -> Any:
    """The initial values of each of several replicas: empty metrics, separate seeds."""
    if variable.name == _SEED:
        # A generator's state is (seed, counter). Only the seeds are moved apart: counters must stay
        # equal, or replica r would draw in step n what another one draws later.
        away = np.zeros((replicas, 2), np.uint32)
        away[:, 0] = (np.arange(replicas, dtype=np.uint64) * _GOLDEN).astype(np.uint32)
        return np.asarray(value, np.uint32)[None] + away
    value = np.asarray(value)
    spread = np.zeros((replicas, *value.shape), value.dtype)
    if getattr(variable, "aggregation", "sum") in ("sum", "none"):
        spread[0] = value  # summed up again when they are merged
    else:  # a mean, or the value of any one: all replicas start from the same
        spread[:] = value
    return spread


def merged(variable: keras.Variable, values: Tree) -> Any:
    """One value of those of all replicas (dim 0): what one replica would have that saw everything."""
    if variable.name == _SEED:
        return values[0]
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "mean" and jnp.issubdtype(values.dtype, jnp.inexact):
        return values.mean(axis=0)
    if aggregation in ("mean", "only_first_replica"):
        return values[0]
    # In its own dtype: NumPy would widen small integers, and a carry keeps its dtype.
    return values.sum(axis=0, dtype=values.dtype)


def on_one_device(value: object) -> Any:
    """The same array on the device that Keras computes on, whichever devices hold it now."""
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        value = value.addressable_shards[0].data if value.is_fully_replicated else np.asarray(value)
    return jax.device_put(value, devices.available()[0])


def of_one(variable: keras.Variable, value: TensorLike) -> Any:
    """The value that Keras' variable has, of what replicas have."""
    if value.ndim > len(variable.shape):
        return jnp.asarray(merged(variable, np.asarray(value)))
    return on_one_device(value)


def metric_results(model: keras.Model, layout: Layout) -> Any:
    """A compiled function: the results of the metrics, from the values of their variables."""

    def results(values: list[Any]) -> Any:
        mapping = zip(layout.metrics.all, values, strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return keras.tree.map_structure(jnp.asarray, model.get_metrics_result())

    # One dispatch: as single operations, reading the metrics would take longer than short steps.
    return jax.jit(results)


def leaf_numbers(layout: Layout, state: TrainState) -> list[list[int]]:
    """For each variable, its numbers among the leaves of the state."""
    numbers = iter(range(len(jax.tree.leaves(state))))
    tree = jax.tree.map(lambda _: next(numbers), state)
    found = [[tree.params[name]] for name in layout.trainable.names]
    found += [[tree.model_state[name]] for name in layout.others.names]
    found += [[tree.optimizer_state[name]] for name in layout.optimizer.names]
    found += [[tree.model_state[name]] for name in layout.metrics.names]
    if layout.scale is not None:
        place = len(layout.trainable.names) + len(layout.others.names) + layout.scale
        found[place].append(tree.params[SCALE])
    return found
