"""Loops over layers whose carry is offloaded to host memory for the backward pass.

`lax.scan` over stacked layers keeps the residuals of each iteration for its backward pass. Here it
keeps only the carry of each iteration, in host memory, and recomputes the rest. JAX has a checkpoint
policy for that, and inside a loop XLA keeps the order of the program.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Scan, as_scan, scan_of
from tailrace.jaxprs.internals import JaxprEqn, nbytes
from tailrace.jaxprs.stretches import bound, is_float, results_of, run
from tailrace.program.memory.host_memory import HOST_MEMORY, NO_MOVES, Moves

_CARRIED = "tailrace_carried"


def carried(eqn: JaxprEqn, least: int) -> list[int]:
    """The indices of a loop's carried values of at least `least` bytes; empty if it is not a loop."""
    scan = scan_of(eqn)
    # A loop of one iteration keeps one carry, which is its input: nothing would be saved.
    if scan is None or scan.length < 2:
        return []
    return [
        place
        for place, var in enumerate(_carried_vars(scan))
        if is_float(var) and nbytes(var.aval) >= least
    ]


def carried_bytes(eqn: JaxprEqn, least: int) -> int:
    """The bytes of such values over all iterations."""
    chosen = carried(eqn, least)
    if not chosen:
        return 0
    scan = as_scan(eqn)
    variables = _carried_vars(scan)
    return sum(nbytes(variables[place].aval) * scan.length for place in chosen)


def emit(eqn: JaxprEqn, inputs: list[Any], least: int, moves: Moves) -> list[Any]:
    """Emit an equation; if it is a loop with a large carry, with that carry offloaded."""
    chosen = carried(eqn, least)
    if not chosen:
        return internals.bind_again(eqn, inputs)
    scan = as_scan(eqn)
    program = scan.body

    def body(values: list[Any]) -> list[Any]:
        consts, carry, xs = scan.split(values)
        named = [
            # The policy of a checkpoint knows values by name only.
            checkpoint_name(value, _CARRIED) if place in chosen else value
            for place, value in enumerate(carry)
        ]
        known = bound(program.jaxpr, program.consts, [*consts, *named, *xs])
        run(program.jaxpr.eqns, known)
        return results_of(known, program.jaxpr.outvars)

    def recomputed(one_pass: Callable[..., Any]) -> Callable[..., Any]:
        # Forward and backward are separate loops: XLA cannot merge what one recomputes with the other.
        return jax.checkpoint(one_pass, policy=_policy(moves), prevent_cse=False)

    return scan.again(body, inputs, recomputed)


def _carried_vars(scan: Scan) -> list[Any]:
    """The variables of a loop's carry."""
    return scan.split(scan.body.jaxpr.invars)[1]


def _policy(moves: Moves) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    # On a CPU there is no second memory; the same values are kept, so that tests see the same program.
    if moves is NO_MOVES:
        return policies.save_only_these_names(_CARRIED)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_CARRIED],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
