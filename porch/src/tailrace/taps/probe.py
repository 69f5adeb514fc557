"""Marking values of a function before it is differentiated.

To see an activation and its gradient, the value is marked where it is made. Differentiation carries
the mark along: the gradient that flows back through it is the gradient of the loss in that value,
summed over all its uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.marks import Tag, mark
from tailrace.jaxprs.visitor import Emitter
from tailrace.jaxprs.walk import Position, by_surrounding
from tailrace.taps.catalogue import Entry
from tailrace.taps.naming import Namer

COTANGENT_OF = ("activation/", "cotangent/")


def with_cotangents(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of activations, and for each float among them that of its gradient."""
    found = list(entries)
    for entry in entries:
        if jax.numpy.issubdtype(entry.dtype, jax.numpy.inexact):
            name = entry.name.replace(*COTANGENT_OF, 1)
            found.append(dataclasses.replace(entry, name=name, kind="cotangent"))
    return found


def probed(
    function: Callable[..., Any], wants: Callable[[Entry], bool], found: list[Entry]
) -> Callable[..., Any]:
    """`function`, with the values marked that `wants` asks for; all entries go into `found`."""

    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        form: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            out, out_structure = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
            form[:] = [out_structure]
            return out

        closed = jax.make_jaxpr(flat)(*leaves)
        entries = Namer().entries(closed.jaxpr)
        # Where they will stand in the program that this becomes part of is not known here.
        found.extend(dataclasses.replace(e, position=()) for e in with_cotangents(entries))
        marks: dict[Position, list[tuple[int, Tag]]] = {}
        for entry in entries:
            back = dataclasses.replace(
                entry, name=entry.name.replace(*COTANGENT_OF, 1), kind="cotangent"
            )
            gradient = wants(back) and jax.numpy.issubdtype(entry.dtype, jax.numpy.inexact)
            if wants(entry) or gradient:
                tag = Tag("value", entry.name, follow_gradient=gradient)
                marks.setdefault(entry.position, []).append((entry.output, tag))
        # Never the function once more: its random keys and enqueues are numbered as it is traced.
        out = _Marker(marks).run(closed.jaxpr, closed.consts, leaves, None)
        return jax.tree.unflatten(form[0], out)

    return call


class _Marker(Emitter[None]):
    """Emits a program once more, with marks on some of its values, fit to be differentiated."""

    def __init__(self, marks: dict[Position, list[tuple[int, Tag]]]) -> None:
        self.marks = marks
        self._inside = by_surrounding(marks)

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether something in the equation is to be marked."""
        return here in self._inside

    def made(
        self, eqn: JaxprEqn, inputs: list[Any], outputs: list[Any], around: None, here: Position
    ) -> list[Any]:
        """Mark what is to be marked of the equation's results."""
        for output, tag in self.marks.get(here, ()):
            outputs[output] = mark(outputs[output], tag)
        return outputs
