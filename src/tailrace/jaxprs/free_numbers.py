"""Literals of a program that can become arguments without changing one bit of its results.

A learning rate is a literal of the traced step. If it is an argument of the compiled program, the next
trainer can use another one without compiling again. But XLA simplifies expressions with constants, not
with arguments, and the simplified form rounds differently:

    (x * 2.1) * 0.3  becomes  x * 0.63     likewise sums; with an argument there are two products
    x / 0.3          becomes  x * 3.333
    0.3 * x + y * z  fuses one of the two products with the sum (FMA); which one depends on 0.3
    x * 1, x + 0, 0.5 * a + 0.5 * b   have special rules
    0.3 * (a @ b)    on a GPU, 0.3 becomes a parameter of the matmul kernel if nothing else uses a @ b

So a literal is free only where no such rule of XLA's simplifier applies: no other operand of its
operation is a product (sum) with a constant, it is not a power of two, and only operations of a short
list use it: products, sums and bounds. (A comparison or a select changes what XLA fuses, and so the
order of sums.) It must also be a number that can differ between two runs of the same code: a number
that is written out in the source line that uses it cannot.
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.value_graph import UNKNOWN, Operation, Value, ValueGraph, is_opened

_PRODUCTS = frozenset(["mul", "div", "integer_pow", "square"])
_SUMS = frozenset(["add", "add_any", "sub"])
_BOUNDS = frozenset(["max", "min", "clamp"])
_MATRIX_PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])


@dataclasses.dataclass(frozen=True)
class FreeNumbers:
    """The literals of a program that become arguments.

    Attributes:
        values: the arguments, in order.
        places: the index of a literal's argument, by the literal's identity.
        around: the equations that contain such literals, by identity.
    """

    values: tuple[Any, ...] = ()
    places: dict[int, int] = dataclasses.field(default_factory=dict)
    around: frozenset[int] = frozenset()


def free_numbers(graph: ValueGraph, on_cpu: bool) -> FreeNumbers:
    """Find the literals of a program that can be arguments."""
    judge = _Judge(on_cpu)
    opened = _opened(graph.equations)
    bound: set[int] = set()
    free: dict[int, Value] = {}
    for value in graph.literals:
        mark = id(value.literal)
        allowed = _can_differ(value) and all(eqn in opened for eqn in value.around or ())
        if allowed and judge.is_free(value):
            free[mark] = value
        else:
            bound.add(mark)  # one literal object may have several uses; one bound use binds it
    values: dict[Any, int] = {}
    found: list[Any] = []
    places: dict[int, int] = {}
    around: set[int] = set()
    for mark, value in free.items():
        if mark in bound:
            continue
        # One number from one source line is one argument however often it is used: the number of
        # arguments must not grow with the number of parameters that an optimizer updates.
        key = (_form(value), float(_value(value)), _lines(value)[:1])
        if key not in values:
            values[key] = len(found)
            found.append(_value(value))
        places[mark] = values[key]
        around.update(value.around or ())
    return FreeNumbers(tuple(found), places, frozenset(around))


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Decides whether XLA computes the same bits with a number as an argument."""

    on_cpu: bool

    def is_free(self, value: Value) -> bool:
        """Whether every use of a value allows it."""
        return bool(value.users) and all(self._allows(*use) for use in value.uses())

    def _allows(self, operation: Operation, index: int, value: Value) -> bool:
        others = operation.others(index)
        if all(other.constant for other in others):
            return False  # constant folding: XLA computes the result at compile time
        name, (result, *_) = operation.name, operation.results or [value]
        if name in _BOUNDS:
            return True
        if name in _SUMS:
            return not any(map(_sum_with_constant, others)) and self._ends(result, self._meets_sum)
        if name == "mul" or (name == "div" and index == 0):
            return not any(map(self._product_with_constant, others)) and self._ends(
                result, self._meets_product
            )
        return False

    def _ends(self, result: Value, meets: Callable[[Operation, int, Value], bool]) -> bool:
        return not any(meets(*use) or use[0].name == UNKNOWN for use in result.uses())

    # XLA's simplifier looks one operation back (is the other operand a product with a constant?) and
    # one ahead (does the result meet another constant?). The next three mirror it.

    def _product_with_constant(self, value: Value) -> bool:
        made_by = value.source().made_by
        if made_by is None:
            return False
        if made_by.name in _MATRIX_PRODUCTS:
            return not self.on_cpu and len(list(value.source().uses())) == 1
        return made_by.name == UNKNOWN or (made_by.name in _PRODUCTS and _has_constant(made_by, 2))

    def _meets_product(self, operation: Operation, index: int, value: Value) -> bool:
        if operation.name in _SUMS:
            return any(_is_product(other) for other in operation.others(index))
        if operation.name not in _PRODUCTS:
            return False
        (other, *_) = operation.others(index) or [value]
        # XLA also rewrites squares, powers and quotients, and products with a scalar or a broadcast.
        scalar = other.shape == () and operation.results[0].shape != ()
        rewritten = operation.name != "mul" or other is value
        return (
            rewritten
            or scalar
            or other.is_spread
            or other.constant
            or self._product_with_constant(other)
        )

    @staticmethod
    def _meets_sum(operation: Operation, index: int, value: Value) -> bool:
        return operation.name in _SUMS and any(o.source().constant for o in operation.others(index))


