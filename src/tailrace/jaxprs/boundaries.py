"""Boundaries between fusions, where XLA's CPU compiler would compute a value again for each reader.

XLA fuses cheap operations into what reads them, and computes them once per reader. A residual stream is
a chain of sums, each read by a layer and by the next sum: every layer's fusions read all results before
it. Fused computations grow with the depth of a model, and its program with the square of the depth
(docs/upstream/xla_cpu_residual_fusions.md).

A boundary is an identity that XLA does not fuse through. It is set at a sum

* into which more than `MOST_PARTS` results of products, convolutions, loops or gathers flow, through
  operations that are fused, and
* which two or more kernels would read.

The sum is then in memory, and nothing flows into what reads it but itself. Sums alone: at a product,
XLA would no longer contract it with the sum that follows it, which changes bits.

Places are found in the program as it was traced. Marks are transparent and what leaves the program is
no reader, so taps, guards and fingerprints move no boundary.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs.value_graph import BORDER, UNKNOWN, Operation, Value, ValueGraph
from tailrace.jaxprs.walk import Position

MOST_PARTS = 2
"""Up to this many results are read again by each kernel: that costs less than a boundary."""

FEWEST_ELEMENTS = 1024
"""Sums of fewer elements are cheaper to compute again than to keep."""

Boundaries = Mapping[Position, tuple[int, ...]]
"""The results that are boundaries, by the position of their equation."""

_SUMS = frozenset(["add", "add_any"])

_NOT_FUSED = frozenset(
    ["dot_general", "conv_general_dilated", "sort", "gather", "scatter", "scatter-add", "scatter_add",
     "select_and_scatter_add", "reduce_window", "reduce_window_max", "reduce_window_sum",
     "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "fft", "top_k", "custom_call", "ffi_call",
     "random_bits", "threefry2x32", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd",
     BORDER, UNKNOWN]
)  # fmt: skip
"""Operations whose results XLA keeps in memory."""

_OWN_KERNELS = _NOT_FUSED | {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"),
    *("reduce_and", "reduce_or", "reduce"),
}
"""Operations that begin a kernel: two that read a value compute it twice."""


def boundaries(graph: ValueGraph) -> dict[Position, tuple[int, ...]]:
    """The results of a program that become boundaries."""
    several = _read_by_several(graph.operations)
    parts: dict[int, frozenset[int]] = {}
    found: dict[Position, tuple[int, ...]] = {}
    for number, operation in enumerate(graph.operations):
        flows = _parts_of(operation, parts)
        for index, result in enumerate(operation.results):
            if operation.position is None:
                continue  # what enters a loop, like an argument of the program, is no part
            if operation.name in _NOT_FUSED:
                # By its operation and index: a result is one part, however often it is read.
                parts[id(result)] = frozenset([-1 - (number << 16) - index])
            elif _is_boundary(operation, result, flows) and id(result) in several:
                parts[id(result)] = frozenset([number])
                found[operation.position] = (*found.get(operation.position, ()), index)
            else:
                parts[id(result)] = flows
    return found


def _parts_of(operation: Operation, parts: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The results in memory that flow into an operation; of more than count, the first."""
    flows: frozenset[int] = frozenset()
    for value in operation.inputs:
        # No more than decide: the whole set would grow with the depth of the program.
        if len(flows) <= MOST_PARTS:
            flows |= parts.get(id(value), frozenset())
    return flows


def _is_boundary(operation: Operation, result: Value, flows: frozenset[int]) -> bool:
    floats = result.dtype is not None and jnp.issubdtype(result.dtype, jnp.floating)
    large = math.prod(result.shape) >= FEWEST_ELEMENTS
    return operation.name in _SUMS and floats and large and len(flows) > MOST_PARTS


def _read_by_several(operations: Sequence[Operation]) -> set[int]:
    """The values that two or more kernels read, by their identity."""
    kernels: dict[int, frozenset[int]] = {}  # of each value, at most two kernels that read it
    for number in range(len(operations) - 1, -1, -1):
        operation = operations[number]
        if operation.name in (BORDER, UNKNOWN):
            continue  # what leaves a loop is in memory anyway
        reads = frozenset([number])
        if operation.name not in _OWN_KERNELS:
            reads = _some(kernels.get(id(result), frozenset()) for result in operation.results)
        for value in operation.inputs:
            kernels[id(value)] = _some([kernels.get(id(value), frozenset()), reads])
    return {value for value, reads in kernels.items() if len(reads) > 1}


def _some(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    """At most two members of sets."""
    found: set[int] = set()
    for each in sets:
        found |= each
        if len(found) > 1:
            return frozenset(sorted(found)[:2])
    return frozenset(found)


# -- emitting one -----------------------------------------------------------------------------------


def bounded(value: Any, known: Any) -> Any:
    """A value behind a boundary; `known` is a number of the running program that is not negative."""
    if keeps_barriers() or not isinstance(known, jax.Array):
        return lax.optimization_barrier(value)
    # The compiler cannot know the number, so it must expect either branch, and the second makes another
    # value. Only the first is ever taken.
    return lax.cond(known >= 0, lambda x: x, lambda x: -x, value)


@functools.cache
def keeps_barriers() -> bool:
    """Whether XLA's CPU compiler fuses nothing through a barrier; some remove barriers first."""

    def probe(x: jax.Array) -> Any:
        return jnp.tanh(lax.optimization_barrier(jnp.exp(x)))

    form = jax.ShapeDtypeStruct((64,), jnp.float32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        text = jax.jit(probe).lower(form).compile().as_text() or ""
    # In one computation, one reads the other without memory in between.
    return not any(" exponential(" in part and " tanh(" in part for part in text.split("\n\n"))
