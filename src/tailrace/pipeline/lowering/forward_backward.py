"""Making stages: the forward and the backward of each piece of a model, as two programs.

In: a `Cut`, the variable of the loss, and whether stages recompute.
Out: `Stages`. Each piece is differentiated alone, once.

Besides the piece's results, the forward returns what its backward needs (the residuals), except what
is cheaper to recompute (`residuals.py`). An input of the piece, such as a parameter, is not returned:
the backward reads it directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tailrace.base.trees import Tree, TreeDef
from tailrace.errors import PipelineError
from tailrace.jaxprs import internals
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.internals import ClosedJaxpr, Var, form_of
from tailrace.jaxprs.operations import checkpoint_of
from tailrace.jaxprs.stretches import computed_from, made_by, opened, stretches, useful_for
from tailrace.pipeline.lowering.cut import Cut, Piece
from tailrace.pipeline.lowering.loop_residuals import emit_lean, has_loop
from tailrace.pipeline.lowering.residuals import Selection, reading, select
from tailrace.pipeline.lowering.stage import Residual, Stage, Stages

_CHECKPOINT = "tailrace_checkpoint"

RECOMPUTE = (False, True, "then", "interleaved")


def recomputation_checkpoint(values: Tree) -> Tree:
    """Keep these values for the backward pass when a pipeline recomputes its stages.

    What follows is recomputed from here, and not from the inputs of the stage. Outside of such a
    pipeline it is a no-op.

    Args:
        values: a tree of arrays.

    Raises:
        PipelineError: there is something else in it.

    >>> import tailrace as tr
    >>> import jax.numpy as jnp
    >>> float(tr.recomputation_checkpoint(jnp.float32(2.0)))
    2.0
    """
    check_arrays("tr.recomputation_checkpoint takes", values, error=PipelineError)
    return jax.tree.map(lambda value: checkpoint_name(value, _CHECKPOINT), values)


def training_stages(cut: Cut, structure: TreeDef, recompute: bool | str) -> Stages:
    """The stages of a model whose results are loss, next model state and aux."""
    loss = cut.outvars[0]
    if not isinstance(loss, Var):
        raise PipelineError(
            "The loss of a pipeline is computed by its last stage, not constant. Received: a "
            "constant. Return a loss that depends on what the last stage gets."
        )
    equations = [eqn for piece in cut.pieces for eqn in piece.equations]
    active = computed_from(equations, cut.parameters)
    if loss not in active:
        raise PipelineError(
            "The loss of a pipeline depends on its parameters. This one does not: check that the "
            "last stage's outputs reach the loss."
        )
    # Gradients flow through values that depend on parameters and that the loss depends on. Nothing
    # else is differentiated: a stage without such values has no backward.
    both = active & useful_for(equations, [loss])
    each = tuple(_stage(piece, cut, both, recompute) for piece in cut.pieces)
    _, after, _ = jax.tree.unflatten(structure, cut.outvars)
    after = tuple(jax.tree.leaves(after))
    return Stages(each, cut.invars, cut.outvars, structure, cut.state, after, cut.consts)


def forward_stages(cut: Cut, structure: TreeDef, advances: bool) -> Stages:
    """The stages of a model that is not trained: no backwards, no residuals.

    With `advances`, its results are those of an element and the next model state.
    """
    each = tuple(_stage(piece, cut, set(), False) for piece in cut.pieces)
    after: tuple[Any, ...] = ()
    if advances:
        after = tuple(jax.tree.leaves(jax.tree.unflatten(structure, cut.outvars)[1]))
    return Stages(each, cut.invars, cut.outvars, structure, cut.state, after, cut.consts)


def _stage(piece: Piece, cut: Cut, differentiable: set[Any], recompute: bool | str) -> Stage:
    wants = tuple(v for v in piece.inputs if v in differentiable)
    sends = tuple(v for v in piece.outputs if v in differentiable)
    # No value with a gradient enters the piece, or none leaves it: it only runs forward, and
    # nothing is stashed for it.
    if not wants or not sends:
        forms = [form_of(v) for v in piece.inputs]
        closed = jax.make_jaxpr(lambda *ins: _outputs(piece, cut, ins))(*forms)
        return Stage(piece.stage, piece.member, piece.inputs, piece.outputs, closed)
    stage = _differentiated(piece, cut, wants, sends, _recomputing(piece, recompute))
    if recompute is not False or not any(map(has_loop, piece.equations)):
        return stage
    lean = functools.partial(piece.run, emit=emit_lean)
    # Inside loops costs are not compared: a loop is left unchanged if keeping only expensive values
    # takes more memory.
    other = _differentiated(piece, cut, wants, sends, lean)
    return min(stage, other, key=lambda each: each.stashed(cut.everywhere))


def _differentiated(
    piece: Piece,
    cut: Cut,
    wants: tuple[Var, ...],
    sends: tuple[Var, ...],
    compute: Callable[..., dict[Any, Any]],
) -> Stage:
    """A piece that `compute` runs, differentiated, with the values to keep."""
    closed, back, residuals = _traced_apart(piece, cut, wants, sends, compute)
    # Dead residuals are dropped; the gradients of `sends` are kept, in order.
    keep = [False] * len(residuals) + [True] * len(sends)
    back, needed = internals.without_dead_code(back, [True] * len(wants), keep)
    needed = [var for var, used in zip(residuals, needed, strict=False) if used]
    inputs = list(zip(piece.inputs, closed.jaxpr.invars, strict=True))
    fixed = [var for outer, var in inputs if outer in cut.parameters]
    free = [var for outer, var in inputs if outer in cut.everywhere]
    chosen = select(closed, needed, fixed, free)
    outputs, places = _placed(closed, chosen, len(piece.outputs))
    numbers = {var: i for i, var in enumerate(cut.parameters)}
    return Stage(
        piece.stage,
        piece.member,
        piece.inputs,
        piece.outputs,
        ClosedJaxpr(closed.jaxpr.replace(outvars=outputs), closed.consts),
        reading(closed, back, chosen),
        places,
        sends,
        wants,
        tuple(numbers[v] for v in wants if v in numbers),
    )


def _traced_apart(
    piece: Piece,
    cut: Cut,
    wants: tuple[Var, ...],
    sends: tuple[Var, ...],
    compute: Callable[..., dict[Any, Any]],
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[Any]]:
    """The forward, the backward, and the forward's variables that JAX would keep for the backward."""
    forms = [form_of(v) for v in piece.inputs]
    structure: list[Any] = []

    def forward(*inputs: jax.Array) -> list[Any]:
        given = dict(zip(piece.inputs, inputs, strict=True))

        def run(*differentiated: jax.Array) -> Any:
            values = {**given, **dict(zip(wants, differentiated, strict=True))}
            made = compute([values[v] for v in piece.inputs], cut.consts)
            return [made[v] for v in sends], [made[v] for v in piece.outputs]

        # `pull` is a tree of arrays: its leaves are what JAX would keep. The forward returns them
        # as results, and the backward rebuilds the tree.
        _, pull, outputs = jax.vjp(run, *(given[v] for v in wants), has_aux=True)
        residuals, form = jax.tree.flatten(pull)
        # A tree structure is not an array, so a traced function cannot return it.
        structure[:] = [form]
        return [*outputs, *residuals]

    # With calls inlined: `select` weighs single operations, also those inside a layer's `jit`.
    closed = opened(jax.make_jaxpr(forward)(*forms), forms)
    residuals: list[Any] = closed.jaxpr.outvars[len(piece.outputs) :]

    def backward(*operands: jax.Array) -> list[Any]:
        pull = jax.tree.unflatten(structure[0], operands[: len(residuals)])
        return list(pull(list(operands[len(residuals) :])))

    # Traced alone, not in one program with the forward: the two run in different ticks, and what
    # the second takes from the first must be operands.
    back = jax.make_jaxpr(backward)(*map(form_of, [*residuals, *sends]))
    return closed, back, residuals


