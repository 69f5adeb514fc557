"""Which parameters a loss depends on, in a way that has a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from tailrace.jaxprs import internals


def inputs_with_gradient(jaxpr: Any, results: Iterable[Any]) -> set[Any]:
    """The inputs of a program from which a differentiable path leads to one of its `results`.

    As in PyTorch, `detach` and integers end a path, and a derivative that is zero does not. Programs
    inside of an equation other than a plain call count as paths from all inputs to all outputs.
    """
    wanted = set(internals.variables(results))
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name == "stop_gradient" or wanted.isdisjoint(eqn.outvars):
            continue
        sources = list(eqn.invars)
        call = internals.contents(eqn) if eqn.primitive is internals.primitives.jit_p else None
        if call is not None:
            inner = call[1]
            pairs = zip(inner.outvars, eqn.outvars, strict=True)
            reached = inputs_with_gradient(inner, [one for one, out in pairs if out in wanted])
            pairs = zip(inner.invars, eqn.invars, strict=True)
            sources = [var for one, var in pairs if one in reached]
        floats = (v for v in internals.variables(sources) if jnp.issubdtype(_dtype(v), jnp.inexact))
        wanted.update(floats)
    return wanted.intersection(jaxpr.invars)


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", bool)  # tokens have none
