"""Weights that several stages of a pipeline share: one for the optimizer, one in each stage.

The optimizer, checkpoints and the state on the devices have such a weight once, in its first place
("untied"); a model is called with it in all its places ("tied"). So gradients of the places are summed
by differentiation itself, and no update has to be kept equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, PipelineError
from tailrace.jaxprs.marks import path_name


class SharedWeights:
    """Groups of parameters that are one weight.

    Args:
        shared: the groups, each a list of names: `[("0/table", "2/table")]`.
    """

    def __init__(self, shared: Sequence[Sequence[str]]) -> None:
        self.groups = _groups(shared)

    def untie(self, params: Tree) -> Tree:
        """The parameters, each shared weight in its first place only."""
        if not self.groups:
            return params
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        by_name = {path_name(path): value for path, value in leaves}
        extra: set[str] = set()
        for group in self.groups:
            for name in group:
                if name not in by_name:
                    raise PipelineError(
                        f"shared names parameters as 'stage/path'. There is no {name!r}; there are "
                        f"{sorted(by_name)}."
                    )
            first, *others = group
            for name in others:
                same = np.shape(by_name[name]) == np.shape(by_name[first])
                if not same or not np.array_equal(by_name[name], by_name[first]):
                    raise PipelineError(
                        f"Shared parameters are one weight, so they start equal. {name!r} differs "
                        f"from {first!r}. Give the same array for both."
                    )
                extra.add(name)
        # None is an empty subtree to JAX: optimizers and checkpoints see no leaf there.
        kept = [None if path_name(path) in extra else value for path, value in leaves]
        return jax.tree.unflatten(structure, kept)

    def tie(self, params: Tree) -> Tree:
        """The parameters with every shared weight in all its places."""
        if not self.groups:
            return params
        # The Nones that `untie` left are leaves here, so that their places are found again.
        flat, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
        by_name = {path_name(path): value for path, value in flat}
        for first, *others in self.groups:
            # The same traced value in all places: differentiation adds up what flows back through each.
            by_name.update(dict.fromkeys(others, by_name[first]))
        return jax.tree.unflatten(structure, [by_name[path_name(path)] for path, _ in flat])


def _groups(shared: Any) -> tuple[tuple[str, ...], ...]:
    def is_list(value: object) -> bool:
        return isinstance(value, tuple | list)

    fits = is_list(shared) and all(map(is_list, shared))
    if not fits or not all(isinstance(path, str) for group in shared for path in group):
        raise OptionError(
            f"shared is a list of groups, each a list of the paths of parameters that are one and the "
            f"same: shared=[('0/table', '2/table')]. Received: {shared!r}."
        )
    return tuple(tuple(group) for group in shared)
