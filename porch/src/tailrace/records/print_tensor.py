"""`tr.print_tensor`: a value is printed when the device makes it, and its gradient likewise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.data.dtypes import is_numeric
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import Tag, current_trace, is_tracing, mark
from tailrace.records.array_text import PrintOptions


def print_tensor(
    x: Any,
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

    In differentiated code its gradient is printed too, under `<title>_gradient`, if the returned
    value is what the computation goes on with. Each print stops the device for a moment: this is a
    tool for looking closely, not for a long run (see `tr.Tap` for that).

    Args:
        x: an array.
        title: what stands in front of it.
        print_gradient: whether the gradient is printed too.
        summarise_threshold: larger arrays show only the edges of each dim; 0 shows everything.
        edge_items: how many entries an edge has.
        max_line_width: where lines are broken; 0 never breaks them.
        digits: significant digits; 0 leaves numbers as they are.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: between entries.
        open_bracket: before the entries of a dim.
        close_bracket: after them.
    """
    if not hasattr(x, "dtype") and not np.isscalar(x):
        raise ProgramError(
            f"tr.print_tensor prints an array. Received: {type(x).__name__}. "
            f"Call it for each array of a tree."
        )
    if not isinstance(x, Tracer) and not is_numeric(np.asarray(x).dtype):
        raise ProgramError(
            f"tr.print_tensor prints an array of numbers. Received: {np.asarray(x).dtype}."
        )
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
    title = title or "tensor"

    def show(value: Any, title: str) -> None:
        text = options.format(np.asarray(value), title)
        # In one piece: replicas print at the same time.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    if not isinstance(x, Tracer):
        show(x, title)
        return x
    if not is_tracing():  # a plain jax.jit, or a gradient outside of any program
        return _printed(x, title, show, print_gradient)
    trace = current_trace("tr.print_tensor")
    site = trace.new_site("tr.print_tensor")
    tag = Tag("print", title, payload=show, follow_gradient=print_gradient, site=site)
    return mark(x, tag)


def _printed(x: Any, title: str, show: Callable[[Any, str], None], print_gradient: bool) -> Any:
    """`x`, printed by JAX's own callback whenever it is computed, and its gradient likewise."""
    jax.debug.callback(lambda value: show(value, title), x)
    if not print_gradient or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    @jax.custom_vjp
    def same(value: Any) -> Any:
        return value

    def backward(_: None, gradient: Any) -> tuple[Any]:
        jax.debug.callback(lambda value: show(value, f"{title}_gradient"), gradient)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(x)
