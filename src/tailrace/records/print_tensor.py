"""`tr.print_tensor`: prints a value, and its gradient, when the device computes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import check_flag
from tailrace.data.dtypes import is_numeric
from tailrace.errors import OptionError, ProgramError
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import Tag, current_trace, is_tracing, mark
from tailrace.records.array_text import PrintOptions


def print_tensor(
    x: object,
    title: str = "",
    print_gradient: bool = True,
    *,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Any:
    """Print `x` to standard error each time it is computed; returns `x`.

    In differentiated code its gradient is printed too, as `<title>_gradient`, if the computation uses
    the returned value. Each print stalls the device for a moment: this is a tool for debugging, not for
    long runs (see `tr.Tap` for those).

    Args:
        x: an array.
        title: the text before it.
        print_gradient: whether to print the gradient too.
        summarise_threshold: larger arrays show only the edges of each dim; 0 shows everything.
        edge_items: the number of entries of an edge.
        max_line_width: where lines are broken; 0 for never.
        digits: significant digits; 0 for Python's notation.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: between entries.
        open_bracket: before the entries of a dim.
        close_bracket: after them.

    Raises:
        ProgramError: the value is not an array of numbers.
        OptionError: an option is of the wrong kind.

    Example:
        >>> import jax.numpy as jnp, sys, tailrace as tr
        >>> error, sys.stderr = sys.stderr, sys.stdout
        >>> x = tr.print_tensor(jnp.arange(3.0), "x")
        x: (0.000, 1.000, 2.000)
        >>> sys.stderr = error
    """
    _check_printable(x)
    options = PrintOptions(
        summarise_threshold=summarise_threshold,
        edge_items=edge_items,
        max_line_width=max_line_width,
        digits=digits,
        float_format=float_format,
        separator=separator,
        open_bracket=open_bracket,
        close_bracket=close_bracket,
    )
    if not isinstance(title, str | None):
        raise OptionError(f"title is a text. Received: title={title!r:.80}.")
    title = title or "tensor"
    print_gradient = check_flag("print_gradient", print_gradient, error=OptionError)

    def show(value: object, title: str) -> None:
        text = options.format(np.asarray(value), title)
        # One write: replicas print at the same time, and their lines must not interleave.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    if not isinstance(x, Tracer):
        show(x, title)
        return x
    if not is_tracing():  # a plain jax.jit, or a gradient outside of any program
        return _printed(x, title, show, print_gradient)
    trace = current_trace("tr.print_tensor")
    # Numbered like an enqueue: a print that differentiation drops is an error, not silence.
    site = trace.new_site("tr.print_tensor")
    tag = Tag("print", title, payload=show, follow_gradient=print_gradient, site=site)
    return mark(x, tag)


def _check_printable(x: object) -> None:
    if not hasattr(x, "dtype") and not np.isscalar(x):
        raise ProgramError(
            f"tr.print_tensor prints an array. Received: {type(x).__name__}. "
            f"Call it for each array of a tree."
        )
    if not isinstance(x, Tracer) and not is_numeric(np.asarray(x).dtype):
        raise ProgramError(
            f"tr.print_tensor prints an array of numbers. Received: {np.asarray(x).dtype}."
        )


def _printed(
    x: jax.Array, title: str, show: Callable[[Any, str], None], print_gradient: bool
) -> Any:
    """`x`, printed by a JAX callback whenever it is computed; its gradient too."""
    # Outside of our programs nothing resolves a mark: JAX's own callback prints.
    jax.debug.callback(lambda value: show(value, title), x)
    if not print_gradient or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    @jax.custom_vjp
    def same(value: jax.Array) -> Any:
        return value

    def backward(_: None, gradient: jax.Array) -> tuple[Any]:
        jax.debug.callback(lambda value: show(value, f"{title}_gradient"), gradient)
        return (gradient,)

    # An identity with a backward rule: JAX hands the gradient of a value to such a rule only.
    same.defvjp(lambda value: (value, None), backward)
    return same(x)
