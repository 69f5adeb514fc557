"""Cutting a traced model into the pieces that stages of a pipeline compute.

The equations between two boundaries are a piece. Three kinds of equation move from where they were
traced to where they are used, so that nothing is kept or sent needlessly:

* what depends on parameters alone (a cast, a transposed weight) is computed in each piece that uses it,
* what depends on the batch alone and is used in one later piece (labels made one-hot) goes there,
  unless a boundary names it,
* the marks of the boundaries themselves vanish: what they mark is passed on unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from tailrace.errors import PipelineError
from tailrace.jaxprs import stretches
from tailrace.jaxprs.control import jit_of, programs_in
from tailrace.jaxprs.internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    bind_again,
    form_of,
    variables,
)
from tailrace.jaxprs.operations import name_of
from tailrace.jaxprs.own_equations import ambient_in, has_role, is_mark, named_for_stage, tag_in
from tailrace.jaxprs.stretches import Emit, live_ins, run
from tailrace.pipeline.boundary import BESIDE, ROLE

Region = tuple[int, int]
"""A stage, and a member of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """The forward computation of one member of a stage, for one microbatch.

    Attributes:
        stage: the index of the stage.
        member: the index of the member in a group of concurrent stages; otherwise 0.
        equations: in order; their operands are free of boundaries.
        inputs: its live-ins.
        outputs: its live-outs.
    """

    stage: int
    member: int
    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]

    def run(
        self, inputs: Sequence[Any], consts: dict[Any, Any], emit: Emit = bind_again
    ) -> dict[Any, Any]:
        """Emit the piece on values for its inputs; all variables it makes, by variable."""
        known = {**consts, **dict(zip(self.inputs, inputs, strict=True))}
        run(self.equations, known, emit)
        return known


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A model in pieces, in the order in which they run.

    Attributes:
        pieces: members of one stage follow each other.
        invars: the variables of the whole model's inputs.
        outvars: the variables (or literals) of its outputs.
        consts: values of variables that are constants.
        parameters: those of the inputs that are parameters.
        state: those that are model state.
        everywhere: the inputs that every unit can read: parameters, the element, and values that are
            equal for all.
    """

    pieces: tuple[Piece, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Any, ...]
    consts: dict[Any, Any]
    parameters: tuple[Var, ...]
    state: tuple[Var, ...]
    everywhere: frozenset[Var]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of members of each stage."""
        stages = [piece.stage for piece in self.pieces]
        return tuple(stages.count(stage) for stage in dict.fromkeys(stages))


def cut_function(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Cut, Any]:
    """Trace `function(params, model_state, batch, inputs)` on the forms of `args`, and cut it.

    Returns:
        The pieces, and the structure of the function's result.
    """
    # `args` may be tracers of the surrounding step. Traced on their forms, the model is a program
    # of its own, and a tracer among its constants is a value that it closes over (`Model.trace`
    # refuses it).
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*forms)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    everywhere = range(counts[0] + counts[1], sum(counts))
    return cut(closed, counts[0], everywhere), jax.tree.structure(shape)


def cut(closed: ClosedJaxpr, parameters: int, batch: range) -> Cut:
    """Cut a traced model at its boundaries.

    Args:
        closed: the model, forward.
        parameters: the number of its inputs, from the first, that are parameters.
        batch: the inputs that every stage has: the element, and values that are equal for all.
    """
    closed = opened(closed)
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    regions, equations, outvars, passed, order = _regions(jaxpr)
    anywhere = frozenset(jaxpr.invars[i] for i in batch)
    fixed = {*jaxpr.invars[:parameters], *consts}
    homes = _homes(
        equations, regions, {*variables(outvars), *passed}, fixed, anywhere | set(consts)
    )
    # An equation may have several homes, so a value may be made in several pieces.
    made_in = {var: home for eqn, home in zip(equations, homes, strict=True) for var in eqn.outvars}
    used_in: dict[Any, set[Region]] = {}
    for eqn, home in zip(equations, homes, strict=True):
        for var in variables(eqn.invars):
            used_in.setdefault(var, set()).update(home)
    results = set(variables(outvars))
    pieces = []
    for region in order:
        own = [
            # Each piece has a gradient of its own of a value that several of them compute.
            named_for_stage(eqn, region[0]) if len(home) > 1 else eqn
            for eqn, home in zip(equations, homes, strict=True)
            if region in home
        ]
        inputs = tuple(var for var in live_ins(own) if var not in consts)
        # Members of a group run in the same tick: no message could bring the value in time.
        _check_beside(region, inputs, made_in)

        def leaves(var: Var, region: Region = region) -> bool:
            """Whether a value of this piece is used by another piece, or is a result of the model."""
            made = made_in[var]
            # A value that every user computes for itself is not an output of any piece. As a result of
            # the model, it is the output of the first piece that computes it.
            if var in results and region == min(made, key=order.index):
                return True
            return any(region not in made or user not in made for user in used_in.get(var, ()))

        outputs = tuple(filter(leaves, stretches.made_by(own)))
        pieces.append(Piece(*region, tuple(own), inputs, outputs))
    invars = tuple(jaxpr.invars)
    return Cut(
        pieces=tuple(pieces),
        invars=invars,
        outvars=tuple(outvars),
        consts=consts,
        parameters=invars[:parameters],
        state=invars[parameters : batch.start],
        everywhere=anywhere.union(invars[:parameters]),
    )


