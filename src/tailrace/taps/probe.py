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
from jax import lax

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, primitives
from tailrace.jaxprs.marks import Tag, mark
from tailrace.jaxprs.walk import Position
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
        out = _Marker(marks).run(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(form[0], out)

    return call


@dataclasses.dataclass
class _Marker:
    """Emits a program once more, with marks on some of its values, fit to be differentiated."""

    marks: dict[Position, list[tuple[int, Tag]]]

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], position: Position = ()
    ) -> list[Any]:
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        for index, eqn in enumerate(jaxpr.eqns):
            here = (*position, index)
            with internals.equation_context(eqn):
                outputs = self._emit(
                    eqn, [internals.value_of(known, var) for var in eqn.invars], here
                )
                for output, tag in self.marks.get(here, ()):
                    outputs[output] = mark(outputs[output], tag)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [internals.value_of(known, var) for var in jaxpr.outvars]

    def _emit(self, eqn: JaxprEqn, inputs: list[Any], here: Position) -> list[Any]:
        if not any(position[: len(here)] == here and position != here for position in self.marks):
            return internals.bind_again(eqn, inputs)
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, inputs, here)
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, inputs, here)
        if eqn.primitive is primitives.cond_p:
            index, *operands = inputs
            branches = [
                lambda *ops, n=n, b=b: self.run(b.jaxpr, b.consts, ops, (*here, n))
                for n, b in enumerate(eqn.params["branches"])
            ]
            return list(lax.switch(index, branches, *operands))
        called = internals.contents(eqn)
        if called is None:
            return internals.bind_again(eqn, inputs)
        number, inner, consts = called

        def call(*values: Any) -> list[Any]:
            return self.run(inner, consts, values, (*here, number))

        if internals.is_remat(eqn):
            call = jax.checkpoint(
                call,
                policy=internals.parameters(eqn)["policy"],
                prevent_cse=internals.keeps_apart(eqn),
            )
        return list(call(*inputs))

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], here: Position) -> list[Any]:
        num_consts, num_carry = internals.scan_sizes(eqn)
        consts = inputs[:num_consts]
        init, xs = inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]
        body = eqn.params["jaxpr"]

        def one_pass(carry: Any, x: Any) -> Any:
            out = self.run(body.jaxpr, body.consts, [*consts, *carry, *x], (*here, 0))
            return out[:num_carry], out[num_carry:]

        carry, ys = lax.scan(
            one_pass,
            init,
            xs,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *ys]

    def _while(self, eqn: JaxprEqn, inputs: list[Any], here: Position) -> list[Any]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        return list(
            lax.while_loop(
                lambda c: self.run(
                    condition.jaxpr, condition.consts, [*inputs[:tests], *c], (*here, 0)
                )[0],
                lambda c: self.run(
                    body.jaxpr, body.consts, [*inputs[tests : tests + consts], *c], (*here, 1)
                ),
                inputs[tests + consts :],
            )
        )
