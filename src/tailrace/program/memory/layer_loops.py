"""Loops over layers whose backward pass finds what they carried in the host's memory.

`lax.scan` over stacked layers keeps, for its backward pass, what each pass needs. Here it keeps what
it carries from pass to pass, in the host's memory, and computes each pass again. JAX has a policy for
that, and inside a loop XLA keeps to the order it is written in.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import JaxprEqn, primitives
from tailrace.program.memory.host_memory import HOST_MEMORY, NO_MOVES, Moves
from tailrace.program.memory.offload_segments import is_float, nbytes, run

_CARRIED = "tailrace_carried"


def carried(eqn: JaxprEqn, least: int) -> list[int]:
    """Which of the values that a loop carries have so many bytes; none if it is no loop."""
    if eqn.primitive is not primitives.scan_p or eqn.params["length"] < 2:
        return []
    return [
        place for place, form in enumerate(_forms(eqn)) if is_float(form) and nbytes(form) >= least
    ]


def carried_bytes(eqn: JaxprEqn, least: int) -> int:
    """The bytes of such values, of all passes."""
    forms = _forms(eqn) if (chosen := carried(eqn, least)) else []
    return sum(nbytes(forms[place]) * eqn.params["length"] for place in chosen)


def emit(eqn: JaxprEqn, inputs: list[Any], least: int, moves: Moves) -> list[Any]:
    """Emit an equation; if it is a loop that carries large values, so that the host has them."""
    chosen = carried(eqn, least)
    if not chosen:
        return internals.bind_again(eqn, inputs)
    body, (consts, count) = eqn.params["jaxpr"], internals.scan_sizes(eqn)

    def one(carry: list[Any], x: list[Any]) -> Any:
        named = [
            checkpoint_name(value, _CARRIED) if place in chosen else value
            for place, value in enumerate(carry)
        ]
        known = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        known.update(zip(body.jaxpr.invars, [*inputs[:consts], *named, *x], strict=True))
        run(body.jaxpr.eqns, known)
        out = [internals.value_of(known, var) for var in body.jaxpr.outvars]
        return out[:count], out[count:]

    carry, stacked = lax.scan(
        jax.checkpoint(one, policy=_policy(moves), prevent_cse=False),
        inputs[consts : consts + count],
        inputs[consts + count :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]


def _forms(eqn: JaxprEqn) -> list[Any]:
    """The forms of what a loop carries."""
    consts, count = internals.scan_sizes(eqn)
    return [var.aval for var in eqn.params["jaxpr"].jaxpr.invars[consts : consts + count]]


def _policy(moves: Moves) -> Any:
    policies = jax.checkpoint_policies
    if moves is NO_MOVES:
        return policies.save_only_these_names(_CARRIED)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_CARRIED],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
