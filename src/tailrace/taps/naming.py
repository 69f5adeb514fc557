"""Names for the values of a traced function, from the scopes they were computed in.

Equations record the `jax.named_scope`s they were traced in, which most libraries open for their layers.
Each entry into a scope is a distinct object, so a second call of the same layer differs from the first
(`dense` and `dense#1`), and a gradient can be matched with its value.
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike
from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Call, Scan, While, control
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn, Var
from tailrace.jaxprs.operations import call_name, only_places
from tailrace.jaxprs.own_equations import ambient_in, is_dequeue, is_mark
from tailrace.jaxprs.stretches import is_float, used_by
from tailrace.jaxprs.walk import Position, loop_tag
from tailrace.taps.catalogue import Entry

# Scopes that JAX opens itself: they say how a value is computed, not what it is.
_NOT_SCOPES = {"rematted_computation", "checkpoint"}


@dataclasses.dataclass(frozen=True)
class Scope:
    """One entry into a named scope: its name, and an identity of the entry and the program call."""

    name: str
    identity: tuple[Position, int]


@dataclasses.dataclass
class Namer:
    """Gives names to the values of a function.

    Attributes:
        enter_custom: whether to enter functions with a custom derivative. Before differentiation their
            contents must not change, or the rule would no longer fit.
        forward_only: omit the backward pass (when differentiation is part of the function).
    """

    enter_custom: bool = False
    forward_only: bool = True
    _calls: dict[str, dict[tuple[Any, ...], int]] = dataclasses.field(default_factory=dict)
    _seen: Counter[str] = dataclasses.field(default_factory=Counter)

    def entries(self, jaxpr: Jaxpr) -> list[Entry]:
        """An entry for each value: `activation/<scope>` and `activation/<scope>:<operation>`."""
        # A value that leaves the function has a name although no equation uses it.
        results: set[Atom] = {var for var in jaxpr.outvars if isinstance(var, Var)}
        found = list(self._walk(jaxpr, (), (), "", (), results))
        # Scopes are listed after the operations in them; users read a catalogue in the order of the
        # program.
        return sorted(found, key=lambda entry: entry.position)

    def _walk(
        self,
        jaxpr: Jaxpr,
        position: Position,
        around: tuple[Scope, ...],
        called: str,
        layers: tuple[int, ...],
        results: set[Atom],
    ) -> Iterator[Entry]:
        program = _Program(jaxpr, position, self.forward_only)
        for index, eqn in enumerate(jaxpr.eqns):
            # A value that is only said to be somewhere has its name already.
            if program.backward[index] or _is_no_value(eqn) or only_places(eqn):
                continue
            here = (*position, index)
            scopes = (*around, *program.chains[index])
            yield from self._operation(eqn, here, scopes, called, layers)
            for number, inner, length, carried in self._inside(eqn):
                name = call_name(eqn)
                inner_called = f"{called}{name}/" if name else called
                within = (*layers, length) if length is not None else layers
                # Of its results, those that the forward pass outside uses, and its carry. A constant
                # is a literal there, and no value of the program.
                used: set[Atom] = {
                    inside
                    for place, (inside, outside) in enumerate(
                        zip(inner.outvars, eqn.outvars, strict=False)
                    )
                    if isinstance(inside, Var)
                    and (place < carried or outside in program.users or outside in results)
                }
                yield from self._walk(inner, (*here, number), scopes, inner_called, within, used)
        yield from self._leaving(program, around, layers, results)

    def _inside(self, eqn: JaxprEqn) -> Iterator[tuple[int, Jaxpr, int | None, int]]:
        """Programs in an equation: index, program, length of a user's scan, size of the carry."""
        found = control(eqn)
        if found is None or (isinstance(found, Call) and found.is_custom and not self.enter_custom):
            return
        # A condition only computes whether to continue, which is not worth observing.
        inside = (found.body,) if isinstance(found, While) else found.inside
        for inner in inside:
            if isinstance(found, Scan):
                # A Tailrace loop has many values of one name; a user's scan has one value with a
                # layer dim.
                length = None if loop_tag(inner.jaxpr) else found.length
                yield inner.number, inner.jaxpr, length, found.num_carry
            else:
                yield inner.number, inner.jaxpr, None, 0

    def _operation(
        self,
        eqn: JaxprEqn,
        here: Position,
        scopes: tuple[Scope, ...],
        called: str,
        layers: tuple[int, ...],
    ) -> Iterator[Entry]:
        name = f"activation/{self._scope_name(scopes)}:{called}{_operation_name(eqn)}"
        for output, var in enumerate(eqn.outvars):
            if _is_number(var):
                yield self._entry(self._unique(name), eqn, here, output, var, layers)

    def _leaving(
        self,
        program: _Program,
        around: tuple[Scope, ...],
        layers: tuple[int, ...],
        results: set[Atom],
    ) -> Iterator[Entry]:
        """For each scope opened in this program: the float values that are used outside it."""
        for chain, indices in program.scopes.items():
            inside = set(indices)
            leaving: list[Var] = [
                var
                for index in indices
                if not _is_no_value(eqn := program.jaxpr.eqns[index])
                for var in eqn.outvars
                if is_float(var)
                and (var in results or any(u not in inside for u in program.users.get(var, ())))
            ]
            scope = self._scope_name((*around, *chain))
            alike = Counter(_form(var)[0] for var in leaving)
            for number, var in enumerate(leaving):
                name = scope if len(leaving) == 1 else f"{scope}[{number}]"
                shown = self._unique(f"activation/{name}")
                yield self._entry(shown, *program.place(var), var, layers)
                # If two values could be meant, neither is listed: better none than the wrong one.
                if self.forward_only and alike[_form(var)[0]] == 1:
                    for back in program.gradient_of(var, chain):
                        entry = self._entry(f"cotangent/{name}", *program.place(back), back, layers)
                        yield dataclasses.replace(entry, kind="cotangent")

    def _entry(
        self,
        name: str,
        eqn: JaxprEqn,
        here: Position,
        output: int,
        var: Var,
        layers: tuple[int, ...],
    ) -> Entry:
        shape, dtype = _form(var)
        source = internals.user_frame(eqn)
        return Entry(
            name,
            "activation",
            (*layers, *shape),
            dtype,
            source=source,
            position=here,
            output=output,
        )

    def _scope_name(self, scopes: Sequence[Scope]) -> str:
        """The path of a scope; a repeated call of a part has its number, as in `dense#1`."""
        path = ""
        for depth, scope in enumerate(scopes):
            around = scopes[depth - 1].name if depth else ""
            if around and scope.name.startswith(f"{around}."):
                path += scope.name.removeprefix(around)  # a dotted path repeats its parent's
            else:
                path = f"{path}/{scope.name}" if path else scope.name
            # Calls are numbered under the path so far: the second `dense` of one block is not that of
            # another.
            identity = tuple(s.identity for s in scopes[: depth + 1])
            calls = self._calls.setdefault(path, {})
            number = calls.setdefault(identity, len(calls))
            path = f"{path}#{number}" if number else path
        return path

    def _unique(self, name: str) -> str:
        number = self._seen[name]
        self._seen[name] += 1
        return f"{name}.{number}" if number else name