def _placed(
    closed: ClosedJaxpr, chosen: Selection, results: int
) -> tuple[list[Any], tuple[Residual, ...]]:
    """The outputs of a forward that returns the values to keep too, and the place of each of these.

    A kept value that is already an input or one of the `results` is not returned again.
    """
    outputs: list[Any] = list(closed.jaxpr.outvars[:results])
    # A result that is only named by a mark is the value that was marked: it is not kept twice.
    places = {
        chosen.unmarked.get(v, v): Residual("output", i)
        for i, v in enumerate(outputs)
        if isinstance(v, Var)
    }
    # After the outputs, so that an input wins where the forward returns it too: parameters and the
    # element are readable in the backward's tick, and take no slot of the stash.
    places.update((v, Residual("input", i)) for i, v in enumerate(closed.jaxpr.invars))
    for var in chosen.kept:
        if var not in places:
            places[var] = Residual("output", len(outputs))
            outputs.append(var)
    return outputs, tuple(places[var] for var in chosen.kept)


def _outputs(piece: Piece, cut: Cut, inputs: Sequence[Any]) -> list[Any]:
    made = piece.run(inputs, cut.consts)
    return [made[v] for v in piece.outputs]


def _recomputing(piece: Piece, recompute: bool | str) -> Callable[..., dict[Any, Any]]:
    """How a piece is run: unchanged, or so that its backward recomputes it."""
    if recompute is False:
        return piece.run
    policy = jax.checkpoint_policies.save_only_these_names(_CHECKPOINT)
    # Several `jax.checkpoint`s in sequence are recomputed one at a time, from the last to the
    # first: the backward holds the values of one part, not of the whole stage.
    parts = _at_checkpoints(piece) if recompute == "interleaved" else [piece]

    def run(inputs: Sequence[Any], consts: dict[Any, Any]) -> dict[Any, Any]:
        known = dict(zip(piece.inputs, inputs, strict=True))
        for part in parts:
            # The part as a default: a closure would see only the last one of the loop.
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
    # Constants of the model are known everywhere and are not inputs.
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
