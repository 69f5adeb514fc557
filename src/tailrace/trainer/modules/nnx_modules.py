"""An `nnx.Module` in place of parameters.

The module is split once. Its `nnx.Param`s of floats are trained; the state of its random streams is
derived from `tr.key()` for each call; everything else (`nnx.BatchStat` and the like) is the model
state. The module that was given is never changed.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.jaxprs.marks import path_name
from tailrace.program.in_program import key, training
from tailrace.trainer.modules import flax_seams
from tailrace.trainer.modules.binding import Binding


def recognised(params: Tree) -> bool:
    """Whether this is a module, or a tree of modules."""
    found = jax.tree.leaves(params, is_leaf=_is_module)
    return bool(found) and all(map(_is_module, found))


class NnxBinding(Binding):
    """Parameters, state and random streams of a module, apart."""

    has_modes = True

    def __init__(self, module: Tree, model_state: Tree) -> None:
        flax_seams.check()
        if model_state is not None:
            raise OptionError(
                "An nnx.Module holds its state itself, so model_state is not given beside it. "
                f"Received: model_state of {jax.tree.structure(model_state)}. Keep it in the module, "
                "as an nnx.Variable of a class of your own."
            )
        note_evaluation_mode(module)
        # The user's module stays as it is: `trainer.model` is a new one.
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)
        self._graph, params, streams, state = nnx.split(module, *_PARTS)
        self._streams = nnx.to_flat_state(streams)
        self.params = nnx.to_pure_dict(params)
        self.model_state = nnx.to_pure_dict(state) or None

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The module, with separate random streams for this call."""
        model = self._merged(params, state, self._fresh_streams())
        if not training():
            # On the copy made for this call, so that nothing has to be set back.
            for module in jax.tree.leaves(model, is_leaf=_is_module):
                module.eval()
        return (flax_seams.scoped(model) if self.scopes else model,)

    def check(self, opened: tuple[Any, ...], params: Tree) -> None:
        """Log once if the call assigned to parameters: that ends with the call."""
        after = nnx.to_pure_dict(nnx.state(opened[0], *_PARTS)[0])
        found = jax.tree_util.tree_flatten_with_path(after)[0]
        given = jax.tree.leaves(params)
        # By identity: an assignment replaces the array, and comparing values would need them.
        changed = [
            path_name(path) for (path, x), y in zip(found, given, strict=False) if x is not y
        ]
        if changed and training():
            note_once(
                f"Parameters are changed by the optimizer alone. The module assigned to {changed}: "
                "the assignment holds until the end of its call. Make it an nnx.Variable that is no "
                "nnx.Param to carry it from step to step."
            )

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """What the call left in the module."""
        (model,) = opened
        nnx.pop(model, nnx.Intermediate)  # what was sown: observers have taps for that
        after = nnx.to_pure_dict(nnx.state(model, *_PARTS)[-1])
        found, known = _names(after), _names(before)
        if found != known:
            raise ProgramError(
                "A step changes the values of a module's variables, not which there are. Received: "
                f"new {sorted(found - known)}, missing {sorted(known - found)}. Create variables in "
                f"__init__."
            )
        return after

    def model(self, params: Tree, state: Tree) -> Any:
        """A new module; its random streams are as they were given."""
        streams = nnx.from_flat_state([(path, value.copy()) for path, value in self._streams])
        return self._merged(params, state, streams)

    def _merged(self, params: Tree, state: Tree, streams: nnx.State) -> Any:
        return nnx.merge(self._graph, nnx.State(params), streams, nnx.State(state or {}))

    def _fresh_streams(self) -> nnx.State:
        """Stream number i, in the order of paths, starts from `fold_in(tr.key(), i)`."""
        if not len(self._streams):
            return nnx.State({})
        root, numbers = key(), itertools.count()

        def fresh(variable: nnx.Variable[Any]) -> jax.Array:
            value = variable.get_value()
            # Counters start from 0 in every call: the key is new, and a count that went on would make
            # the draws depend on how often the module was called before.
            if not isinstance(variable, nnx.RngKey):
                return jnp.zeros_like(value)
            own = jax.random.fold_in(root, next(numbers))
            return jax.random.split(own, value.shape) if value.shape else own

        return nnx.from_flat_state([(path, fresh(value)) for path, value in self._streams])


def note_evaluation_mode(module: Tree) -> None:
    """Log once if a module that is to be trained was left in evaluation mode."""
    flags = [
        flag
        for _, part in nnx.iter_modules(module)
        for name in ("deterministic", "use_running_average")
        if isinstance(flag := getattr(part, name, None), bool)
    ]
    if flags and all(flags):
        note_once(
            "The nnx.Module is in evaluation mode: it is trained as it is, without dropout and with "
            "BatchNorm's running averages. Call module.train() first if that is not intended."
        )


def _is_module(value: object) -> bool:
    return isinstance(value, nnx.Module)


def _is_float(_: object, value: object) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


def _names(tree: Tree) -> set[str]:
    return {path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}


_PARTS: tuple[Any, ...] = (nnx.All(nnx.Param, _is_float), nnx.RngState, ...)
"""What a module is split into: what is trained, random streams, the rest."""