class _Program:
    """Facts about one program, computed once while its values get names.

    Attributes:
        jaxpr: the program.
        chains: the scopes of each equation, outermost first.
        backward: for each equation, whether it belongs to the backward pass and is omitted.
        users: for each variable, the equations of the forward pass that use it.
        scopes: for each scope opened in the program, the equations of the forward pass in it.
    """

    def __init__(self, jaxpr: Jaxpr, position: Position, forward_only: bool) -> None:
        self.jaxpr, self._position = jaxpr, position
        self.chains = [_chain(eqn, position) for eqn in jaxpr.eqns]
        self.backward = [forward_only and internals.is_backward(eqn) for eqn in jaxpr.eqns]
        self.users: dict[Atom, list[int]] = {}
        self.scopes: dict[tuple[Scope, ...], list[int]] = {}
        self._backward_scopes: dict[tuple[Scope, ...], list[int]] = {}
        self._made: dict[Var, tuple[int, int]] = {}
        self._entering: dict[tuple[Scope, ...], list[Var]] = {}
        for index, (eqn, chain) in enumerate(zip(jaxpr.eqns, self.chains, strict=True)):
            self._made.update((var, (index, output)) for output, var in enumerate(eqn.outvars))
            # JAX keeps the scopes of the forward pass in the backward pass: this is how the two are
            # matched.
            groups = self._backward_scopes if self.backward[index] else self.scopes
            for depth in range(1, len(chain) + 1):
                groups.setdefault(chain[:depth], []).append(index)
            if not self.backward[index]:
                for var in internals.variables(eqn.invars):
                    self.users.setdefault(var, []).append(index)

    def place(self, var: Var) -> tuple[JaxprEqn, Position, int]:
        """The equation that defines a variable, its position, and the index of the result."""
        index, output = self._made[var]
        return self.jaxpr.eqns[index], (*self._position, index), output

    def gradient_of(self, value: Var, scope: tuple[Scope, ...]) -> list[Var]:
        """The gradient of a value that leaves a scope, from the backward pass; empty if ambiguous.

        It is the value that enters the backward equations of that scope from outside.
        """
        if scope not in self._entering:
            self._entering[scope] = self._entered(self._backward_scopes.get(scope, []))
        # By form: the backward equations of a scope also take residuals and other gradients.
        entering = [var for var in self._entering[scope] if _form(var) == _form(value)]
        return entering if len(entering) == 1 else []

    def _entered(self, indices: list[int]) -> list[Var]:
        """Variables of the backward pass that these equations use and other ones define."""
        inside = set(indices)
        return [
            var
            for var in used_by(self.jaxpr.eqns[index] for index in indices)
            if var in self._made
            and (made := self._made[var][0]) not in inside
            and self.backward[made]
        ]


def _form(var: Var) -> tuple[tuple[int, ...], DTypeLike]:
    aval: Any = var.aval  # of an array: others have no entry
    return aval.shape, aval.dtype


def _is_no_value(eqn: JaxprEqn) -> bool:
    return is_mark(eqn) or is_dequeue(eqn) or ambient_in(eqn) is not None


def _chain(eqn: JaxprEqn, program: Position) -> tuple[Scope, ...]:
    # JAX traces a jitted function once and shares the program between its calls: their scope objects
    # are the same, so the position of the call is part of the identity.
    return tuple(
        Scope(name, (program, identity))
        for name, identity in internals.scopes_of(eqn)
        if name not in _NOT_SCOPES
    )


def _operation_name(eqn: JaxprEqn) -> str:
    return call_name(eqn) or internals.operation(eqn)


def _is_number(var: Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and (
        jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jnp.integer)
    )
