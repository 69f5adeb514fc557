"""The update of parameters and optimizer state when the state is sharded or offloaded.

Shards are updated on the replica that holds them; offloaded state is fetched part by part, once all
gradients are ready.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import nbytes
from tailrace.jaxprs.marks import Tag, mark, path_name
from tailrace.program.memory.host_memory import after_accumulation, in_parts
from tailrace.program.memory.optimizer_state import StateKeeping, is_tapped
from tailrace.program.memory.update_graph import PIECE, WHOLE, Evaluation, UpdateGraph, Value
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.update_rule import Optimizer, apply_rule
from tailrace.taps.tap import AnyTap


class HeldUpdate:
    """One update, while it is traced.

    Args:
        keeping: how each leaf of the state is held.
        optimizer: computes the update; see `Step`.
        taps: the taps of the training step.
        grads: the gradients, reduced over replicas.
        state: parameters and state, as they are held.
        taken: whether the step is applied or skipped; None for always applied.
        extra: what else the optimizer needs.
    """

    def __init__(
        self,
        keeping: StateKeeping,
        optimizer: Optimizer,
        taps: Sequence[AnyTap],
        grads: Tree,
        state: TrainState,
        taken: Tree = None,
        extra: Tree = None,
    ) -> None:
        self.keeping, self.taps = keeping, taps
        forms = (_forms(grads), keeping.forms, _forms(state.params), _forms((taken, extra)))
        leaves, structure = jax.tree.flatten(forms)

        def rule(*leaves: jax.Array) -> list[Any]:
            *given, others = jax.tree.unflatten(structure, leaves)
            return jax.tree.leaves(apply_rule(optimizer, *given, *others))

        self.graph = UpdateGraph(rule, leaves)
        self.given = jax.tree.leaves((grads, state.optimizer_state, state.params, taken, extra))
        self.params, self.count = state.params, len(jax.tree.leaves(state.params))
        first = len(jax.tree.leaves(grads))
        self.state_numbers = range(first, first + len(keeping.shared))
        self.first_parameter = self.state_numbers.stop
        # A pipeline fetches the state of its devices itself.
        moved = () if keeping.shares.by_sum else keeping.hosted
        self.hosted = [n for n, yes in zip(self.state_numbers, moved, strict=False) if yes]
        shared = [n for n, yes in zip(self.state_numbers, keeping.shared, strict=True) if yes]
        self.pieces = self.graph.in_pieces(shared) if shared else None
        self.names = self._names()
        self.tapped = [self._is_tapped(name, v) for name, v in self._results()]

    def run(self) -> tuple[Any, Any]:
        """The new parameters, and the new state as it is held."""
        # Results are grouped by the offloaded leaves that they need, so that each leaf is fetched once,
        # and not before its group: only one group's state is on the device at a time.
        needs = self.graph.needs(self.hosted)
        outside = self._evaluation({})
        made: dict[int, Any] = {}
        wanted = [n for n in range(len(self.names)) if self._is_wanted(n)]
        values = [self.graph.outputs[n] for n in wanted]
        sizes = [nbytes(jax.typeof(self.given[number])) for number in self.hosted]
        extra = [value for value in self.graph.must_run if needs(value)]
        parts = in_parts([needs(value) for value in (*values, *extra)], sizes)
        if parts:  # a learning rate, or the norm of all gradients, is computed once for all parts
            for operand in (o for node in self.graph.nodes for o in node.operands):
                if operand.aval.shape == () and not needs(operand):
                    outside.get(operand)
        for part in parts:
            numbers = [wanted[i] for i in part if i < len(wanted)]
            also = [extra[i - len(wanted)] for i in part if i >= len(wanted)]
            made.update(self._part(numbers, also, needs, outside))
        for number, value in zip(wanted, values, strict=True):
            if not needs(value):
                made[number] = outside.get(value, self._form(number))
        for value in self.graph.must_run:
            if not needs(value):
                outside.get(value)
        return self._named(made)

    def _part(
        self,
        numbers: Sequence[int],
        also: Sequence[Value],
        needs: Callable[[Value], int],
        outside: Evaluation,
    ) -> dict[int, Any]:
        """Results with offloaded leaves in common: fetch, compute, send back."""
        used = 0
        for value in (*(self.graph.outputs[n] for n in numbers), *also):
            used |= needs(value)
        leaves = [n for place, n in enumerate(self.hosted) if used >> place & 1]
        first = self.state_numbers[0]
        places = {2 * self.count + (number - first): number for number in leaves}
        rest = [number for number in numbers if number not in places]

        def body(carried: Tree) -> Any:
            hosts, others = carried
            come = {n: self.keeping.moves.bring_in(h) for n, h in zip(leaves, hosts, strict=True)}
            for number, value in zip(rest, others, strict=True):
                if self.count <= number < 2 * self.count:
                    # Carried, not closed over: XLA would copy a closed-over parameter before it is
                    # overwritten.
                    come[self.first_parameter + number - self.count] = value
            # A copy: values computed inside the loop must not be used outside it.
            inside = self._evaluation(come, dict(outside.done))
            results = {n: inside.get(self.graph.outputs[n], self._form(n)) for n in numbers}
            for value in also:
                inside.get(value)
            back = [
                self.keeping.moves.send_back(results[2 * self.count + (n - first)]) for n in leaves
            ]
            return back, [results[n] for n in rest]

        start = ([self.given[n] for n in leaves], [self._start(n) for n in rest])
        hosts, others = after_accumulation(body, start)
        made = dict(zip(rest, others, strict=True))
        for number, host in zip(leaves, hosts, strict=True):
            made[2 * self.count + (number - first)] = host
        return made

    def _evaluation(self, come: dict[int, Any], done: dict[Any, Any] | None = None) -> Evaluation:
        def given(number: int) -> Any:
            return come[number] if number in come else self.given[number]

        return Evaluation(self.graph, given, self.pieces, self.keeping.shares, done or {})

    def _start(self, number: int) -> Any:
        """The initial value of a result, before the loop that computes it."""
        if self.count <= number < 2 * self.count:
            return jax.tree.leaves(self.params)[number - self.count]
        form = self.graph.outputs[number].aval
        if self._form(number) == PIECE:
            form = self.keeping.shares.form(form)
        # Only its shape matters: the loop runs exactly once and overwrites it.
        return jnp.zeros(form.shape, form.dtype)

    # -- results and their names ----------------------------------------------------------------
    # In order: the update of each parameter, each new parameter, each leaf of the new state.

    def _names(self) -> list[str]:
        def of(tree: Tree, kind: str, alone: str) -> list[str]:
            paths = jax.tree_util.tree_flatten_with_path(tree)[0]
            return [f"{kind}/{path_name(path) or alone}" for path, _ in paths]

        return [
            *of(self.params, "update", "params"),
            *of(self.params, "updated", "params"),
            *of(self.keeping.forms, "optimizer", "0"),
        ]

    def _results(self) -> list[tuple[str, Value]]:
        return list(zip(self.names, self.graph.outputs, strict=True))

    def _is_tapped(self, name: str, value: Value) -> bool:
        return is_tapped(self.taps, name, value.aval)

    def _is_wanted(self, number: int) -> bool:
        """All results except unobserved updates: parameters are computed without them."""
        return number >= self.count or self.tapped[number]

    def _form(self, number: int) -> str:
        shared = number >= 2 * self.count and self.keeping.shared[number - 2 * self.count]
        return PIECE if shared else WHOLE

    def _named(self, made: dict[int, Any]) -> tuple[Any, Any]:
        for number, name in enumerate(self.names[: self.count]):
            update = made.get(number)
            if update is None:  # unobserved: it has a name, but is never computed
                # The catalogue must list it; XLA removes the difference, since nothing uses it.
                old = jax.tree.leaves(self.params)[number]
                update = made[self.count + number] - old
            mark(update, Tag("value", name))
        structure = jax.tree.structure(self.params)
        params = jax.tree.unflatten(
            structure,
            [mark(made[n], Tag("value", self.names[n])) for n in range(self.count, 2 * self.count)],
        )
        after = []
        for place, shared in enumerate(self.keeping.shared):
            number = 2 * self.count + place
            value = made[number]
            tag = Tag("value", self.names[number])
            if shared and self.keeping.shares.by_sum and not self.tapped[number]:
                pass  # a pipeline would gather it for nothing
            elif shared:  # observed whole, carried in shards
                mark(self.keeping.shares.gather(value, self.graph.outputs[number].aval), tag)
            else:
                value = mark(value, tag)
            after.append(value)
        return params, jax.tree.unflatten(jax.tree.structure(self.keeping.forms), after)


def _forms(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
