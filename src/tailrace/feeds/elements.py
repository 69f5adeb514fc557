"""The structure, shapes and dtypes of a dataset's elements, and passing an element to a function."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import counted, note_once
from tailrace.base.trees import Tree, describe, leaf_called
from tailrace.data.dtypes import check_numeric
from tailrace.data.no_data import NoElement
from tailrace.data.typed_keys import generator_of_node
from tailrace.errors import DataError, ElementError, ProgramError, TailraceError

# Here, because nothing in `data` imports JAX.
jax.tree_util.register_pytree_node(
    NoElement, lambda element: ((element.byte,), None), lambda _, leaves: NoElement(*leaves)
)


@dataclasses.dataclass(frozen=True)
class ElementSpec:
    """Structure, shapes and dtypes that every element of a dataset has.

    Attributes:
        structure: the tree structure of an element.
        leaves: shape and dtype of each leaf on the device.
        paths: the name of each leaf in messages.
        dtypes: the dtype of each leaf in the dataset.
    """

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, element: Tree) -> ElementSpec:
        """The spec of `element`; raises a DataError if it cannot be fed to a program."""
        try:
            with_paths, structure = jax.tree_util.tree_flatten_with_path(element)
        except ValueError as error:  # keys that cannot be sorted
            raise DataError(
                f"An element is a tree that JAX can flatten. It says: {error}."
            ) from None
        if not with_paths:
            raise DataError(
                f"An element of a dataset needs at least one array. Received: {element!r}."
            )
        paths = tuple(jax.tree_util.keystr(path) for path, _ in with_paths)
        arrays = [
            check_numeric(p, np.asarray(leaf))
            for p, (_, leaf) in zip(paths, with_paths, strict=True)
        ]
        for path, array in zip(paths, arrays, strict=True):
            if 0 in array.shape:
                raise DataError(
                    f"An element may not have a dim of size 0: such an array cannot be fed. "
                    f"Received: {leaf_called(path)} of shape {array.shape}. Remove it from the "
                    f"dataset, or use drop_remainder=True if it is an empty last batch."
                )
        # The dtype on the device and that of the data: elements are compared by the latter, because a
        # dataset that changes between 32 and 64 bits is a mistake even if both are narrowed alike.
        leaves = tuple(jax.ShapeDtypeStruct(a.shape, _narrowed(a.dtype)) for a in arrays)
        return cls(structure, leaves, paths, tuple(a.dtype for a in arrays))

    @functools.cached_property
    def narrows(self) -> bool:
        """Whether a leaf has another dtype on the device."""
        pairs = zip(self.leaves, self.dtypes, strict=True)
        return any(leaf.dtype != dtype for leaf, dtype in pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of one element on the device."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)

    @property
    def text(self) -> str:
        """Shapes and dtypes of the leaves, for messages."""
        if self.structure == jax.tree.structure(NoElement(0)):
            return "no data"
        return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves)

    def tree(self) -> Tree:
        """The spec as a tree of `jax.ShapeDtypeStruct`."""
        return self.element(self.leaves)

    def element(self, leaves: Sequence[Any]) -> Tree:
        """The element that functions get, from its leaves: with keys, or without anything."""
        element = jax.tree.unflatten(self.structure, leaves)
        if isinstance(element, NoElement):
            return NoElement()
        return jax.tree.map(_keys_again, element, is_leaf=_is_of_keys)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that functions get."""
        return tuple(leaf.shape for leaf in jax.tree.leaves(self.tree()))

    def conform(self, element: Tree, number: int) -> list[Any]:
        """The leaves of element `number`, checked against the spec; raises an ElementError."""
        try:
            leaves, structure = jax.tree.flatten(element)
        except ValueError:
            raise self._other(number, f"keys that cannot be sorted: {element!r:.80}") from None
        # Not converted to fit: a dataset whose elements differ is usually a mistake.
        if structure != self.structure:
            raise self._other(number, structure)
        for path, leaf, spec, dtype in zip(
            self.paths, leaves, self.leaves, self.dtypes, strict=True
        ):
            # Not converted if it has a dtype: an array of another library would be copied for each
            # element.
            found = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
            if found.shape != spec.shape or found.dtype != dtype:
                raise ElementError(
                    f"All elements of a dataset have the shapes and dtypes of the first one: "
                    f"{leaf_called(path)} is {dtype}{list(spec.shape)}. Received: element {number} "
                    f"with {found.dtype}{list(found.shape)}. {_remedy(spec.shape, found.shape)}"
                )
        return leaves

    def _other(self, number: int, structure: object) -> ElementError:
        return ElementError(
            f"All elements of a dataset have the structure of the first one, {self.structure}. "
            f"Received: element {number} with {structure}. Yield one structure throughout."
        )


def _is_of_keys(node: object) -> bool:
    return generator_of_node(node) is not None


