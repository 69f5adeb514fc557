"""Loops over layers that keep only expensive values for their backward, iteration by iteration.

What a `lax.scan` keeps is stacked inside it, where the cut of `residuals.py` cannot reach. So its body
is wrapped in a `jax.checkpoint` with the policy of `residuals.py`: cheap values are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Inner, jit_of, scan_of
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.operations import keeps_expensive
from tailrace.jaxprs.stretches import bound, results_of, run


def has_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop over layers, or a `jit` call with one in it."""
    scan, call = scan_of(eqn), jit_of(eqn)
    if scan is not None:
        return scan.length > 1
    return call is not None and any(map(has_loop, call.program.jaxpr.eqns))


def emit_lean(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Emit an equation; if it is a loop, such that its backward recomputes cheap values."""
    if not has_loop(eqn):
        return internals.bind_again(eqn, inputs)
    if (call := jit_of(eqn)) is not None:  # its contents, to reach the loop inside
        return _contents(call.program, inputs)
    scan = scan_of(eqn)
    assert scan is not None

    def recomputed(one_pass: Callable[..., Any]) -> Callable[..., Any]:
        # Forward and backward are two loops, and XLA does not merge operations of one with those of
        # the other: the barrier that prevents this elsewhere is not needed.
        return jax.checkpoint(one_pass, policy=keeps_expensive, prevent_cse=False)

    return scan.again(lambda values: _contents(scan.body, values), inputs, recomputed)


def _contents(program: Inner, inputs: list[Any]) -> list[Any]:
    known = bound(program.jaxpr, program.consts, inputs)
    run(program.jaxpr.eqns, known, emit_lean)
    return results_of(known, program.jaxpr.outvars)
