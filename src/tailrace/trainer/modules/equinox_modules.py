"""An Equinox module in place of parameters.

Its arrays of floats are trained; the rest of it is static. With an `eqx.nn.State` as `model_state`,
functions get and return it as Equinox' layers do.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.program.in_program import training
from tailrace.trainer.modules import equinox_seams
from tailrace.trainer.modules.binding import Binding


def recognised(params: Tree) -> bool:
    """Whether there is a module in a tree."""
    return any(map(_is_module, jax.tree.leaves(params, is_leaf=_is_module)))


class EquinoxBinding(Binding):
    """Arrays of floats, the static rest, and the state, apart."""

    returns_state = True

    def __init__(self, module: Tree, model_state: Tree) -> None:
        equinox_seams.check()
        modes = modes_of(module)
        self.has_modes = bool(modes)
        if modes and all(modes):
            note_once(
                "The Equinox module is in inference mode: it is trained as it is, without dropout. Use "
                "eqx.nn.inference_mode(module, False) first if that is not intended."
            )
        # The index of a state is a leaf with an array in it, which must stay with the static rest.
        trained = jax.tree.map(_is_trained, module, is_leaf=equinox_seams.is_index)
        self.params, self._static = eqx.partition(module, trained)
        self.model_state, self._markers = model_state, None
        if isinstance(model_state, eqx.nn.State):
            self.model_state, self._markers = equinox_seams.state_as_dict(model_state, module)
            self._names = list(self.model_state)

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The module, and the state if there is one."""
        module = eqx.combine(params, self._static)
        if self.has_modes and not training():
            # A copy: the user's module keeps its mode.
            module = eqx.nn.inference_mode(module)
        if self.scopes:
            module = equinox_seams.scoped(module)
        return (module,) if self.model_state is None else (module, self.shown_state(state))

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """What the function returned."""
        if self._markers is None:
            return returned
        if not isinstance(returned, eqx.nn.State):
            raise ProgramError(
                "With an eqx.nn.State, the loss function returns (loss, (new_state, aux)). Received in "
                f"the place of new_state: a {type(returned).__name__}."
            )
        return equinox_seams.state_as_dict(returned, self._static)[0]

    def model(self, params: Tree, state: Tree) -> Any:
        """The module; its state is `trainer.model_state`."""
        return eqx.combine(params, self._static)

    def shown_state(self, state: Tree) -> Any:
        """An `eqx.nn.State` again, where one was given."""
        if self._markers is None:
            return state
        return equinox_seams.state_from_dict(state, self._names, self._markers)


def modes_of(module: Tree) -> list[bool]:
    """Which parts of a module are in inference mode, of those that have modes."""
    found: list[bool] = []

    # JAX asks `is_leaf` of every node, not only of leaves: it serves as a visitor.
    def collect(part: object) -> bool:
        if isinstance(flag := getattr(part, "inference", None), bool):
            found.append(flag)
        return False

    jax.tree.leaves(module, is_leaf=collect)
    return found


def _is_module(value: object) -> bool:
    return isinstance(value, eqx.Module)


def _is_trained(part: object) -> bool:
    return not equinox_seams.is_index(part) and eqx.is_inexact_array(part)
