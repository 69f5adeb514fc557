"""Marks on values of a function, placed before it is differentiated.

To observe an activation and its gradient, the value is marked where it is computed. Differentiation
carries the mark along: the gradient that flows back through it is the gradient of the loss with
respect to that value, summed over all its uses.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.marks import Tag, mark
from tailrace.jaxprs.visitor import Emitter
from tailrace.jaxprs.walk import Position, by_surrounding
from tailrace.taps.catalogue import Entry
from tailrace.taps.naming import Namer

COTANGENT_OF = ("activation/", "cotangent/")


def with_cotangents(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of activations, each float one followed by the entry of its gradient."""
    found = list(entries)
    for entry in entries:
        if jax.numpy.issubdtype(entry.dtype, jax.numpy.inexact):
            name = entry.name.replace(*COTANGENT_OF, 1)
            found.append(dataclasses.replace(entry, name=name, kind="cotangent"))
    return found


def probed(
    function: Callable[..., Tree], wants: Callable[[Entry], bool], found: list[Entry]
) -> Callable[..., Tree]:
    """`function` with marks on the values that `wants` accepts; all entries are added to `found`."""

    def call(*args: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        form: list[Any] = []

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            out, out_structure = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
            form[:] = [out_structure]
            return out

        closed = jax.make_jaxpr(flat)(*leaves)
        entries = Namer().entries(closed.jaxpr)
        # Their positions in the program that this becomes part of are not known yet.
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
        # The traced program is emitted, not the function traced again: tracing numbers its random keys
        # and enqueues, and a second trace would number them differently.
        out = _Marker(marks).run(closed.jaxpr, closed.consts, leaves, None)
        return jax.tree.unflatten(form[0], out)

    return call


class _Marker(Emitter[None]):
    """Emits a program again with marks on some of its values; the result can be differentiated."""

    # Or a tap would change the order in which gradients are added.
    keeps_jits = True

    def __init__(self, marks: dict[Position, list[tuple[int, Tag]]]) -> None:
        self.marks = marks
        self._inside = by_surrounding(marks)

    def enters(self, eqn: JaxprEqn, here: Position) -> bool:
        """Whether to mark something inside the equation."""
        return here in self._inside

    def made(
        self, eqn: JaxprEqn, inputs: list[Any], outputs: list[Any], around: None, here: Position
    ) -> list[Any]:
        """Mark the requested results of the equation."""
        for output, tag in self.marks.get(here, ()):
            outputs[output] = mark(outputs[output], tag)
        return outputs
