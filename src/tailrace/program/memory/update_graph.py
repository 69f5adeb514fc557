"""An optimizer's update as a graph, from which any result can be computed separately.

An optimizer is one function of all gradients, all state and all parameters. To fetch its state part by
part, or to compute only one replica's shard, we need to know which result depends on which input. The
function is traced, its calls are inlined, and each value can then be requested in one of two forms:

* `WHOLE`: the whole array.
* `PIECE`: this replica's shard, flat. Elementwise operations are computed on the shard only; everything
  else is computed whole and then cut.

If an operation that is not elementwise (the norm of a tensor) needs a value that is held in shards, the
value is gathered for it. So the result is correct for every optimizer, whatever it does.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs import internals
from tailrace.jaxprs.control import Call, control
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn, Literal
from tailrace.jaxprs.operations import is_elementwise, is_fill, is_reshape
from tailrace.jaxprs.own_equations import is_mark
from tailrace.program.memory.sharded_state import Shares

WHOLE, PIECE = "whole", "piece"


@dataclasses.dataclass(eq=False)
class Node:
    """One operation: its equation, its operands, and the calls around it."""

    equation: JaxprEqn
    operands: list[Any]
    around: tuple[JaxprEqn, ...]


@dataclasses.dataclass(eq=False)
class Value:
    """One array: an input (by index), a constant, or a result of an operation."""

    aval: Any
    node: Node | None = None
    number: int = 0
    constant: Any = None

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the function."""
        return self.node is None and self.constant is None


