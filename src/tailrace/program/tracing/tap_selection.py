"""The catalogue of a traced program, and the tensors that taps select from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from tailrace.errors import SelectionError
from tailrace.jaxprs import internals
from tailrace.jaxprs.marks import COTANGENT, Tag
from tailrace.jaxprs.walk import LOOP, SCAN, Place, Position, tag_of, walk
from tailrace.program.tracing.replica_drift import Differing
from tailrace.program.tracing.trace import Traced
from tailrace.taps.catalogue import Catalogue, Entry, matches
from tailrace.taps.probe import COTANGENT_OF
from tailrace.taps.tap import AnyTap, Chosen, choose, common_period, wanted_of
from tailrace.taps.use_order import MADE_FOR_EACH, UseOrder
from tailrace.taps.wanted import Wanted


@dataclasses.dataclass
class Sight:
    """The observed tensors of one program.

    Attributes:
        catalogue: all its tensors.
        chosen: the tensors that taps select.
        period: the number of steps between observations of periodic taps.
    """

    catalogue: Catalogue
    chosen: list[Chosen]
    period: int

    @property
    def wanted(self) -> dict[Position, list[Wanted]]:
        """The values that the rewriter must emit, by position."""
        return wanted_of(self.chosen)


def look(
    traced: Traced,
    taps: Sequence[AnyTap],
    named: Sequence[Entry] = (),
    stage_of: Callable[[Entry], int] = lambda entry: entry.stage,
) -> Sight:
    """Build the catalogue of a program and apply taps to it.

    Args:
        traced: the program; its marks name most tensors.
        taps: the taps.
        named: additional tensors by name. Those that a tap selects are marked in the program already,
            by the function that listed them; the others are only listed.
        stage_of: returns the pipeline stage of a tensor.
    """
    places = {place.position: place for place in walk(traced.jaxpr.eqns)}
    entries: dict[str, Entry] = {}
    marked: list[Entry] = []
    for place in places.values():
        entry, tag = _entry(place), tag_of(place)
        if entry is not None and tag is not None and tag.of_user:
            marked.append(entry)
        elif entry is not None:
            entries.setdefault(entry.name, entry)
    for entry in marked:  # last: a name of the step's own stays what it is
        name = _free(entry.name, entries)
        entries[name] = dataclasses.replace(entry, name=name)
    listed = _once([entries.pop(e.name, e) for e in named])
    # A selected tensor without a mark does not exist in the program: a gradient that never flows.
    absent = Catalogue(
        e for e in listed if not e.position and any(matches(tap.select, e) for tap in taps)
    )
    found = [*entries.values(), *(e for e in listed if e.name not in absent)]
    use_of = _uses(traced)
    catalogue = Catalogue(dataclasses.replace(e, stage=stage_of(e), use=use_of(e)) for e in found)
    _refuse_absent(taps, absent, catalogue)
    # Which replicas' values to record is decided here, from the program: comparing the values on the
    # host would need all of them there.
    differing = Differing()
    if traced.replicas > 1:
        differing.of(traced.jaxpr, traced.consts, [False] * len(traced.jaxpr.invars))

    def describe(entry: Entry) -> tuple[Any, ...]:
        place = places[entry.position]
        # The outermost loop is that over steps; the product of the others is the number of values a
        # step.
        loops = [around.length or 1 for around in place.inside if around.kind == LOOP]
        results = differing.at.get(entry.position)
        differs = results is not None and results[entry.output]
        layers = sum(around.kind == SCAN for around in place.inside)
        return len(loops), differs, math.prod(loops[1:]), layers

    chosen = choose(taps, catalogue, describe) if taps else []
    return Sight(catalogue, chosen, common_period(taps))


def _uses(traced: Traced) -> Callable[[Entry], int]:
    """A function: the rank of a tensor by its parameter, in the order of use by a step; -1 for none."""
    order = UseOrder(traced.jaxpr).names
    uses = {f"{kind}/{name}": use for use, name in enumerate(order) for kind in MADE_FOR_EACH}

    def use_of(entry: Entry) -> int:
        # A parameter of several stages has a gradient in each: `grad/w@0`.
        return uses.get(entry.name, uses.get(entry.name.rpartition("@")[0], -1))

    return use_of


def _refuse_absent(taps: Sequence[AnyTap], absent: Catalogue, catalogue: Catalogue) -> None:
    """Raise an error if a tap selects only tensors that do not exist in the program."""
    for tap in taps:
        missing = absent.filter(tap.select)
        if missing and not catalogue.filter(tap.select):
            raise SelectionError(
                f"{missing[0].name!r} does not exist: no gradient of the loss flows back to that "
                f"value, because the loss does not depend on it in a differentiable way. "
                f"Received: {tap.select!r}. Observe the activation itself."
            )


def full_name(tag: Tag) -> str:
    """The name of a marked value; the gradient that flows back through a mark has a different one.

    Of a value that several stages compute, each has a gradient: `cotangent/cast@0`.
    """
    if tag.direction != COTANGENT:
        return tag.name
    part = "" if tag.payload is None else f"@{tag.payload}"
    return tag.name.replace(*COTANGENT_OF, 1) + part


def _entry(place: Place) -> Entry | None:
    tag = tag_of(place)
    if tag is None or tag.role != "value":
        return None
    name = full_name(tag)
    aval: Any = place.equation.outvars[0].aval
    layers = tuple(a.length or 0 for a in place.inside if a.kind == SCAN)
    # The stage around it, or, for a gradient, the stage that its mark names.
    stages = [tag.payload, *(a.stage for a in place.inside)]
    stages = [stage for stage in stages if stage is not None]
    return Entry(
        name,
        name.split("/")[0],
        (*layers, *aval.shape),
        aval.dtype,
        source=internals.user_frame(place.equation),
        position=place.position,
        stage=stages[-1] if stages else -1,
    )


def _free(name: str, taken: Container[str]) -> str:
    """The name, or with the number of its next use, as a scope has it that is called again."""
    if name not in taken:
        return name
    return next(other for n in itertools.count(1) if (other := f"{name}#{n}") not in taken)


def _once(entries: Sequence[Entry]) -> list[Entry]:
    return list({entry.name: entry for entry in entries}.values())
