"""The one place that touches JAX below its public surface, and the only one with version branches.

Supported: jax 0.10.1 (Python 3.11) and 0.11.x. Everything here comes from `jax.extend` and
`jax.interpreters`, which promise less than `jax` itself: when a new JAX release breaks us, it breaks
here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, primitives
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "ad",
    "batching",
    "bind_again",
    "define_marker",
    "equation_context",
    "inner_jaxprs",
    "name_stack_of",
    "primitives",
]


def define_marker(name: str) -> Primitive:
    """A primitive that returns its operands unchanged and is never removed as dead code.

    The derivative rules are the caller's to add; everything else (evaluation, lowering, batching,
    keeping it alive) is the same for every marker.
    """
    marker = Primitive(name)
    marker.multiple_results = True
    marker.def_impl(lambda *values, **_: list(values))
    marker.def_abstract_eval(lambda *avals, **_: list(avals))
    mlir.register_lowering(marker, lambda _context, *values, **__: list(values))
    batching.primitive_batchers[marker] = lambda values, dims, **params: (
        marker.bind(*values, **params),
        dims,
    )
    # A mark whose result nobody uses must survive: it says "show this", not "compute with this".
    pe.dce_rules[marker] = lambda used, eqn: ([True] * len(eqn.invars), eqn)
    return marker


def bind_again(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Emit `eqn` once more, on other inputs, under whatever trace is current."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Until 0.10.1 a pair (functions, params); a bare dict of params in between.
    functions, params = bound if isinstance(bound, tuple) else ([], bound)
    out = eqn.primitive.bind(*functions, *inputs, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def equation_context(eqn: JaxprEqn, prefix: Any = None) -> AbstractContextManager[Any]:
    """What is emitted inside carries the equation's own name stack and user traceback."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def name_stack_of(eqn: JaxprEqn) -> str:
    """The scopes that an equation was traced in, outermost first, separated by slashes."""
    return str(eqn.source_info.name_stack)


def inner_jaxprs(eqn: JaxprEqn) -> list[tuple[str, int, Jaxpr, tuple[Any, ...]]]:
    """The programs inside an equation: (parameter, position in it, jaxpr, constants)."""
    found = []
    for key, value in eqn.params.items():
        for position, item in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if isinstance(item, ClosedJaxpr):
                found.append((key, position, item.jaxpr, tuple(item.consts)))
            elif isinstance(item, Jaxpr):
                found.append((key, position, item, ()))
    return found


def user_frame(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that an equation comes from, or an empty string."""
    return source_info_util.summarize(eqn.source_info)


def version() -> tuple[int, ...]:
    """The version of JAX as numbers."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
