"""Traces a function into a program, and checks rules that concern the whole program."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from tailrace.base.spans.scopes import LOSS_AGAIN
from tailrace.errors import FeedError, ProgramError
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue, OutfeedTarget
from tailrace.jaxprs import internals, jax_seams
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.control import jit_of, scan_of
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn
from tailrace.jaxprs.marks import FORWARD, ProgramTrace, path_name, tracing
from tailrace.jaxprs.own_equations import ambient_in, is_dequeue, tag_in
from tailrace.jaxprs.walk import BRANCH, LOOP, Place, elements_read, loop_tag, tag_of, walk
from tailrace.taps.frame import Emission


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A use of an outfeed in a program: the shapes of an element and the loops around it."""

    queue: OutfeedQueue
    structure: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    loops: int
    at_top: bool


@dataclasses.dataclass(eq=False)
class Traced:
    """A traced function: its equations, its feeds, the shapes of its arguments and results."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    in_structure: Any
    out_structure: Any
    out_names: tuple[str, ...]
    replicas: int
    infeeds: tuple[Feed, ...] = ()
    outfeeds: dict[OutfeedQueue, Outgoing] = dataclasses.field(default_factory=dict)

    def deliver(self, emitted: Mapping[Hashable, Emission]) -> None:
        """Pass the emissions of one dispatch to their outfeeds."""
        for queue, out in self.outfeeds.items():
            if queue in emitted:
                value, valid = emitted[queue]
                queue.deliver(out.structure, list(value), valid, out.loops, self.replicas)


def trace_program(function: Callable[..., Any], args: Sequence[Any], replicas: int = 1) -> Traced:
    """Trace `function(*args)` into a program and check its feeds."""
    # Here, because every program passes here: a JAX that behaves differently is an error, not a
    # wrong result.
    jax_seams.check()
    check_arrays("A program takes", tuple(args), convertible=False)
    with_paths, in_structure = jax.tree_util.tree_flatten_with_path(tuple(args))
    context = ProgramTrace(replicas=replicas)
    out_form: list[Any] = []

    def flat(*leaves: jax.Array) -> list[Any]:
        with tracing(context):
            out = function(*jax.tree.unflatten(in_structure, leaves))
        check_arrays("A program returns", out, convertible=False)
        out_paths, structure = jax.tree_util.tree_flatten_with_path(out)
        out_form[:] = [structure, tuple(path_name(path) for path, _ in out_paths)]
        return [leaf for _, leaf in out_paths]

    # Traced on plain shapes: arrays on a mesh would bring the mesh into the program's types.
    closed = jax.make_jaxpr(flat)(*(_shape(leaf) for _, leaf in with_paths))
    jaxpr, consts = _open_outermost_calls(closed.jaxpr, tuple(closed.consts))
    traced = Traced(
        jaxpr,
        consts,
        in_structure,
        out_form[0],
        out_form[1],
        replicas,
    )
    # Walked once for all checks: large programs have tens of thousands of equations.
    places = list(walk(jaxpr.eqns))
    _check_nothing_lost(context, places)
    _check_keys(places)
    traced.infeeds = tuple(elements_read(jaxpr.eqns))
    _check_reads(places)
    _check_accumulation(places)
    traced.outfeeds = _outgoing(places, context)
    return traced


def _shape(leaf: object) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _open_outermost_calls(jaxpr: Jaxpr, consts: tuple[Any, ...]) -> tuple[Jaxpr, tuple[Any, ...]]:
    """Inline a program that is a single `jit` call, so that its loops are at the top."""
    # Users write `tr.compile(jax.jit(f))`. Only a call that passes everything on unchanged can be
    # opened without emitting anything.
    while len(jaxpr.eqns) == 1 and (call := jit_of(jaxpr.eqns[0])) is not None:
        (eqn,) = jaxpr.eqns
        straight = list(eqn.invars) == list(jaxpr.invars) and not jaxpr.constvars
        if not straight or list(eqn.outvars) != list(jaxpr.outvars):
            break
        jaxpr, consts = call.program.jaxpr, call.program.consts
    return jaxpr, consts


def _check_nothing_lost(context: ProgramTrace, places: list[Place]) -> None:
    # Compared with what was called while tracing: JAX drops equations silently, and an element that
    # never arrives would be noticed much later.
    found = {tag.site for place in places if (tag := tag_in(place.equation)) is not None}
    lost = [text for number, text in context.sites.items() if number not in found]
    if lost:
        raise ProgramError(
            f"{lost[0]} is not in the traced program: it is in a function that differentiation "
            f"replaces by another, or in a branch that JAX found out to be never taken. Call it in "
            f"the forward function of its custom derivative, or outside of that function."
        )


def _check_keys(places: list[Place]) -> None:
    seen: set[int] = set()
    for place in places:
        ambient = ambient_in(place.equation)
        if ambient is None or ambient.what != "key":
            continue
        # A recomputation and a backward pass draw the same key as the forward pass, and are meant to.
        scopes = _scopes(place)
        if place.replayed or "transpose(" in scopes or LOSS_AGAIN in scopes:
            continue
        if ambient.call in seen:
            raise ProgramError(
                "tr.key() is called in a jitted function that the step calls more than once. JAX "
                "traces such a function once, so both calls would draw the same numbers. Make the "
                "key outside and pass it in, or remove the inner jax.jit."
            )
        seen.add(ambient.call)


def _scopes(place: Place) -> str:
    return "/".join([*(a.scopes for a in place.inside), internals.name_stack_of(place.equation)])


def _check_reads(places: list[Place]) -> None:
    for place in places:
        if not is_dequeue(place.equation):
            continue
        if any(around.kind == BRANCH for around in place.inside):
            raise ProgramError(
                "A loop with an infeed may not be inside lax.cond or lax.switch: how many "
                "elements an execution reads must be known before it starts. Move the loop out of "
                "the branch, and branch inside its body."
            )
        if any(around.length is None for around in place.loops()):
            raise ProgramError(
                "A loop with an infeed may not be inside a loop whose length only the running "
                "program knows: how many elements an execution reads must be known before it starts. "
                "Give the outer loop an integer length (tr.repeat, lax.scan), or feed it instead: "
                "tr.while_loop with infeed= and maximum_iterations=."
            )


def _check_accumulation(places: list[Place]) -> None:
    for place in places:
        tag = tag_of(place)
        if tag is None or tag.role != "accumulates":
            continue
        count = tag.payload
        loops = [around for around in place.inside if around.kind == LOOP]
        if not loops or loops[-1].length is None:
            raise ProgramError(
                f"Detected a gradient accumulation over {count} microbatches which is not inside a "
                f"training loop. Put it in the body of tr.repeat, with an integer length that is a "
                f"multiple of {count}."
            )
        length = loops[-1].length
        if length % count:
            raise ProgramError(
                f"Detected a gradient accumulation over {count} microbatches inside a loop of "
                f"{length} passes. The length must be a multiple of the count: use "
                f"{length - length % count or count}."
            )


def _outgoing(places: list[Place], context: ProgramTrace) -> dict[OutfeedQueue, Outgoing]:
    found: dict[OutfeedQueue, Outgoing] = {}
    for place in places:
        tag = tag_of(place)
        if tag is None or tag.role != "outfeed" or tag.direction != FORWARD:
            continue
        target: OutfeedTarget = tag.payload
        # The order of two enqueues within a step would be that of the compiled program, which is no
        # order.
        if target.queue in found:
            raise FeedError(
                f"An outfeed can be enqueued once in a program. It is enqueued again: "
                f"{context.sites.get(tag.site, '')}. Send one tree with all values, or use a second "
                f"OutfeedQueue."
            )
        around = place.loops()
        if any(a.length is None for a in around):
            raise FeedError(
                "An outfeed inside a loop whose length only the running program knows needs an "
                "upper bound. Give tr.while_loop maximum_iterations=, or tr.repeat an integer."
            )
        at_top = len(around) == 1 and around[0].kind == LOOP and len(place.inside) == 1
        replica = (context.replicas,) if context.replicas > 1 else ()
        avals: list[Any] = [var.aval for var in place.equation.outvars]
        shapes = tuple(((*replica, *aval.shape), aval.dtype) for aval in avals)
        loops = len(around)
        found[target.queue] = Outgoing(target.queue, target.structure, shapes, loops, at_top)
    return found


def top_loops(traced: Traced) -> list[int]:
    """The indices of a program's top-level `tr.repeat` loops."""
    return [i for i, eqn in enumerate(traced.jaxpr.eqns) if is_repeat(eqn)]


def is_repeat(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `tr.repeat` with a fixed length."""
    scan = scan_of(eqn)
    return scan is not None and loop_tag(scan.body.jaxpr) is not None
