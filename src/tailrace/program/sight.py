"""The catalogue of a traced program, and what taps on it mean for the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tailrace import _jax
from tailrace.marks import COTANGENT, Tag
from tailrace.program.drift import Differing
from tailrace.program.traced import Traced
from tailrace.tensors.catalogue import Catalogue, Entry
from tailrace.tensors.probe import COTANGENT_OF
from tailrace.tensors.taps import Chosen, Tap, choose, common_period, wanted_of
from tailrace.tensors.walk import LOOP, SCAN, Place, tag_of, walk


@dataclasses.dataclass
class Sight:
    """What is observed in one program.

    Attributes:
        catalogue: all its tensors.
        chosen: what the taps select.
        period: periodic taps look at every so many steps.
    """

    catalogue: Catalogue
    chosen: list[Chosen]
    period: int

    @property
    def wanted(self) -> Any:
        """What the rewriter must send out."""
        return wanted_of(self.chosen)


def look(traced: Traced, taps: Sequence[Tap], named: Sequence[Entry] = ()) -> Sight:
    """Make the catalogue of a program and apply taps to it.

    Args:
        traced: the program; its marks name most tensors.
        taps: what is to be observed.
        named: further tensors by name. Those that a tap selects are marked in the program (the
            function that made them known saw to that); the others are listed only.
    """
    places = {place.position: place for place in walk(traced.jaxpr.eqns)}
    entries: dict[str, Entry] = {}
    for place in places.values():
        entry = _entry(place)
        if entry is not None:
            entries.setdefault(entry.name, entry)
    listed = [entries.pop(e.name, e) for e in named]
    catalogue = Catalogue([*entries.values(), *_once(listed)])
    differing = Differing()
    if traced.replicas > 1:
        differing.of(traced.jaxpr, [False] * len(traced.jaxpr.invars))

    def describe(entry: Entry) -> tuple[int, bool]:
        place = places[entry.position]
        loops = sum(around.kind == LOOP for around in place.inside)
        results = differing.at.get(entry.position)
        return loops, results is not None and results[entry.output]

    chosen = choose(taps, catalogue, describe) if taps else []
    return Sight(catalogue, chosen, common_period(taps))


def full_name(tag: Tag) -> str:
    """The name of a marked value: the gradient that flows back through a mark has its own."""
    back = tag.direction == COTANGENT
    return tag.name.replace(*COTANGENT_OF, 1) if back else tag.name


def _entry(place: Place) -> Entry | None:
    tag = tag_of(place)
    if tag is None or tag.role != "value":
        return None
    name = full_name(tag)
    aval = place.equation.outvars[0].aval
    layers = tuple(a.length or 0 for a in place.inside if a.kind == SCAN)
    return Entry(
        name,
        name.split("/")[0],
        (*layers, *aval.shape),
        aval.dtype,
        source=_jax.user_frame(place.equation),
        position=place.position,
    )


def _once(entries: Sequence[Entry]) -> list[Entry]:
    return list({entry.name: entry for entry in entries}.values())
