"""Printing from inside a program, and values of earlier passes."""

from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import current, kept, prepared
from tailrace.compat.ipu.graph.variables import Variable, as_array
from tailrace.compat.originals.missing import missing_from
from tailrace.records.print_tensor import print_tensor as engine_print


def print_tensor(input: TensorLike, name: str = "") -> Operation:
    """Print a value to standard error each time this is reached.

    As in the original it returns an operation, not the value. To print the gradient too, use
    `tr.print_tensor`, and go on with what it returns.

    Args:
        input: the value.
        name: the text in front of it.

    Returns:
        An operation.

    Raises:
        ProgramError: it is called outside a program.

    >>> from tailrace.compat import ipu
    >>> def step(x):
    ...     return x + 1, ipu.ops.internal_ops.print_tensor(x, "x")
    >>> ipu.ipu_compiler.compile(step, [1.0])()[0].item()  # and `x = 1` on standard error
    2.0
    """
    scope = current()
    # The first look has values that are never computed.
    if scope is None or not scope.looking:
        engine_print(as_array(input), title=name, print_gradient=False)
    return Operation("print_tensor")


def fifo(x: TensorLike, depth: int, offload: bool = False, name: str | None = None) -> Any:
    """What `x` was `depth` calls earlier; zeros before that.

    Args:
        x: the value; each pass of a loop puts one in and takes one out.
        depth: how many are kept. Below 1, `x` itself is returned.
        offload: where the original kept them; without effect.
        name: without effect.

    Raises:
        ProgramError: it is called outside a program.

    >>> from tailrace.compat import ipu
    >>> def body(x, _):
    ...     return x + 1, ipu.ops.internal_ops.fifo(x, depth=2)
    >>> program = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(5, body, [10.0, 0.0]))
    >>> [value.item() for value in program()]  # the fifth pass sees the value of the third
    [15.0, 12.0]
    """
    del offload, name
    x = as_array(x)
    if depth < 1:
        return x

    def make() -> tuple[Variable, Variable]:
        kept_values = jnp.zeros((depth, *x.shape), x.dtype)
        return Variable(kept_values, False, "fifo"), Variable(0, False, "fifo/position")

    # By its place in the program, which is traced more than once: each call has a queue of its own.
    values, position = prepared(kept(), "fifo", make)
    # A ring: the newest value replaces the oldest.
    here = position.value()
    out = values.value()[here]
    values.assign(values.value().at[here].set(x))
    position.assign((here + 1) % depth)
    return out


def remap(x: TensorLike, name: str | None = None) -> Any:
    """The value unchanged: its memory layout is up to the compiler here.

    Args:
        x: the value.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.internal_ops.remap([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    del name
    return as_array(x)


def remap_deduce(x: TensorLike, name: str | None = None) -> Any:
    """The value unchanged; see `remap`.

    Args:
        x: the value.
        name: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.internal_ops.remap_deduce([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    return remap(x, name)


def get_current_iteration_counter(name: str | None = None, **_: Any) -> Any:
    """Which mini-batch of the current run of a pipeline this is, from 0.

    The same as `pipelining_ops.get_current_iteration_counter`.

    Args:
        name: without effect.
        **_: without effect.

    Raises:
        IPURuntimeError: it is called outside a pipeline.

    >>> from tailrace.compat import ipu
    >>> ipu.ops.internal_ops.get_current_iteration_counter()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.compat.ipu.errors.IPURuntimeError: ... may only be used inside a pipeline.
    """
    del name
    from tailrace.compat.ipu.ops import pipelining_ops  # which needs more than this file

    return pipelining_ops.get_current_iteration_counter()


__getattr__, __dir__ = missing_from(__name__)