def _keys_again(node: Any) -> Any:
    generator = generator_of_node(node)
    if generator is None:
        return node
    wrap = functools.partial(jax.random.wrap_key_data, impl=generator)
    known_by_form = isinstance(node.numbers, jax.ShapeDtypeStruct)
    return jax.eval_shape(wrap, node.numbers) if known_by_form else wrap(node.numbers)


def _remedy(expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    if len(found) == len(expected) and found[1:] == expected[1:] and found[:1] < expected[:1]:
        return "It looks like a smaller last batch: drop it (drop_remainder=True), or pad it."
    return "Cast, pad or reshape in the dataset."


def _narrowed(dtype: np.dtype) -> np.dtype:
    narrow = jax.dtypes.canonicalize_dtype(dtype)
    if narrow != dtype:
        note_once(
            f"{dtype} data is narrowed to {narrow} on its way to the device, as JAX does "
            f"(jax_enable_x64 keeps 64 bits)."
        )
    return narrow


# -- from an element to arguments ---------------------------------------------------------------


def call_with_element(function: Callable[..., Any], first: Sequence[Any], element: Tree) -> Any:
    """Call `function(*first, ...)` with an element, by the rules of `bind_element`.

    An exception of the function gets a note that says what it was called with.
    """
    # Outside the `try`: what does not bind has a message of its own.
    args, kwargs = bind_element(function, len(first), element)
    try:
        return function(*first, *args, **kwargs)
    except TailraceError:
        raise
    except Exception as error:
        # A function may call another one this way; the innermost call is the one that failed.
        if not any(note.startswith(_CALLED) for note in getattr(error, "__notes__", ())):
            # A note, not a new exception: the user's own type and traceback stay as they are.
            error.add_note(_called_with(function, (*first, *args), kwargs, element, error))
        raise


_CALLED = "Tailrace called "
_UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of JAX for Python code that needs the value of a tracer."""


def _called_with(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    element: Tree,
    error: Exception,
) -> str:
    """What a function that raised was called with, and what to change if the error shows it."""
    name = getattr(function, "__name__", repr(function))
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {f"argument {number}": value for number, value in enumerate(args)} | kwargs
    called = ", ".join(f"{key}={describe(value)}" for key, value in given.items())
    text = f"{_CALLED}{name} with {called}."
    if isinstance(element, tuple | list) and len(element) > 1 and any(a is element for a in args):
        text += (
            f" An element of the dataset has {len(element)} parts, and the function takes it whole. "
            f"With {len(element)} parameters for it, it gets one part each."
        )
    if isinstance(error, _UNKNOWN):
        text += (
            " It is compiled, so its values are not known while it is traced: use jnp for np, "
            "jnp.where or jax.lax.cond for if, and tr.print_tensor for print."
        )
    return text


def bind_element(
    function: Callable[..., Any], given: int, element: Tree
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for an element, after `given` other positional arguments.

    A tuple or list becomes positional arguments; a dict becomes keyword arguments if they fit; a
    function that takes exactly one more positional argument gets the whole element. A named tuple is
    passed whole to a function that takes one argument, and as positional arguments otherwise.

    >>> bind_element(lambda state, x, y: None, 1, (1, 2))
    ((1, 2), {})
    >>> bind_element(lambda state, x: None, 1, {"x": 1})
    ((), {'x': 1})
    >>> bind_element(lambda state, batch: None, 1, {"x": 1})
    (({'x': 1},), {})
    """
    if getattr(function, "takes_whole_element", False):
        return (element,), {}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: let the call itself decide
        return (tuple(element) if isinstance(element, tuple | list) else (element,)), {}
    before = (None,) * given
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((element,), {})]
    if isinstance(element, NoElement):
        ways = [((), {})]
    if isinstance(element, tuple | list):
        # A named tuple is one object to its author: passed whole if the function allows it.
        named = hasattr(element, "_fields")
        ways.insert(1 if named else 0, (tuple(element), {}))
    if isinstance(element, dict) and all(isinstance(key, str) for key in element):
        ways.insert(0, ((), dict(element)))
    # Most common intention first; the first one that fits the signature is used.
    for args, kwargs in ways:
        try:
            signature.bind(*before, *args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    name = getattr(function, "__name__", repr(function))
    raise ProgramError(
        f"The function must take what an element of the dataset supplies. {name}{signature} "
        f"gets {counted(given, 'argument')} first and then {_describe(element)}, which does "
        f"not fit. Change its parameters, or take the element whole with one more parameter."
    )


def _describe(element: Tree) -> str:
    if isinstance(element, dict):
        return f"the keyword arguments {sorted(map(str, element))}"
    if isinstance(element, tuple | list):
        return counted(len(element), "positional argument")
    if isinstance(element, NoElement):
        return "nothing, as there is no data"
    return "one array"


def effective_batch_size(spec: ElementSpec, elements: int) -> int | None:
    """Examples in a step of `elements` elements; None if the leaves have no common leading dim."""
    sizes = {shape[0] for shape in spec.shapes if shape}
    return min(sizes) * elements if len(sizes) == 1 else None
