"""Numbers in a program that can be arguments of it instead, without a change of one bit.

A learning rate is a literal of the traced step. As an argument of the compiled program it can be
another one in the next trainer, without compiling again. But XLA computes with constants what it does
not with arguments, and that rounds differently:

    (x * 2.1) * 0.3  becomes  x * 0.63     likewise sums; an argument is multiplied after 2.1
    x / 0.3          becomes  x * 3.333
    0.3 * x + y * z  is one product, and one that is fused with the sum; which is which depends on 0.3
    x * 1, x + 0, 0.5 * a + 0.5 * b   have forms of their own
    0.3 * (a @ b)    on a GPU, 0.3 becomes a number of the matrix product, if nothing else uses that

So a number is free only where no such rule of XLA's simplifier applies: none of the values beside it is
a product (sum) with a constant, it is no power of two, and it is used by operations of a short list:
products, sums and bounds. (A comparison or a choice changes what XLA fuses, and so the order of sums.)
It also has to be a number that can differ between two runs of the same code: one that is written in the
line of source which uses it cannot.
"""

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
        places: which of them a literal is, by the literal's identity.
        around: the equations that have such literals inside, by identity.
    """

    values: tuple[Any, ...] = ()
    places: dict[int, int] = dataclasses.field(default_factory=dict)
    around: frozenset[int] = frozenset()


def free_numbers(equations: Sequence[JaxprEqn], on_cpu: bool) -> FreeNumbers:
    """The numbers of these equations that can be arguments."""
    judge = _Judge(on_cpu)
    opened = _opened(equations)
    bound: set[int] = set()
    free: dict[int, Value] = {}
    for value in ValueGraph(equations).literals:
        mark = id(value.literal)
        allowed = _can_differ(value) and all(eqn in opened for eqn in value.around or ())
        if allowed and judge.is_free(value):
            free[mark] = value
        else:
            bound.add(mark)  # the same literal may be used at several places
    values: dict[Any, int] = {}
    found: list[Any] = []
    places: dict[int, int] = {}
    around: set[int] = set()
    for mark, value in free.items():
        if mark in bound:
            continue
        # A number that comes from one line of source is one argument, wherever it is used.
        key = (_form(value), float(_value(value)), _lines(value)[:1])
        if key not in values:
            values[key] = len(found)
            found.append(_value(value))
        places[mark] = values[key]
        around.update(value.around or ())
    return FreeNumbers(tuple(found), places, frozenset(around))


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Whether XLA computes the same with a number as an argument."""

    on_cpu: bool

    def is_free(self, value: Value) -> bool:
        """Whether all uses of a value allow it."""
        return bool(value.users) and all(self._allows(*use) for use in value.uses())

    def _allows(self, operation: Operation, index: int, value: Value) -> bool:
        others = operation.others(index)
        if all(other.constant for other in others):
            return False  # XLA computes it once and for all
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
        scalar = other.shape == () and operation.results[0].shape != ()
        beside = operation.name != "mul" or other is value
        return (
            beside
            or scalar
            or other.is_spread
            or other.constant
            or self._product_with_constant(other)
        )

    @staticmethod
    def _meets_sum(operation: Operation, index: int, value: Value) -> bool:
        return operation.name in _SUMS and any(o.source().constant for o in operation.others(index))


def _is_product(value: Value) -> bool:
    """Whether an addition of a value may be fused with the multiplication that makes it."""
    made_by = value.source().made_by
    if made_by is None:
        return False
    if made_by.name == "div":  # XLA multiplies by the inverse of what is a constant, or spread
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
    """Whether a constant is a factor of a product, or of one of its factors."""
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
    """The equations that are emitted as their contents, by identity."""
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
    if getattr(aval, "weak_type", False) and aval.dtype != np.float32:
        return False
    number = float(literal.val)
    if not math.isfinite(number) or abs(math.frexp(number)[0]) in (0.0, 0.5):
        return False  # zero, powers of two: XLA has rules of their own for these
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
    """The numbers that are written in a line of source."""
    found = re.findall(
        r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", linecache.getline(path, line)
    )
    return frozenset(map(float, found))
