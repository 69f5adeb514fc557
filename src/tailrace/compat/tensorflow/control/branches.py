"""`if` over a value of the device, as a branch of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.gradients import evaluate
from tailrace.compat.ipu.graph.state import Scope, inside
from tailrace.compat.tensorflow.arrays import TensorArray
from tailrace.compat.tensorflow.control.symbols import (
    MISSING,
    Symbols,
    boolean,
    same_form,
    split,
    zeros_of,
)


def branch(
    condition: TensorLike, body: Callable[[], Any], orelse: Callable[[], Any], symbols: Symbols
) -> None:
    """Run `body` or `orelse`, each of which changes the symbols, in the program."""
    # Both branches are traced, each from the values before: the second must not see the first's.
    before, undefined = symbols.values(), list(symbols.read())

    def run(one: Callable[[], Any]) -> list[Any]:
        symbols.put(before, undefined)
        one()
        return symbols.values()

    values = either(condition, lambda: run(body), lambda: run(orelse), symbols.names)
    symbols.put(values, undefined)


def either(
    condition: TensorLike,
    body: Callable[[], list[Any]],
    orelse: Callable[[], list[Any]],
    names: Sequence[str] = ("the result",),
) -> list[Any]:
    """What one of two functions returns: values of one form; variables that they change are carried."""
    scope = inside("a branch over a value of the device")
    # All that the program changes anywhere: what a branch writes is known only from its trace. In
    # the first look it is not known yet, and both branches run one after the other, only to be
    # seen.
    carried = [] if scope.looking else scope.found.carried()
    given = [scope.read(variable) for variable in carried]
    ways = [_Way(one, scope, carried, given) for one in (body, orelse)]
    outs = [_with_returns(ways[i].out, ways[1 - i].out, names) for i in (0, 1)]
    # A name with a value in one branch only has none after it, as in the original.
    both = [a is not MISSING and b is not MISSING for a, b in zip(*outs, strict=True)]
    first, second = (
        split([v if some else MISSING for v, some in zip(out, both, strict=True)]) for out in outs
    )
    same_form(first, second, names, "A branch")
    if scope.looking:
        return first.joined(first.arrays)
    # lax.cond needs equal forms; a branch that lacks a value returns zeros, which are never read.
    forms = [split([v]).arrays if some else [] for v, some in zip(outs[0], both, strict=True)]
    after, written = lax.cond(
        boolean(condition), ways[0].chosen(both, forms), ways[1].chosen(both, forms), given
    )
    for variable, value in zip(carried, written, strict=True):
        scope.write(variable, value)
    return first.joined(after)


def _with_returns(out: list[Any], other: list[Any], names: Sequence[str]) -> list[Any]:
    """What a branch leaves; where only the other one returns from the function, a value like its.

    Whether there was a return is a value of its own, so this one is never looked at. A tensor array
    that only the other one writes to is one of zeros.
    """
    return [
        b if a is MISSING and (name.startswith("retval_") or isinstance(b, TensorArray)) else a
        for a, b, name in zip(out, other, names, strict=True)
    ]


class _Way:
    """One branch, traced: what it returns and what it leaves variables with."""

    def __init__(
        self, function: Callable[[], list[Any]], scope: Scope, carried: list[Any], given: list[Any]
    ) -> None:
        self._function, self._scope, self._carried = function, scope, carried
        self.out: list[Any] = []
        if scope.looking:
            with scope.inner():
                self.out = function()
            return
        # Traced here, before `lax.cond`, which would trace each branch without knowing what the
        # other one returns. Gradients asked for inside are answered when it is run.
        self._closed, form = jax.make_jaxpr(self._run, return_shape=True)(given)
        self._structure = jax.tree.structure(form)

    def _run(self, values: list[Any]) -> Any:
        with self._scope.inner(self._carried, values) as inner:
            parts = [split([value]) for value in self._function()]
            # Of the dtypes that they are returned with: nothing may be computed from them later.
            self.out = [part.joined(part.arrays)[0] for part in parts]
            return [part.arrays for part in parts], [
                inner.read(variable) for variable in self._carried
            ]

    def chosen(self, both: list[bool], forms: list[Any]) -> Callable[[list[Any]], Any]:
        """The branch as a function of the variables, which returns what both branches have."""
        missing = [value is MISSING for value in self.out]

        def run(values: list[Any]) -> Any:
            found = evaluate(self._closed, jax.tree.leaves(values))
            parts, written = jax.tree.unflatten(self._structure, found)
            arrays = [
                array
                for part, form, gone, some in zip(parts, forms, missing, both, strict=True)
                if some
                for array in (map(zeros_of, form) if gone else part)
            ]
            return arrays, written

        return run
