"""The forward and the backward of each piece of a model, as two programs.

The forward returns, besides what the piece makes, what its backward needs of it (the residuals), as
far as that is not cheaper to compute again (`residuals.py`). What merely is an input of the piece, such
as a parameter, is not returned: the backward reads it from where it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tailrace.errors import PipelineError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ClosedJaxpr, Var, nbytes
from tailrace.jaxprs.marks import unit
from tailrace.jaxprs.operations import checkpoint_of
from tailrace.jaxprs.stretches import computed_from, made_by, opened, stretches, useful_for
from tailrace.pipeline.lowering.cut import Cut, Piece
from tailrace.pipeline.lowering.loop_residuals import emit_lean, has_loop
from tailrace.pipeline.lowering.residuals import reading, select

_CHECKPOINT = "tailrace_checkpoint"

RECOMPUTE = (False, True, "then", "interleaved")


def recomputation_checkpoint(values: Any) -> Any:
    """Keep these values for the backward when a pipeline recomputes its stages.

    What follows is recomputed from here, and not from the inputs of the stage. Elsewhere it returns
    its values and does nothing.

    >>> import jax.numpy as jnp
    >>> float(recomputation_checkpoint(jnp.float32(2.0)))
    2.0
    """
    return jax.tree.map(lambda value: checkpoint_name(value, _CHECKPOINT), values)


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """A piece as two programs.

    Attributes:
        piece: what is computed.
        forward: takes the piece's inputs; returns its outputs, then the residuals.
        backward: takes residuals, then the gradients of `sends`; returns those of `wants`. None if
            nothing in the piece has a gradient.
        kept: for each operand of the backward that is a residual: ("input" or "output" of the
            forward, its index).
        sends: outputs of the piece through which gradients come back.
        wants: inputs of the piece whose gradients are computed.
    """

    piece: Piece
    forward: ClosedJaxpr
    backward: ClosedJaxpr | None
    kept: tuple[tuple[str, int], ...]
    sends: tuple[Var, ...]
    wants: tuple[Var, ...]

    def stashed(self, cut: Cut) -> int:
        """The bytes that a microbatch leaves for the backward."""
        made = {i for where, i in self.kept if where == "output"}
        given = {self.piece.inputs[i] for where, i in self.kept if where == "input"}
        variables = [self.forward.jaxpr.outvars[i] for i in made]
        variables += [var for var in given if var not in cut.everywhere]
        return sum(nbytes(var.aval) for var in variables)


def halve(cut: Cut, parameters: int, loss: Any, recompute: bool | str) -> tuple[Halves, ...]:
    """The halves of every piece of a model whose first inputs are parameters."""
    equations = [eqn for piece in cut.pieces for eqn in piece.equations]
    active = computed_from(equations, cut.invars[:parameters])
    if loss not in active:
        raise PipelineError(
            "The loss of a pipeline depends on its parameters. This one does not: check that the "
            "last stage's outputs reach the loss."
        )
    both = active & useful_for(equations, [loss])
    return tuple(_halve(piece, cut, both, recompute) for piece in cut.pieces)


def only_forward(cut: Cut) -> tuple[Halves, ...]:
    """The forward of every piece, for a pipeline that has no backward."""
    return tuple(_halve(piece, cut, set(), False) for piece in cut.pieces)


def _halve(piece: Piece, cut: Cut, differentiable: set[Any], recompute: bool | str) -> Halves:
    wants = tuple(v for v in piece.inputs if v in differentiable)
    sends = tuple(v for v in piece.outputs if v in differentiable)
    if not wants or not sends:
        forms = [_form(v) for v in piece.inputs]
        closed = jax.make_jaxpr(lambda *ins: _outputs(piece, cut, ins))(*forms)
        return Halves(piece, closed, None, (), (), ())
    run = _recomputing(piece, recompute)
    halves = _differentiated(piece, cut, wants, sends, run)
    if recompute is not False or not any(map(has_loop, piece.equations)):
        return halves
    lean = functools.partial(piece.run, emit=emit_lean)
    # In loops nothing is weighed: where keeping what is expensive takes more, they stay as they are.
    others = _differentiated(piece, cut, wants, sends, lean)
    return min(halves, others, key=lambda each: each.stashed(cut))


def _differentiated(
    piece: Piece,
    cut: Cut,
    wants: tuple[Var, ...],
    sends: tuple[Var, ...],
    compute: Callable[..., dict[Any, Any]],
) -> Halves:
    """A piece that `compute` runs, and what is kept of it."""
    forms = [_form(v) for v in piece.inputs]
    structure: list[Any] = []

    def forward(*inputs: Any) -> list[Any]:
        given = dict(zip(piece.inputs, inputs, strict=True))

        def run(*differentiated: Any) -> Any:
            values = {**given, **dict(zip(wants, differentiated, strict=True))}
            made = compute([values[v] for v in piece.inputs], cut.consts)
            return [made[v] for v in sends], [made[v] for v in piece.outputs]

        _, pull, outputs = jax.vjp(run, *(given[v] for v in wants), has_aux=True)
        residuals, form = jax.tree.flatten(pull)
        structure[:] = [form]
        return [*outputs, *residuals]

    closed = opened(jax.make_jaxpr(forward)(*forms), forms)
    residuals: list[Any] = closed.jaxpr.outvars[len(piece.outputs) :]

    def backward(*operands: Any) -> list[Any]:
        pull = jax.tree.unflatten(structure[0], operands[: len(residuals)])
        return list(pull(list(operands[len(residuals) :])))

    back = jax.make_jaxpr(backward)(*map(_form, [*residuals, *sends]))
    # Residuals that turn out to be dead are dropped; the gradients of `sends` stay, in their places.
    keep = [False] * len(residuals) + [True] * len(sends)
    back, needed = internals.without_dead_code(back, [True] * len(wants), keep)
    needed = [var for var, used in zip(residuals, needed, strict=False) if used]
    inputs = list(zip(piece.inputs, closed.jaxpr.invars, strict=True))
    fixed = [var for outer, var in inputs if outer in cut.parameters]
    free = [var for outer, var in inputs if outer in cut.everywhere]
    chosen = select(closed, needed, fixed, free)
    back = reading(closed, back, chosen)
    outputs: list[Any] = list(closed.jaxpr.outvars[: len(piece.outputs)])
    places: dict[Any, tuple[str, int]] = {}
    for where, variables in (("output", outputs), ("input", closed.jaxpr.invars)):
        places.update((v, (where, i)) for i, v in enumerate(variables) if isinstance(v, Var))
    for var in chosen.kept:
        if var not in places:
            places[var] = ("output", len(outputs))
            outputs.append(var)
    kept = tuple(places[var] for var in chosen.kept)
    return Halves(piece, _with_outputs(closed, outputs), back, kept, sends, wants)


def _outputs(piece: Piece, cut: Cut, inputs: Sequence[Any]) -> list[Any]:
    made = piece.run(inputs, cut.consts)
    return [made[v] for v in piece.outputs]


def _recomputing(piece: Piece, recompute: bool | str) -> Callable[..., dict[Any, Any]]:
    """How a piece is run: as it is, or so that its backward computes it once more."""
    if recompute is False:
        return piece.run
    policy = jax.checkpoint_policies.save_only_these_names(_CHECKPOINT)
    parts = _at_checkpoints(piece) if recompute == "interleaved" else [piece]

    def run(inputs: Sequence[Any], consts: dict[Any, Any]) -> dict[Any, Any]:
        known = dict(zip(piece.inputs, inputs, strict=True))
        for part in parts:

            def once(values: Sequence[Any], part: Piece = part) -> list[Any]:
                made = part.run(values, consts)
                return [made[v] for v in part.outputs]

            out = jax.checkpoint(once, policy=policy)([known[v] for v in part.inputs])
            known.update(zip(part.outputs, out, strict=True))
        return known

    return run


def _at_checkpoints(piece: Piece) -> list[Piece]:
    """A piece, cut into pieces that end at checkpoints."""
    groups: list[list[Any]] = [[]]
    for eqn in piece.equations:
        groups[-1].append(eqn)
        if checkpoint_of(eqn) == _CHECKPOINT:
            groups.append([])
    # Constants of the model are known to all, and read by none.
    inside = {*made_by(piece.equations), *piece.inputs}
    return [
        Piece(
            piece.stage,
            piece.member,
            part.equations,
            tuple(v for v in part.reads if v in inside),
            part.makes,
        )
        for part in stretches([group for group in groups if group], piece.outputs)
    ]


def call_forward(halves: Halves, values: dict[Any, Any]) -> list[Any]:
    """Emit the forward as a unit; adds its outputs to `values`, returns the residuals it keeps."""
    piece = halves.piece
    inputs = [values[v] for v in piece.inputs]
    outputs = unit(halves.forward, inputs, "F", piece.stage, piece.member)
    values.update(zip(piece.outputs, outputs, strict=False))
    return [(inputs if where == "input" else outputs)[i] for where, i in halves.kept]


def call_backward(
    halves: Halves, residuals: Sequence[Any], gradients: dict[Any, Any]
) -> dict[Any, Any]:
    """Emit the backward as a unit; the gradients of what the piece wants, by variable."""
    assert halves.backward is not None
    piece = halves.piece
    back = [
        gradients[v] if v in gradients else jnp.zeros(*_shape_and_dtype(v)) for v in halves.sends
    ]
    outputs = unit(halves.backward, [*residuals, *back], "B", piece.stage, piece.member)
    return dict(zip(halves.wants, outputs, strict=True))


def _with_outputs(closed: ClosedJaxpr, outputs: Sequence[Any]) -> ClosedJaxpr:
    return ClosedJaxpr(closed.jaxpr.replace(outvars=list(outputs)), closed.consts)


def _shape_and_dtype(var: Any) -> tuple[Any, Any]:
    return var.aval.shape, var.aval.dtype


def _form(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