def _check_beside(region: Region, inputs: Sequence[Any], made_in: dict[Any, set[Region]]) -> None:
    for var in inputs:
        for stage, member in made_in.get(var, ()):
            if stage == region[0] and member != region[1]:
                raise PipelineError(
                    f"Concurrent stages do not see each other's values. In stage {stage}, member "
                    f"{region[1]} uses {var.aval.str_short()} of member {member}; the loss counts as "
                    f"part of the last stage. Put a stage behind the group that takes both."
                )


def opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with every `jit` that contains a boundary inlined."""
    # Inlining traces the whole model again. A boundary is usually at the top, and then this is not
    # needed.
    if not any(_holds_boundary(eqn) for eqn in closed.jaxpr.eqns):
        return closed

    def opens(eqn: JaxprEqn) -> bool:
        if not _holds_boundary(eqn):
            return False
        if jit_of(eqn) is None:
            raise PipelineError(
                f"A tr.stage_boundary is inside {name_of(eqn)!r}, where a model cannot "
                f"be cut. Move it out of the loop, branch or recomputation, to the top of the "
                f"model."
            )
        return True

    return stretches.opened(closed, [form_of(var, weak=True) for var in closed.jaxpr.invars], opens)


def _holds_boundary(eqn: JaxprEqn) -> bool:
    return any(
        _is_boundary(inner_eqn) or _holds_boundary(inner_eqn)
        for inner in programs_in(eqn)
        for inner_eqn in inner.eqns
    )


def _is_boundary(eqn: JaxprEqn) -> bool:
    return has_role(eqn, ROLE)


def _regions(
    jaxpr: Jaxpr,
) -> tuple[list[Region], list[JaxprEqn], list[Any], set[Any], list[Region]]:
    """(stage, member) of each equation, the equations without boundaries, outputs, what is passed.

    Last, all regions: a stage that only passes values on has no equation.
    """
    # A boundary is an identity: after it, the value keeps its variable.
    same: dict[Any, Any] = {}
    passed: set[Any] = set()
    stage = member = 0
    regions, equations, order = [], [], [(0, 0)]
    # The order of the trace decides: an equation belongs to the stage whose boundary was traced
    # last, even if all its operands are of an earlier one. `_homes` moves what can be computed
    # elsewhere.
    for eqn in jaxpr.eqns:
        if (tag := tag_in(eqn)) is not None and tag.role == ROLE:
            beside = tag.payload == BESIDE
            stage, member = (stage, member + 1) if beside else (stage + 1, 0)
            order.append((stage, member))
            same.update(
                (out, same.get(var, var) if isinstance(var, Var) else var)
                for out, var in zip(eqn.outvars, eqn.invars, strict=True)
            )
            # Claimed by the stage before the boundary: a loose equation that makes one is not moved.
            passed.update(same[out] for out in eqn.outvars if isinstance(same[out], Var))
            continue
        invars = [same.get(var, var) if isinstance(var, Var) else var for var in eqn.invars]
        equations.append(eqn.replace(invars=invars))
        regions.append((stage, member))
    outvars = [same.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars]
    return regions, equations, outvars, passed, order


def _homes(
    equations: Sequence[JaxprEqn],
    regions: Sequence[Region],
    claimed: set[Any],
    fixed: set[Any],
    anywhere: Collection[Any],
) -> list[set[Region]]:
    """The regions in which each equation is computed; equations of `claimed` values are not moved."""
    # Light: depends on parameters alone, so each piece that uses it can compute it. Loose: depends
    # on the element alone, so the one piece that uses it can compute it instead. An equation that
    # has effects, sends a value out or draws a key stays where it was traced. One that names a value
    # goes with it: a tap must not decide what is computed where.
    light, loose = set(fixed), set(anywhere)
    is_light, is_loose = [], []
    for eqn in equations:
        sends = is_mark(eqn) and not has_role(eqn, "value")
        quiet = not eqn.effects and not sends and ambient_in(eqn) is None
        operands = variables(eqn.invars)
        is_light.append(quiet and all(var in light for var in operands))
        is_loose.append(quiet and all(var in loose for var in operands))
        if is_light[-1]:
            light.update(eqn.outvars)
        if is_loose[-1]:
            loose.update(eqn.outvars)
    # Backwards, so that all users of a value have their homes before the value gets its own: chains of
    # light or loose equations move together.
    users: dict[Any, set[Region]] = {}
    homes: list[set[Region]] = [set() for _ in equations]
    for index in reversed(range(len(equations))):
        eqn, own = equations[index], regions[index]
        used = set().union(*(users.get(var, set()) for var in eqn.outvars))
        if any(var in claimed for var in eqn.outvars) and not is_light[index]:
            used = used | {own}
        # A loose equation with several users stays: moved, it would run in each of them.
        moves = is_light[index] or (is_loose[index] and own not in used and len(used) == 1)
        # Without a user (a result of the model that depends on parameters alone) it stays.
        homes[index] = set(used) if moves and used else {own}
        for var in variables(eqn.invars):
            users.setdefault(var, set()).update(homes[index])
    return homes
