"""The names that a loop or a branch changes: which of their values a program can carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.state import is_variable
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.tensorflow.arrays import TensorArray
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import Tracer


class Missing:
    """The value of a name that has none yet."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclasses.dataclass(frozen=True)
class Symbols:
    """Names and how their values are read and written.

    Attributes:
        names: the names, for messages.
        read: returns their values, in order.
        write: takes them.
        is_missing: whether a value says that the name has none yet.
    """

    names: Sequence[str]
    read: Callable[[], Sequence[Any]]
    write: Callable[[Sequence[Any]], None]
    is_missing: Callable[[Any], bool]

    def values(self) -> list[Any]:
        """The values now; MISSING for a name that has none."""
        return [MISSING if self._has_none(value) else value for value in self.read()]

    def _has_none(self, value: object) -> bool:
        return self.is_missing(value) or (isinstance(value, TensorArray) and not value.is_written)

    def put(self, values: Sequence[Any], undefined: Sequence[Any]) -> None:
        """Write values; where one is MISSING, the placeholder that the name had before."""
        self.write(tuple(u if v is MISSING else v for v, u in zip(values, undefined, strict=True)))


@dataclasses.dataclass(frozen=True)
class Split:
    """Values taken apart: arrays, which are carried, and the rest, which must stay what it is.

    Attributes:
        structure: the nest that the values form.
        kept: for each leaf the value that stays, or None for an array.
        arrays: the arrays, in order.
    """

    structure: Any
    kept: list[Any]
    arrays: list[Any]

    def joined(self, arrays: Sequence[Any]) -> list[Any]:
        """The values with other arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if each is None else each[0] for each in self.kept]
        return jax.tree.unflatten(self.structure, leaves)


def split(values: Sequence[Any]) -> Split:
    """Take values apart.

    >>> split([1.5, "text"]).arrays
    [Array(1.5, dtype=float32)]
    """
    leaves, structure = jax.tree.flatten(list(values), is_leaf=_is_whole)
    kept = [None if is_carried(leaf) else (leaf,) for leaf in leaves]
    arrays = [as_array(leaf) for leaf in leaves if is_carried(leaf)]
    return Split(structure, kept, arrays)


def _is_whole(value: TensorLike) -> bool:
    """Whether JAX must not look inside: None would vanish, and objects are not its business."""
    return (
        value is None
        or value is MISSING
        or not isinstance(value, list | tuple | dict | TensorArray)
    )


def is_carried(value: TensorLike) -> bool:
    """Whether a value is one of the device's: an array or a number."""
    # A variable has its value in the scope, which loops carry by themselves.
    if is_variable(value):
        return False
    # Python's numbers too: a loop may change them, and what it changes is the device's.
    return isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array)


def same_form(
    before: Split, after: Split, names: Sequence[str], what: str, *, dtypes: bool = True
) -> None:
    """Refuse a loop or a branch after which a name holds another kind of value."""
    if before.structure == after.structure and len(before.arrays) == len(after.arrays):
        for one, other in zip(before.kept, after.kept, strict=True):
            # Objects must be the same ones: a loop of the device cannot choose between Python objects.
            if (one is None) != (other is None) or (one and other and one[0] is not other[0]):
                break
        else:
            pairs = list(zip(before.arrays, after.arrays, strict=True))
            if all(_same(a, b, dtypes) for a, b in pairs):
                return
    shown = ", ".join(names)
    raise ProgramError(
        f"{what} over a value of the device must leave its names ({shown}) with values of one kind, "
        f"shape and dtype. Received: {_form(before)} and {_form(after)}. Give each a value of the same "
        f"form before it (tf.constant(0.0) for a float), and change no other objects in it."
    )


def _same(a: TensorLike, b: TensorLike, dtypes: bool) -> bool:
    return a.shape == b.shape and (not dtypes or a.dtype == b.dtype)


def _form(found: Split) -> str:
    rest = iter(found.arrays)
    shown = []
    for each in found.kept:
        if each is None:
            array = next(rest)
            shown.append(f"{array.dtype}{list(array.shape)}")
        else:
            shown.append(repr(each[0]) if each[0] is MISSING else type(each[0]).__name__)
    return f"({', '.join(shown)})"


def zeros_of(form: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape and dtype."""
    return jnp.zeros(form.shape, form.dtype)


def is_device_value(value: TensorLike) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(value, Tracer)


def boolean(value: TensorLike) -> Any:
    """A condition as one boolean of the device."""
    return jnp.asarray(value, jnp.bool_).reshape(())
