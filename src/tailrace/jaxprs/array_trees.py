"""Checks that what users pass is a tree of arrays.

JAX refuses a string or an object where it first meets it, in terms of its own internals. These checks
come before, and name the function that was called and the leaf.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.errors import ProgramError, TailraceError

_REFUSED = (TypeError, ValueError, OverflowError)
"""What JAX raises for a value that is not an array."""


def not_an_array(
    tree: object, *, convertible: bool = False
) -> tuple[tuple[Any, ...], object] | None:
    """The first leaf that is neither an array nor a number, with its path; None if there is none.

    Args:
        tree: any tree.
        convertible: whether a leaf that JAX converts to an array, such as a Keras variable, is one.

    >>> not_an_array({"x": 1.0, "y": (2, "a")})
    ((DictKey(key='y'), SequenceKey(idx=1)), 'a')
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        try:
            jax.typeof(leaf)
        except _REFUSED:
            if not (convertible and _is_convertible(leaf)):
                return path, leaf
    return None


def check_arrays(
    rule: str, tree: object, *, convertible: bool = True, error: type[TailraceError] = ProgramError
) -> None:
    """Check that a tree has only arrays and numbers.

    Args:
        rule: the start of the message, such as "tr.repeat carries".
        tree: what was given.
        convertible: whether what JAX converts to an array is one.
        error: the error class to raise.

    >>> check_arrays("tr.repeat carries", [1.0, "a"])
    Traceback (most recent call last):
    tailrace.errors.ProgramError: tr.repeat carries trees of arrays and numbers. Received: str at [1]. \
Leave it out, or close over it in the function.
    """
    if (found := not_an_array(tree, convertible=convertible)) is not None:
        path, leaf = found
        where = f" at {jax.tree_util.keystr(path)}" if path else ""
        raise error(
            f"{rule} trees of arrays and numbers. Received: {type(leaf).__name__}{where}. Leave it "
            f"out, or close over it in the function."
        )


def returning_arrays(rule: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a check that it returns only arrays and numbers; arguments as above."""

    def checked(*args: Any) -> Any:
        out = function(*args)
        check_arrays(rule, out)
        return out

    return checked


def dtype_beside(old: jax.Array, new: Any) -> np.dtype:
    """The dtype of a value that takes the place of another: a Python number takes its dtype if it fits.

    >>> import jax.numpy as jnp
    >>> [str(dtype_beside(jnp.zeros(2, jnp.bfloat16), new)) for new in (1, np.ones(2, np.float32))]
    ['bfloat16', 'float32']
    >>> str(dtype_beside(jnp.int32(1), 1.5))
    'float32'
    """
    if hasattr(new, "dtype"):
        return new.dtype
    with jax.numpy_dtype_promotion("standard"):  # a strict one raises where a number does not fit
        return jnp.result_type(old.dtype, new)


def types_of(rule: str, args: tuple[Any, ...]) -> Hashable:
    """The structure and types of arguments: the key of what was traced for them.

    Weak types count, as for `jax.jit`: a Python number and an array promote differently.

    Args:
        rule: the start of the message if one is not an array, such as "A program takes".
        args: the arguments.

    >>> types_of("A program takes", (1.0,)) == types_of("A program takes", (2.0,))
    True
    """
    leaves, structure = jax.tree.flatten(args)
    try:
        return structure, tuple(jax.typeof(leaf) for leaf in leaves)
    except _REFUSED:
        check_arrays(rule, args, convertible=False)
        raise


def _is_convertible(leaf: object) -> bool:
    # By its methods: `jnp.asarray` takes a string for the name of a dtype first. A NumPy array that JAX
    # has refused has a dtype that it does not know.
    own = isinstance(leaf, np.ndarray | np.generic)
    return hasattr(leaf, "__jax_array__") or (hasattr(leaf, "__array__") and not own)
