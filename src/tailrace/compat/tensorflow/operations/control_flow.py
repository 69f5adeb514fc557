"""Loops and branches as operations: `tf.range`, `tf.cond`, `tf.while_loop`, `tf.map_fn`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu import loops
from tailrace.compat.ipu.graph.deferred import after
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.tensorflow.arrays import TensorArray
from tailrace.compat.tensorflow.control.branches import either
from tailrace.compat.tensorflow.control.loops import Range
from tailrace.compat.tensorflow.control.symbols import is_device_value, zeros_of
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.operations.table import only, operation
from tailrace.errors import ProgramError


@operation("range")
def range_(
    start: TensorLike, limit: TensorLike = None, delta: TensorLike = 1, dtype: DTypeLike = None
) -> Any:
    """Numbers from `start` to before `limit`.

    A limit that is a value of the device gives something that a `for` of a `tf.function` iterates.
    """
    start, limit = (0, start) if limit is None else (start, limit)
    if any(map(is_device_value, (start, limit, delta))):
        return Range(jnp.asarray(start), jnp.asarray(limit), jnp.asarray(delta))
    # Python numbers, so that the dtype follows from the values as in TensorFlow: an array would
    # bring its own.
    given = [each.item() if hasattr(each, "item") else each for each in (start, limit, delta)]
    return jnp.arange(*given, dtype=None if dtype is None else narrowed(dtype))


@operation("cond")
def cond(pred: TensorLike, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """What one of two functions returns.

    Raises:
        ProgramError: the condition is a device value, and there is no program.
    """
    # Decided now: only one of the two is traced, as with Python's own `if`.
    if not is_device_value(pred):
        return true_fn() if pred else false_fn()
    if current() is None:
        raise ProgramError(
            "tf.cond over a value of the device belongs into a program or a tf.function."
        )
    return either(pred, lambda: [true_fn()], lambda: [false_fn()])[0]


@operation("switch_case")
def switch_case(
    branch_index: TensorLike,
    branch_fns: dict[int, Callable[[], Any]] | Sequence[Any],
    default: Callable[[], Any] | None = None,
) -> Any:
    """What the function with a number returns; with no such function, the last one or `default`."""
    pairs = branch_fns.items() if isinstance(branch_fns, dict) else branch_fns
    # A dict or pairs by number, or a plain list of functions.
    if not isinstance(branch_fns, dict) and not isinstance(branch_fns[0], list | tuple):
        pairs = enumerate(branch_fns)
    functions = dict(pairs)
    last = default or functions[max(functions)]
    return case([(branch_index == number, fn) for number, fn in functions.items()], last)


@operation("case")
def case(
    pred_fn_pairs: dict[Any, Callable[[], Any]] | Sequence[tuple[Any, Callable[[], Any]]],
    default: Callable[[], Any] | None = None,
    exclusive: bool = False,
) -> Any:
    """What the function of the first condition that holds returns."""
    del exclusive
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, dict) else pred_fn_pairs)
    if default is None:
        (_, default), pairs = pairs[-1], pairs[:-1]
    chosen: Any = default
    # From the last to the first: each condition is asked only if those before it did not hold.
    for pred, function in reversed(pairs):
        chosen = functools.partial(cond, pred, function, chosen)
    return chosen()


@operation("while_loop")
def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Tree, **options: Any
) -> Any:
    """Run a body for as long as a condition holds; `maximum_iterations=` limits it."""
    # How TensorFlow ran a loop; here it is one of the program, of the shapes that it begins with.
    how = ("shape_invariants", "parallel_iterations", "back_prop", "swap_memory")
    only("while_loop", options, "maximum_iterations", *how)
    most = options.get("maximum_iterations")
    scope = current()
    if scope is not None and any(map(_is_unwritten, loop_vars)):
        # The body's first write decides the form of the rows that the loop carries.
        with scope.inner():
            forms = jax.eval_shape(lambda given: body(*given), list(loop_vars))
        loop_vars = [
            jax.tree.map(zeros_of, form) if _is_unwritten(value) else value
            for value, form in zip(loop_vars, forms, strict=True)
        ]
    values, structure = jax.tree.flatten(loop_vars)

    def as_vars(arrays: Tree) -> Any:
        return jax.tree.unflatten(structure, arrays)

    # Outside of programs Python runs the loop: values are known, and may change their shape.
    if scope is None:
        found = loop_vars
        passes = 0
        while (most is None or passes < most) and bool(cond(*found)):
            out = body(*found)
            found = out if isinstance(out, list | tuple) else (out,)
            passes += 1
        return found
    after = loops.while_loop(
        lambda *arrays: cond(*as_vars(arrays)),
        lambda *arrays: jax.tree.leaves(body(*as_vars(arrays))),
        values,
        maximum_iterations=most,
    )
    return as_vars(after if isinstance(after, list) else [after])


def _is_unwritten(value: object) -> bool:
    return isinstance(value, TensorArray) and not value.is_written


@operation("map_fn")
def map_fn(fn: Callable[[Any], Any], elems: TensorLike, *_: Any, **__: Any) -> Any:
    """A function of each row."""
    return jax.lax.map(fn, jax.tree.map(jnp.asarray, elems))


@operation("vectorized_map")
def vectorized_map(fn: Callable[[Any], Any], elems: TensorLike, *_: Any, **__: Any) -> Any:
    """A function of each row, of all rows at once."""
    return jax.vmap(fn)(jax.tree.map(jnp.asarray, elems))


@operation("scan")
def scan(
    fn: Callable[[Any, Any], Any], elems: TensorLike, initializer: Tree = None, *_: Any, **__: Any
) -> Any:
    """What a function of what it returned before and of each row returns."""
    elems = jax.tree.map(jnp.asarray, elems)
    if initializer is not None:
        return jax.lax.scan(
            lambda a, x: (fn(a, x),) * 2, jax.tree.map(jnp.asarray, initializer), elems
        )[1]
    # Without an initial value TensorFlow takes the first row, which is also the first result.
    first = jax.tree.map(lambda each: each[0], elems)
    rest = jax.tree.map(lambda each: each[1:], elems)
    after = jax.lax.scan(lambda a, x: (fn(a, x),) * 2, first, rest)[1]
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, after)


@operation("foldl")
def foldl(
    fn: Callable[[Any, Any], Any], elems: TensorLike, initializer: Tree = None, *_: Any, **__: Any
) -> Any:
    """What a function of what it returned before and of each row returns in the end."""
    return jax.tree.map(lambda each: each[-1], scan(fn, elems, initializer))


@operation("custom_gradient")
def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns its result and a function for its gradient."""
    from keras import ops

    return ops.custom_gradient(f)


@operation("recompute_grad")
def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose values are computed again for its gradient."""
    return jax.checkpoint(f)


@operation("print")
def print_(*inputs: Any, **options: Any) -> None:
    """Print values when they have been computed."""
    del options
    if any(map(is_device_value, inputs)):
        text = " ".join("{}" if is_device_value(each) else str(each) for each in inputs)
        jax.debug.print(text, *(each for each in inputs if is_device_value(each)))
    else:
        print(*inputs)


@contextlib.contextmanager
def control_dependencies(control_inputs: Sequence[Any] | None) -> Iterator[None]:
    """In a graph of TensorFlow 1, what is described inside is done after these.

    Elsewhere without effect: what is written first is done first.

    Args:
        control_inputs: what is done before.

    >>> from tailrace.compat import tensorflow as tf
    >>> with tf.control_dependencies([]):
    ...     pass
    """
    with after(control_inputs or ()):
        yield
