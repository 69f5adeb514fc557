"""The state of a step of the user's own, any tree, as a tree of arrays; and the step as its function.

    step_fn(state, *batch)     becomes     step(arrays, element)

Inside a traced function the user's tree is made from the arrays again, the step is called with it, and
what it returns is taken apart. What is no array in the tree (the activation function of an Equinox
layer) stays as it was given.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from tailrace.base.messages import listed
from tailrace.base.trees import Tree, describe
from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element
from tailrace.jaxprs.marks import path_name
from tailrace.program.step.own_step import StepFunction
from tailrace.program.step.train_state import OwnState
from tailrace.trainer.modules.binding import Binding
from tailrace.trainer.modules.recognition import without_values

_NUMBERS = (bool, int, float, complex, np.generic)


class OwnBinding(Binding):
    """A state of the user's, and its functions as functions of a tree of arrays."""

    @abc.abstractmethod
    def tree(self, arrays: Tree) -> Any:
        """The user's state with these arrays in it."""

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The user's state, which is all that a function of it gets before the batch."""
        return (self.tree(state),)

    def shown_whole(self, state: Any) -> Any:
        """The user's state, from that of training."""
        return self.tree(state.state)

    def held_whole(self, state: Any) -> Any:
        """The state of training, from one of the user's."""
        return OwnState(self.stored((), state, None))

    def model(self, params: Tree, state: Tree) -> NoReturn:
        """There is none beside the state."""
        raise _in_the_state("model")

    def shown_params(self, params: Tree) -> NoReturn:
        """Likewise."""
        raise _in_the_state("params")

    def shown_state(self, state: Tree) -> NoReturn:
        """Likewise."""
        raise _in_the_state("model_state")


class TreeBinding(OwnBinding):
    """Any tree; what is no array in it stays as it was given."""

    def __init__(self, state: Tree) -> None:
        leaves, self._structure = _flattened(state)
        carried = _are_carried(state)
        self._rest = [None if own else leaf for own, leaf in zip(carried, leaves, strict=True)]
        self._carried = carried
        if not any(carried):
            raise ProgramError(
                f"A step of your own carries a state: a tree with at least one array. Received: "
                f"state={describe(state)}. A step without one is tr.compile's."
            )
        self.model_state = self._arrays(leaves)

    def tree(self, arrays: Tree) -> Any:
        """The user's tree with these arrays in it."""
        values = iter(jax.tree.leaves(arrays))
        pairs = zip(self._carried, self._rest, strict=True)
        return jax.tree.unflatten(
            self._structure, [next(values) if own else rest for own, rest in pairs]
        )

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """The arrays of a tree like the one that was given."""
        leaves, structure = _flattened(returned)
        if structure != self._structure:
            raise self._another(returned)
        for number, (own, leaf, rest) in enumerate(
            zip(self._carried, leaves, self._rest, strict=True)
        ):
            if own and not _is_array(leaf):
                raise ProgramError(
                    f"The state of a step is a tree of arrays. {self._name(number)} came back as a "
                    f"{type(leaf).__name__}. Return an array there."
                )
            if not own and not (leaf is rest or _equal(leaf, rest)):
                raise ProgramError(
                    f"A step changes the arrays of its state, and {self._name(number)} is none: it was "
                    f"{rest!r} and came back as {leaf!r}. Make it an array, or leave it as it is."
                )
        return self._arrays(leaves)

    # -- inside ---------------------------------------------------------------------------------

    def _arrays(self, leaves: list[Any]) -> Any:
        """The tree with None in place of what is no array."""
        # With the user's own nodes around the arrays: their fields are the names in the catalogue.
        pairs = zip(self._carried, leaves, strict=True)
        return jax.tree.unflatten(self._structure, [leaf if own else None for own, leaf in pairs])

    def _name(self, number: int) -> str:
        whole = jax.tree.unflatten(self._structure, range(len(self._rest)))
        paths = jax.tree_util.tree_flatten_with_path(whole)[0]
        return repr(path_name(paths[number][0]) or "the state")

    def _another(self, returned: Tree) -> ProgramError:
        """The error for a state of another structure."""
        filled = jax.tree.unflatten(self._structure, range(len(self._rest)))
        return another_structure(filled, returned)


class BoundStep(StepFunction):
    """A user's step as a function of arrays."""

    def __init__(self, binding: OwnBinding, fn: Callable[..., Any]) -> None:
        self._binding, self.fn = binding, fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, state: Tree, element: Tree) -> tuple[Tree, Tree]:
        """The new state and the metrics."""
        opened = self._binding.opened(None, state)
        out = call_with_element(self.fn, opened, element)
        # Not a named tuple: that is a state whose metrics were forgotten.
        if type(out) not in (tuple, list) or len(out) != 2:
            raise ProgramError(
                f"A step returns a pair, (state, metrics). Received from {self.__name__}: "
                f"{'None' if out is None else describe(out)}. "
                + ("Is its return statement missing?" if out is None else "Return both.")
            )
        after, metrics = out
        return self._binding.stored(opened, after, state), metrics


def _flattened(tree: Tree) -> tuple[list[Any], Any]:
    try:
        return jax.tree.flatten(tree)
    except ValueError as error:  # keys that cannot be sorted
        raise ProgramError(f"state is a tree that JAX can flatten. It says: {error}.") from None


def _are_carried(state: Tree) -> list[bool]:
    """For each leaf, whether steps carry it: arrays and numbers."""
    is_module = _module_test()
    found: list[bool] = []
    for part in jax.tree.leaves(state, is_leaf=is_module):
        # Numbers in an Equinox module are its settings, such as `inference`.
        inside = is_module(part)
        for leaf in jax.tree.leaves(part) if inside else (part,):
            if (said := without_values(leaf)) is not None:
                raise ProgramError(f"state is a tree of arrays. Received: {said}")
            # Kept as it is, an array of another library would silently never change.
            if not _is_array(leaf) and hasattr(leaf, "__array__"):
                raise ProgramError(
                    f"state is a tree of arrays of JAX or NumPy. Received: a {type(leaf).__name__} of "
                    f"another library. Convert it: np.asarray(x)."
                )
            found.append(_is_array(leaf) and not (inside and isinstance(leaf, _NUMBERS)))
    return found


def _module_test() -> Callable[[object], bool]:
    equinox = sys.modules.get("equinox")
    return lambda part: equinox is not None and isinstance(part, equinox.Module)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, *_NUMBERS))


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever the user's class raises: it cannot be said to be equal
        return False


def _in_the_state(name: str) -> ProgramError:
    return ProgramError(
        f"A step of your own has one state, with whatever is trained in it. Received: trainer.{name}. "
        f"Use trainer.state."
    )


def _names(tree: Tree) -> list[str]:
    return [path_name(path) or "state" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def another_structure(given: Tree, returned: Tree) -> ProgramError:
    """The error for a state that comes back with another structure."""
    known, found = _names(given), _names(returned)
    missing, new = sorted(set(known) - set(found)), sorted(set(found) - set(known))
    parts = [
        f"{how} {listed(names, 5)}" for how, names in (("missing", missing), ("new", new)) if names
    ]
    # The same names, in other containers.
    what = ", ".join(parts) or f"{jax.tree.structure(given)} became {jax.tree.structure(returned)}"
    return ProgramError(
        f"A step returns its state in the structure that it got. Received: {what}. Return (state, "
        f"metrics) with the whole state, changed or not."
    )
