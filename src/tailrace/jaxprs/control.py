"""Equations that contain programs, as typed objects: loops, branches and calls.

`control(eqn)` reads an equation. The object it returns lists the programs inside, splits operands and
results by role, and emits the equation again with other functions in place of those programs:

    Scan    lax.scan, and tr.repeat        body
    While   lax.while_loop                 condition, body
    Cond    lax.cond and lax.switch        branches
    Call    jit, checkpoint, functions with a custom derivative, units of a pipeline

No other package reads the parameters of an equation: their names change between JAX versions.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

T = TypeVar("T")

Function = Callable[[list[Any]], list[Any]]
"""A program as a function from a flat list of inputs to a flat list of results."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """A program inside an equation.

    Attributes:
        number: the index of the program within its equation; it is part of a `Position`.
        jaxpr: the program.
        consts: its constants.
    """

    number: int
    jaxpr: Jaxpr
    consts: tuple[Any, ...]

    @classmethod
    def of(cls, number: int, closed: ClosedJaxpr) -> Inner:
        """A closed program, with index `number` in its equation."""
        return cls(number, closed.jaxpr, tuple(closed.consts))


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A loop whose length is known at compile time.

    Attributes:
        eqn: the equation.
        body: takes constants, the carry, and one row of each scanned operand.
        num_consts: the number of constants.
        num_carry: the number of carried values.
        length: the number of iterations.
        reverse: whether it scans from the last row to the first.
        unroll: how many iterations the compiled loop unrolls.
    """

    eqn: JaxprEqn
    body: Inner
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any

    @property
    def inside(self) -> tuple[Inner, ...]:
        """The programs in it."""
        return (self.body,)

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split operands, of the equation or of its body, into constants, carry and scanned."""
        end = self.num_consts + self.num_carry
        return (
            list(operands[: self.num_consts]),
            list(operands[self.num_consts : end]),
            list(operands[end:]),
        )

    def split_results(self, results: Sequence[T]) -> tuple[list[T], list[T]]:
        """Split results, of the equation or of its body, into carry and stacked."""
        return list(results[: self.num_carry]), list(results[self.num_carry :])

    def again(
        self,
        body: Function,
        operands: Sequence[Any],
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda one_pass: one_pass,
    ) -> list[Any]:
        """Emit the loop with another body; `wrap` is applied to the function of one iteration."""
        consts, init, xs = self.split(operands)

        def one_pass(carry: Any, x: Any) -> Any:
            return self.split_results(body([*consts, *carry, *x]))

        # Through `lax.scan`, not by changing the equation: its other parameters describe the body, and
        # would have to be changed with it, differently in each version of JAX.
        carry, ys = lax.scan(
            wrap(one_pass), init, xs, length=self.length, reverse=self.reverse, unroll=self.unroll
        )
        return [*carry, *ys]

    def piece(self, length: int, carried: Sequence[Any]) -> JaxprEqn:
        """The equation of a `tr.repeat` for `length` iterations that continue from `carried`.

        Its last operand is the counter, which continues from piece to piece.
        """
        # The initial carry is replaced; of the scanned operands a `tr.repeat` has one, its counter.
        consts, _, rows = self.split(self.eqn.invars)
        # The parameters of the body stay valid: it takes one row of the counter, however many follow.
        params = {**self.eqn.params, "length": length}
        return self.eqn.replace(invars=[*consts, *carried, rows[-1]], params=params)


@dataclasses.dataclass(frozen=True, eq=False)
class While:
    """A loop whose length is known only at run time.

    Attributes:
        eqn: the equation.
        condition: takes its constants and the carry; returns whether to continue.
        body: takes its constants and the carry; returns the next carry.
        condition_consts: the number of constants of the condition.
        body_consts: the number of constants of the body.
    """

    eqn: JaxprEqn
    condition: Inner
    body: Inner
    condition_consts: int
    body_consts: int

    @property
    def inside(self) -> tuple[Inner, ...]:
        """The programs in it."""
        return (self.condition, self.body)

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split operands into the condition's constants, the body's constants and the carry."""
        start = self.condition_consts + self.body_consts
        return (
            list(operands[: self.condition_consts]),
            list(operands[self.condition_consts : start]),
            list(operands[start:]),
        )

    def again(self, condition: Function, body: Function, operands: Sequence[Any]) -> list[Any]:
        """Emit the loop with another condition and body."""
        # Constants become closed-over values: `lax.while_loop` counts them again by itself.
        tests, consts, init = self.split(operands)
        return list(
            lax.while_loop(
                lambda carry: condition([*tests, *carry])[0],
                lambda carry: body([*consts, *carry]),
                init,
            )
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Cond:
    """A choice between programs that take the same operands.

    Attributes:
        eqn: the equation; its first operand says which branch is taken.
        branches: the programs.
    """

    eqn: JaxprEqn
    branches: tuple[Inner, ...]

    @property
    def inside(self) -> tuple[Inner, ...]:
        """The programs in it."""
        return self.branches

    @staticmethod
    def split(operands: Sequence[T]) -> tuple[T, list[T]]:
        """Split operands into the branch index and the operands of the branches."""
        index, *others = operands
        return index, others

    def again(self, branches: Sequence[Function], operands: Sequence[Any]) -> list[Any]:
        """Emit the choice with other branches."""
        index, others = self.split(operands)
        # Each lambda binds its function as a default: a closure would see only the last one.
        # `lax.switch` also for two branches: a `cond` equation has an integer index in either case.
        functions = [lambda *values, f=function: f(list(values)) for function in branches]
        return list(lax.switch(index, functions, *others))


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A program that is called once, on the operands unchanged.

    Attributes:
        eqn: the equation.
        program: what is called.
    """

    eqn: JaxprEqn
    program: Inner

    @property
    def inside(self) -> tuple[Inner, ...]:
        """The programs in it."""
        return (self.program,)

    @property
    def is_jit(self) -> bool:
        """Whether it is a `jax.jit`."""
        return self.eqn.primitive is primitives.jit_p

    @property
    def is_remat(self) -> bool:
        """Whether it is a `jax.checkpoint`, or the recomputation that one causes."""
        return internals.is_remat(self.eqn)

    @property
    def is_custom(self) -> bool:
        """Whether it calls a function with a custom derivative."""
        return internals.is_custom(self.eqn)

    @property
    def is_replay(self) -> bool:
        """Whether it recomputes a forward pass for the backward pass."""
        return internals.is_replay(self.eqn)

    @property
    def is_barrier(self) -> bool:
        """Whether the compiler must not merge it with the computation it repeats."""
        return internals.is_barrier(self.eqn)

    def again(
        self, function: Function, operands: Sequence[Any], *, jitted: bool = False
    ) -> list[Any]:
        """Emit another program in place of the one called; under `jax.checkpoint` if that one was.

        Args:
            function: what is emitted.
            operands: its arguments.
            jitted: whether a jit stays one. Differentiation adds up what flows back through a jit
                before the rest: inlined before it, gradients are added in another order.
        """
        if jitted and self.is_jit:
            inner = lambda *values: function(list(values))  # noqa: E731
            inner.__name__ = self.eqn.params["name"]  # profiles show it
            return list(jax.jit(inner)(*operands))
        # A jit's boundary has no meaning to XLA, so the contents are inlined. A checkpoint's does: it
        # decides what the backward pass recomputes, so it is put around the new function.
        if not self.is_remat:
            return function(list(operands))
        params = internals.parameters(self.eqn)
        call = jax.checkpoint(
            lambda *values: function(list(values)),
            policy=params["policy"],
            prevent_cse=internals.keeps_apart(self.eqn),
        )
        return list(call(*operands))


Control = Scan | While | Cond | Call


def control(eqn: JaxprEqn) -> Control | None:
    """An equation that contains programs, as an object; None if it has none, or is opaque."""
    if eqn.primitive is primitives.scan_p:
        return as_scan(eqn)
    if eqn.primitive is primitives.while_p:
        params = eqn.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        counts = params["cond_nconsts"], params["body_nconsts"]
        return While(eqn, Inner.of(0, condition), Inner.of(1, body), *counts)
    if eqn.primitive is primitives.cond_p:
        return Cond(eqn, tuple(Inner.of(n, b) for n, b in enumerate(eqn.params["branches"])))
    # Last, and by its shape, not by name: whatever calls one program on its operands is a call, which
    # covers kinds of calls that a later JAX invents.
    called = internals.contents(eqn)
    return None if called is None else Call(eqn, Inner(*called))


def programs_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """All programs inside an equation, opaque ones included; a `Position` indexes this list."""
    return [inner for _, _, inner, _ in internals.inner_jaxprs(eqn)]


def as_scan(eqn: JaxprEqn) -> Scan:
    """Read an equation that is known to be a scan."""
    params = eqn.params
    body = Inner.of(0, params["jaxpr"])
    sizes = internals.scan_sizes(eqn)
    return Scan(eqn, body, *sizes, params["length"], params["reverse"], params["unroll"])


def scan_of(eqn: JaxprEqn) -> Scan | None:
    """An equation as a scan; None if it is not one."""
    return as_scan(eqn) if eqn.primitive is primitives.scan_p else None


def jit_of(eqn: JaxprEqn) -> Call | None:
    """An equation as a `jit` call; None if it is not one."""
    if eqn.primitive is not primitives.jit_p:
        return None
    called = internals.contents(eqn)
    return None if called is None else Call(eqn, Inner(*called))