class UpdateGraph:
    """A traced function with its calls inlined.

    Args:
        function: takes and returns flat lists of arrays.
        inputs: the shapes of its inputs.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> None:
        closed = jax.make_jaxpr(function)(*inputs)
        self.nodes: list[Node] = []
        self.inputs = [
            Value(var.aval, number=number) for number, var in enumerate(closed.jaxpr.invars)
        ]
        self.outputs: list[Value] = self._open(closed.jaxpr, closed.consts, self.inputs, ())
        # No result depends on these, but they have effects: taps and prints in an optimizer.
        self.must_run = [
            Value(eqn.outvars[0].aval if eqn.outvars else None, node)
            for node in self.nodes
            if is_mark(eqn := node.equation) or eqn.effects
        ]

    def _open(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], around: tuple[Any, ...]
    ) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = Value(var.aval, constant=const)

        def read(var: Atom) -> Value:
            return Value(var.aval, constant=var.val) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            # Only calls are inlined. A loop or a branch inside an optimizer stays one operation,
            # computed whole.
            if isinstance(call := control(eqn), Call):
                inner = call.program
                results = self._open(inner.jaxpr, inner.consts, operands, (*around, eqn))
            else:
                node = Node(eqn, operands, around)
                self.nodes.append(node)
                results = [Value(var.aval, node, i) for i, var in enumerate(eqn.outvars)]
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def needs(self, chosen: Iterable[int]) -> Callable[[Value], int]:
        """A function from a value to the `chosen` inputs it depends on, as a bit mask."""
        bit = {number: 1 << place for place, number in enumerate(chosen)}
        found: dict[Node, int] = {}

        def of(value: Value) -> int:
            if value.node is not None:
                return found[value.node]
            return bit.get(value.number, 0) if value.is_input else 0

        # In the order of the program, so that operands come before their users: one pass is enough.
        for node in self.nodes:
            bits = 0
            for operand in node.operands:
                bits |= of(operand)
            found[node] = bits
        return of

    def in_pieces(self, held: Iterable[int]) -> Callable[[Value], bool]:
        """A predicate: whether a value exists in pieces if these inputs are held in pieces."""
        held = frozenset(held)
        found: dict[Node, bool] = {}

        def of(value: Value) -> bool:
            if value.node is not None:
                return found[value.node]
            return value.is_input and value.number in held

        # Pieces spread only through elementwise operations. One that mixes a piece with a whole array
        # works on pieces: cutting is free, gathering is a collective.
        for node in self.nodes:
            found[node] = is_elementwise(node.equation) and any(map(of, node.operands))
        return of


@dataclasses.dataclass
class Evaluation:
    """Computes values of a graph, each once, in the requested forms.

    Attributes:
        graph: the graph.
        given: returns an input as it is held: whole, or this replica's piece.
        pieces: whether a value exists in pieces; None if none does.
        shares: how pieces are cut and joined.
        done: values computed so far; looked up first, and added to.
    """

    graph: UpdateGraph
    given: Callable[[int], Any]
    pieces: Callable[[Value], bool] | None = None
    shares: Shares | None = None
    done: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def get(self, value: Value, form: str = WHOLE) -> Any:
        """The value in a form; computes what it depends on."""
        waiting = [(value, form)]
        while waiting:  # not recursive: the sum of a thousand norms is a thousand levels deep
            item = waiting[-1]
            if self._found(*item):
                waiting.pop()
                continue
            needed = [need for need in self._requires(*item) if not self._found(*need)]
            if needed:
                waiting.extend(needed)
            else:
                self._compute(*item)
                waiting.pop()
        return self._value(value, form)

    def _is_piece(self, value: Value) -> bool:
        return self.pieces is not None and self.pieces(value)

    def _key(self, value: Value, form: str) -> Hashable:
        if value.node is not None:
            return (value.node, form)
        return (value.number if value.is_input else value, form)

    def _found(self, value: Value, form: str) -> bool:
        return (value.constant is not None and form == WHOLE) or self._key(value, form) in self.done

    def _value(self, value: Value, form: str) -> Any:
        if value.constant is not None and form == WHOLE:
            return value.constant
        kept = self.done[self._key(value, form)]
        return kept[value.number] if value.node is not None else kept

    def _requires(self, value: Value, form: str) -> list[tuple[Value, str]]:
        piece = self._is_piece(value)
        node = value.node
        # Held in pieces but needed whole: computed in pieces first, then gathered.
        if form == WHOLE and piece and not (node is None and value.constant is not None):
            return [(value, PIECE)]
        if node is None:
            return [] if piece or form == WHOLE else [(value, WHOLE)]
        if form == WHOLE:
            return [(operand, WHOLE) for operand in node.operands]
        # Scalars (a learning rate, a step count) are never cut.
        if is_elementwise(node.equation):
            return [(o, WHOLE if o.aval.shape == () else PIECE) for o in node.operands]
        return [(value, WHOLE)]

    def _compute(self, value: Value, form: str) -> None:
        key, node, piece = self._key(value, form), value.node, self._is_piece(value)
        if form == WHOLE and piece:
            assert self.shares is not None
            whole = self.shares.gather(self._value(value, PIECE), value.aval)
            self.done[key] = [whole] if node is not None else whole
        elif node is None:
            if form == PIECE and not piece:
                assert self.shares is not None
                self.done[key] = self.shares.cut(self._value(value, WHOLE))
            else:
                self.done[key] = self.given(value.number)
        elif form == PIECE and not is_elementwise(node.equation):
            assert self.shares is not None
            self.done[key] = [
                self.shares.cut(out) if jnp.ndim(out) else out for out in self.done[(node, WHOLE)]
            ]
        else:
            self.done[key] = self._emit(node, form)

    def _emit(self, node: Node, form: str) -> list[Any]:
        forms = [WHOLE if o.aval.shape == () else form for o in node.operands]
        inputs = [self._value(o, f) for o, f in zip(node.operands, forms, strict=True)]
        with contextlib.ExitStack() as scopes:
            for eqn in (*node.around, node.equation):
                scopes.enter_context(internals.equation_context(eqn))
            # A piece is flat, so a reshape does not change it, and a broadcast fills one.
            if form == PIECE and is_reshape(node.equation):
                return [inputs[0]]
            if form == PIECE and is_fill(node.equation):
                assert self.shares is not None
                made: Any = node.equation.outvars[0].aval
                return [lax.broadcast(inputs[0], (self.shares.count(made.size),))]
            return internals.bind_again(node.equation, inputs)
