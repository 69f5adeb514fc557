"""Names for the values of a traced function, from the scopes that they were computed in.

`jax.named_scope`, and every library that opens scopes for its layers, leaves its mark on equations.
Each entry of a scope is an object of its own, so a second call of the same layer can be told from
the first (`dense` and `dense#1`), and a gradient from the value that it belongs to.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Var, primitives
from tailrace.jaxprs.marks import ambient_p, dequeue_p, mark_p
from tailrace.jaxprs.walk import Position, loop_tag
from tailrace.taps.catalogue import Entry

_NOT_VALUES = {mark_p, dequeue_p, ambient_p}

# JAX's own scopes, which say how a value is computed, not what it is.
_NOT_SCOPES = {"rematted_computation", "checkpoint"}


@dataclasses.dataclass(frozen=True)
class Scope:
    """One entry of a named scope: its name, and which entry of it in which call of a program."""

    name: str
    identity: tuple[Position, int]


@dataclasses.dataclass
class Namer:
    """Gives names to the values of a function.

    Attributes:
        enter_custom: whether functions with their own derivative are looked into. Before
            differentiation their inside must not be touched.
        forward_only: leave out the backward pass (when differentiation is part of the function).
    """

    enter_custom: bool = False
    forward_only: bool = True
    _calls: dict[str, list[tuple[Any, ...]]] = dataclasses.field(default_factory=dict)
    _seen: Counter[str] = dataclasses.field(default_factory=Counter)

    def entries(self, jaxpr: Jaxpr) -> list[Entry]:
        """An entry for each value: `activation/<scope>` and `activation/<scope>:<operation>`."""
        results = {var for var in jaxpr.outvars if isinstance(var, Var)}
        found = list(self._walk(jaxpr, (), (), "", (), results))
        return sorted(found, key=lambda entry: entry.position)

    def _walk(
        self,
        jaxpr: Jaxpr,
        position: Position,
        around: tuple[Scope, ...],
        called: str,
        layers: tuple[int, ...],
        results: set[Any],
    ) -> Iterator[Entry]:
        chains = [_chain(eqn, position) for eqn in jaxpr.eqns]
        backward = [self.forward_only and internals.is_backward(eqn) for eqn in jaxpr.eqns]
        for index, eqn in enumerate(jaxpr.eqns):
            if backward[index] or eqn.primitive in _NOT_VALUES:
                continue
            here = (*position, index)
            scopes = (*around, *chains[index])
            yield from self._operation(eqn, here, scopes, called, layers)
            for number, inner, length in self._inside(eqn):
                name = _call_name(eqn)
                inner_called = f"{called}{name}/" if name else called
                within = (*layers, length) if length is not None else layers
                used = self._used_results(jaxpr, eqn, inner, backward, results)
                yield from self._walk(inner, (*here, number), scopes, inner_called, within, used)
        yield from self._leaving(jaxpr, position, around, chains, backward, layers, results)

    def _used_results(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, inner: Jaxpr, backward: list[bool], results: set[Any]
    ) -> set[Any]:
        """Which results of a program inside an equation are used by the forward pass outside."""
        carried = internals.scan_sizes(eqn)[1] if eqn.primitive is primitives.scan_p else 0
        forward = {
            var
            for index, other in enumerate(jaxpr.eqns)
            if not backward[index]
            for var in other.invars
            if isinstance(var, Var)
        }
        return {
            inside
            for number, (inside, outside) in enumerate(
                zip(inner.outvars, eqn.outvars, strict=False)
            )
            if number < carried or outside in forward or outside in results
        }

    def _inside(self, eqn: JaxprEqn) -> Iterator[tuple[int, Jaxpr, int | None]]:
        if internals.is_custom(eqn) and not self.enter_custom:
            return
        scanned = eqn.params["length"] if eqn.primitive is primitives.scan_p else None
        for number, (_, _, inner, _) in enumerate(internals.inner_jaxprs(eqn)):
            if eqn.primitive is primitives.while_p and number == 0:
                continue  # the condition
            # A loop made by Tailrace makes many values; it does not make one larger.
            yield number, inner, None if loop_tag(inner) else scanned

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
        jaxpr: Jaxpr,
        position: Position,
        around: tuple[Scope, ...],
        chains: list[tuple[Scope, ...]],
        backward: list[bool],
        layers: tuple[int, ...],
        results: set[Any],
    ) -> Iterator[Entry]:
        """For each scope opened in this program: the float values that are used outside of it."""
        made: dict[Any, int] = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        users: dict[Any, list[int]] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            if not backward[index]:
                for var in eqn.invars:
                    if isinstance(var, Var):
                        users.setdefault(var, []).append(index)
        scopes: dict[tuple[Any, ...], tuple[Scope, ...]] = {}
        for index, chain in enumerate(chains):
            if not backward[index]:
                for depth in range(1, len(chain) + 1):
                    scopes.setdefault(tuple(s.identity for s in chain[:depth]), chain[:depth])
        for key, chain in scopes.items():
            inside = {
                index
                for index, other in enumerate(chains)
                if tuple(s.identity for s in other[: len(key)]) == key and not backward[index]
            }
            leaving = [
                var
                for var, index in made.items()
                if index in inside
                and _is_float(var)
                and jaxpr.eqns[index].primitive not in _NOT_VALUES
                and (var in results or any(user not in inside for user in users.get(var, ())))
            ]
            name = f"activation/{self._scope_name((*around, *chain))}"
            for number, var in enumerate(leaving):
                eqn = jaxpr.eqns[made[var]]
                shown = name if len(leaving) == 1 else f"{name}[{number}]"
                here = (*position, made[var])
                output = list(eqn.outvars).index(var)
                yield self._entry(self._unique(shown), eqn, here, output, var, layers)
                if self.forward_only:
                    yield from self._gradient(
                        jaxpr, position, key, chains, made, leaving, var, shown, layers
                    )

    def _gradient(
        self,
        jaxpr: Jaxpr,
        position: Position,
        scope: tuple[int, ...],
        chains: list[tuple[Scope, ...]],
        made: dict[Any, int],
        leaving: list[Any],
        value: Any,
        name: str,
        layers: tuple[int, ...],
    ) -> Iterator[Entry]:
        """The gradient of a value that leaves a scope, read off the backward pass.

        It is what enters the backward equations of that scope from outside. Where two values could
        be meant, none is listed: better no gradient than the wrong one.
        """
        alike = [v for v in leaving if v.aval.shape == value.aval.shape]
        back = [
            index
            for index, eqn in enumerate(jaxpr.eqns)
            if internals.is_backward(eqn) and _identities(chains[index][: len(scope)]) == scope
        ]
        inside = set(back)
        entering = {
            var
            for index in back
            for var in jaxpr.eqns[index].invars
            if isinstance(var, Var)
            and made.get(var, -1) not in inside
            and var in made
            and internals.is_backward(jaxpr.eqns[made[var]])
            and _form(var) == _form(value)
        }
        if len(alike) != 1 or len(entering) != 1:
            return
        (var,) = entering
        eqn = jaxpr.eqns[made[var]]
        entry = self._entry(
            name.replace("activation/", "cotangent/", 1),
            eqn,
            (*position, made[var]),
            list(eqn.outvars).index(var),
            var,
            layers,
        )
        yield dataclasses.replace(entry, kind="cotangent")

    def _entry(
        self,
        name: str,
        eqn: JaxprEqn,
        here: Position,
        output: int,
        var: Any,
        layers: tuple[int, ...],
    ) -> Entry:
        shape = (*layers, *var.aval.shape)
        source = internals.user_frame(eqn)
        return Entry(
            name, "activation", shape, var.aval.dtype, source=source, position=here, output=output
        )

    def _scope_name(self, scopes: Sequence[Scope]) -> str:
        """The path of a scope, each part with the number of its call where it is called again."""
        path = ""
        for depth, scope in enumerate(scopes):
            around = scopes[depth - 1].name if depth else ""
            if around and scope.name.startswith(f"{around}."):
                path += scope.name.removeprefix(around)  # a dotted path repeats what is around it
            else:
                path = f"{path}/{scope.name}" if path else scope.name
            identity = tuple(s.identity for s in scopes[: depth + 1])
            calls = self._calls.setdefault(path, [])
            if identity not in calls:
                calls.append(identity)
            number = calls.index(identity)
            path = f"{path}#{number}" if number else path
        return path

    def _unique(self, name: str) -> str:
        number = self._seen[name]
        self._seen[name] += 1
        return f"{name}.{number}" if number else name


def _form(var: Any) -> tuple[Any, Any]:
    return var.aval.shape, var.aval.dtype


def _identities(chain: Sequence[Scope]) -> tuple[Any, ...]:
    return tuple(scope.identity for scope in chain)


def _chain(eqn: JaxprEqn, program: Position) -> tuple[Scope, ...]:
    # JAX traces a jitted function once, however often it is called: the call tells its scopes apart.
    return tuple(
        Scope(name, (program, identity))
        for name, identity in internals.scopes_of(eqn)
        if name not in _NOT_SCOPES
    )


def _operation_name(eqn: JaxprEqn) -> str:
    return _call_name(eqn) or internals.operation(eqn)


def _call_name(eqn: JaxprEqn) -> str:
    """The name of the function that an equation calls; empty if it calls none by name."""
    name = eqn.params.get("name") if eqn.primitive is primitives.jit_p else None
    if internals.is_custom(eqn):
        name = internals.function_name(eqn)
    return "" if not name or "<" in str(name) else str(name).strip("_")


def _is_number(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and (
        jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jnp.integer)
    )


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)