def _is_product(value: Value) -> bool:
    """Whether XLA may fuse a sum of this value with the multiplication that makes it (FMA)."""
    made_by = value.source().made_by
    if made_by is None:
        return False
    if made_by.name == "div":
        # By a constant or a broadcast, XLA multiplies with the inverse instead.
        below = made_by.inputs[1]
        return below.source().constant or below.is_spread or below.shape != made_by.inputs[0].shape
    return made_by.name in (*_PRODUCTS, UNKNOWN)


def _sum_with_constant(value: Value) -> bool:
    made_by = value.source().made_by
    if made_by is None:
        return False
    constant = any(other.source().constant for other in made_by.inputs)
    return made_by.name == UNKNOWN or (made_by.name in _SUMS and constant)


def _has_constant(product: Operation, depth: int) -> bool:
    """Whether a constant is a factor of a product, or of a factor that is itself a product."""
    for value in product.inputs:
        source = value.source()
        if source.constant:
            return True
        inside = source.made_by
        if inside is None or inside.name not in _PRODUCTS or depth == 1:
            continue
        if _has_constant(inside, depth - 1):
            return True
    return False


def _opened(equations: Sequence[JaxprEqn]) -> set[int]:
    """The equations that are inlined when the program is emitted, by identity."""
    found: set[int] = set()
    for eqn in equations:
        if is_opened(eqn):
            found.add(id(eqn))
            for _, _, inner, _ in internals.inner_jaxprs(eqn):
                found |= _opened(inner.eqns)
    return found


# -- which numbers can differ -----------------------------------------------------------------------


def _can_differ(value: Value) -> bool:
    literal: Any = value.literal
    aval = literal.aval
    if aval.shape != () or not np.issubdtype(getattr(aval, "dtype", None), np.floating):
        return False
    # As an argument, a Python number becomes a weakly typed float32: a weak literal of another
    # dtype would change its type.
    if getattr(aval, "weak_type", False) and aval.dtype != np.float32:
        return False
    number = float(literal.val)
    if not math.isfinite(number) or abs(math.frexp(number)[0]) in (0.0, 0.5):
        return False  # zero and powers of two: XLA has special rules for these
    written = {aval.dtype.type(n) for line in _lines(value) for n in _written(*line)}
    return aval.dtype.type(abs(number)) not in written


def _value(value: Value) -> Any:
    literal: Any = value.literal
    weak = getattr(literal.aval, "weak_type", False)
    return float(literal.val) if weak else literal.aval.dtype.type(literal.val)


def _form(value: Value) -> Any:
    literal: Any = value.literal
    return str(literal.aval.dtype), getattr(literal.aval, "weak_type", False)


def _lines(value: Value) -> tuple[tuple[str, int], ...]:
    return internals.lines_of(value.equation) if value.equation is not None else ()


@functools.cache
def _written(path: str, line: int) -> frozenset[float]:
    """The numbers written in a source line."""
    found = re.findall(
        r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", linecache.getline(path, line)
    )
    return frozenset(map(float, found))
