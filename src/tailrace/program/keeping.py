"""Where the optimizer's state lies between updates: in shares over replicas, in the host's memory.

Plainly, every replica holds all of it on its device. `StateKeeping` says for each leaf how it is
held instead, and computes the update from what is held.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.errors import OptionError
from tailrace.marks import Tag, mark, path_name
from tailrace.notes import logger, note_once
from tailrace.program import offload
from tailrace.program.offload import Moves, after_accumulation, in_parts
from tailrace.program.sharded import LEAST, Shares
from tailrace.program.update_graph import PIECE, WHOLE, Evaluation, UpdateGraph, Value
from tailrace.tensors.catalogue import Entry, matches
from tailrace.tensors.taps import StopOnNonfinite

if TYPE_CHECKING:
    from tailrace.program.executable import Placement
    from tailrace.program.step import Step, TrainState


@dataclasses.dataclass(frozen=True)
class StateKeeping:
    """How each leaf of the optimizer's state is held.

    Attributes:
        forms: the state as the optimizer knows it: a tree of shapes.
        shared: for each leaf, whether replicas have shares of it.
        hosted: for each leaf, whether it lies in the host's memory.
        shares: how shares are cut.
        moves: how leaves get from one memory to the other.
        decisions: sentences that say what was decided, and why.
    """

    forms: Any
    shared: tuple[bool, ...]
    hosted: tuple[bool, ...]
    shares: Shares
    moves: Moves
    decisions: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether every leaf is held as it always is."""
        return not any(self.shared) and not any(self.hosted)

    @property
    def held_forms(self) -> Any:
        """The state as one replica holds it."""
        return self._map(lambda form, shared: self.shares.form(form) if shared else form)

    @property
    def host_bytes(self) -> int:
        """What one replica holds in its host's memory."""
        held = zip(jax.tree.leaves(self.held_forms), self.hosted, strict=True)
        return sum(_nbytes(form) for form, hosted in held if hosted)

    @property
    def device_bytes(self) -> int:
        """What one replica holds on its device, between updates."""
        return sum(_nbytes(form) for form in jax.tree.leaves(self.held_forms)) - self.host_bytes

    def hold(self, state: Any, placement: Placement) -> Any:
        """A whole state, as arrays that are held as they should be."""

        leaves, structure = jax.tree.flatten(state)
        held = [self._hold(place, value, placement) for place, value in enumerate(leaves)]
        return jax.tree.unflatten(structure, held)

    def _hold(self, place: int, value: Any, placement: Placement) -> Any:
        if self.shares.by_sum:  # a pipeline places it itself, replicas as dim 0
            value = np.asarray(value)
            split = np.asarray(self.shares.split(value)).reshape(self.shares.replicas, -1)
            return split if self.shared[place] else value
        if self.shared[place]:
            value = placement.own_each(self.shares.split(value))
        else:
            value = placement.own(value)
        return (
            placement.to_host_memory(value) if self.hosted[place] and self.moves_memory else value
        )

    def hold_some(self, leaves: Mapping[int, Any], first: int, placement: Placement) -> Any:
        """Replacements by number, those of the state (from number `first` on) as they are held."""
        count = len(self.shared)
        return {
            number: self._hold(number - first, value, placement)
            if first <= number < first + count
            else value
            for number, value in leaves.items()
        }

    def whole(self, held: Any, placement: Placement) -> Any:
        """The state as the optimizer knows it, on the device; all processes must call it."""

        def one(form: Any, shared: bool, hosted: bool, value: Any) -> Any:
            if hosted and self.moves_memory and not self.shares.by_sum:
                value = jax.device_put(value, value.sharding.with_memory_kind("device"))
            return self.shares.join(placement.readable(value), form) if shared else value

        leaves = zip(
            jax.tree.leaves(self.forms),
            self.shared,
            self.hosted,
            jax.tree.leaves(held),
            strict=True,
        )
        return jax.tree.unflatten(jax.tree.structure(held), [one(*leaf) for leaf in leaves])

    def _map(self, function: Callable[[Any, bool], Any]) -> Any:
        leaves, structure = jax.tree.flatten(self.forms)
        return jax.tree.unflatten(structure, map(function, leaves, self.shared))

    @property
    def moves_memory(self) -> bool:
        """Whether leaves really lie elsewhere, or only the order of the update is as if they did."""
        return self.moves is not offload.NO_MOVES

    # -- the update -----------------------------------------------------------------------------

    def update(self, step: Step, grads: Any, state: TrainState) -> tuple[Any, Any]:
        """The parameters after a step, and the state as it is held."""
        return _Update(self, step, grads, state).run()


class _Update:
    """One update, while it is traced."""

    def __init__(self, keeping: StateKeeping, step: Step, grads: Any, state: TrainState) -> None:
        from tailrace.program.step import apply_rule  # it uses this module

        self.keeping, self.step = keeping, step
        forms = (_forms(grads), keeping.forms, _forms(state.params))
        leaves, structure = jax.tree.flatten(forms)

        def rule(*leaves: Any) -> list[Any]:
            given = jax.tree.unflatten(structure, leaves)
            return jax.tree.leaves(apply_rule(step.optimizer, *given))

        self.graph = UpdateGraph(rule, leaves)
        self.given = jax.tree.leaves((grads, state.optimizer_state, state.params))
        self.params, self.count = state.params, len(jax.tree.leaves(state.params))
        first = len(jax.tree.leaves(grads))
        self.state_numbers = range(first, first + len(keeping.shared))
        # A pipeline brings in what its devices hold by itself.
        moved = () if keeping.shares.by_sum else keeping.hosted
        self.hosted = [n for n, yes in zip(self.state_numbers, moved, strict=False) if yes]
        shared = [n for n, yes in zip(self.state_numbers, keeping.shared, strict=True) if yes]
        self.pieces = self.graph.in_pieces(shared) if shared else None
        self.names = self._names()
        self.tapped = [self._is_tapped(name, v) for name, v in self._results()]

    def run(self) -> tuple[Any, Any]:
        needs = self.graph.needs(self.hosted)
        outside = self._evaluation({})
        made: dict[int, Any] = {}
        wanted = [n for n in range(len(self.names)) if self._is_wanted(n)]
        values = [self.graph.outputs[n] for n in wanted]
        sizes = [_nbytes(jax.typeof(self.given[number])) for number in self.hosted]
        extra = [value for value in self.graph.must_run if needs(value)]
        parts = in_parts([needs(value) for value in (*values, *extra)], sizes)
        if parts:  # a learning rate, or the norm of all gradients, is made once for all parts
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
        """Results that share leaves of the host: brought in, computed, sent back."""
        used = 0
        for value in (*(self.graph.outputs[n] for n in numbers), *also):
            used |= needs(value)
        leaves = [n for place, n in enumerate(self.hosted) if used >> place & 1]
        first = self.state_numbers[0]
        places = {2 * self.count + (number - first): number for number in leaves}
        rest = [number for number in numbers if number not in places]

        def body(carried: Any) -> Any:
            hosts, _ = carried
            come = {n: self.keeping.moves.bring_in(h) for n, h in zip(leaves, hosts, strict=True)}
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
        """What stands in the place of a result before the loop that makes it."""
        if self.count <= number < 2 * self.count:
            return jax.tree.leaves(self.params)[number - self.count]
        form = self.graph.outputs[number].aval
        if self._form(number) == PIECE:
            form = self.keeping.shares.form(form)
        return jnp.zeros(form.shape, form.dtype)

    # -- results and their names ----------------------------------------------------------------
    # In order: what is added to each parameter, each parameter afterwards, each leaf of the state.

    def _names(self) -> list[str]:
        def of(tree: Any, kind: str, alone: str) -> list[str]:
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
        return is_tapped(self.step.taps, name, value.aval)

    def _is_wanted(self, number: int) -> bool:
        """All but updates that nobody looks at: the parameters are computed without them."""
        return number >= self.count or self.tapped[number]

    def _form(self, number: int) -> str:
        shared = number >= 2 * self.count and self.keeping.shared[number - 2 * self.count]
        return PIECE if shared else WHOLE

    def _named(self, made: dict[int, Any]) -> tuple[Any, Any]:
        for number, name in enumerate(self.names[: self.count]):
            update = made.get(number)
            if update is None:  # nobody looks at it: it has a name, and is never computed
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
            elif shared:  # seen whole, carried in shares
                mark(self.keeping.shares.gather(value, self.graph.outputs[number].aval), tag)
            else:
                value = mark(value, tag)
            after.append(value)
        return params, jax.tree.unflatten(jax.tree.structure(self.keeping.forms), after)


# -- deciding -----------------------------------------------------------------------------------


def keep_state(
    forms: Any,
    placement: Placement,
    taps: Sequence[Any],
    *,
    share: bool,
    offload_state: bool | None,
    microbatches: int,
    pipelined: bool = False,
    moves: Moves | None = None,
) -> StateKeeping:
    """Decide how the optimizer's state is held.

    Args:
        forms: the state as the optimizer makes it: a tree of shapes.
        placement: the replicas.
        taps: what is observed: leaves of the state that are observed stay on the device.
        share: whether replicas are to have shares of it.
        offload_state: whether it is to lie in the host's memory; None: where that pays.
        microbatches: how many make a step.
        pipelined: whether the model is a pipeline.
        moves: how leaves move; None finds out whether they can.
    """
    leaves = jax.tree.leaves(forms)
    said: list[str] = []
    shares = Shares(placement.replicas, by_sum=pipelined)
    shared = [False] * len(leaves)
    if share:
        if placement.replicas > 1:
            shared = [math.prod(form.shape) >= LEAST for form in leaves]
            said.append(_told_shares(leaves, shared, placement.replicas))
        else:
            said.append("shard_optimizer_state has no effect with one replica.")
    hosted = [False] * len(leaves)
    if offload_state is None:
        offload_state = microbatches > 1
    if offload_state:
        guarded = any(isinstance(tap, StopOnNonfinite) for tap in taps)
        why_not = None if moves is not None else offload.obstacle(placement.device, guarded)
        if why_not is None:
            held = [shares.form(f) if s else f for f, s in zip(leaves, shared, strict=True)]
            names = _leaf_names(forms)
            seen = [is_tapped(taps, n, f) for n, f in zip(names, leaves, strict=True)]
            hosted = [
                _nbytes(form) >= offload.LEAST_BYTES and not tapped
                for form, tapped in zip(held, seen, strict=True)
            ]
            size = sum(_nbytes(f) for f, yes in zip(held, hosted, strict=True) if yes)
            total = sum(_nbytes(form) for form in held)
            if moves is None:
                local = size * placement.local_replicas
                offload.check_fits(local, offload.free_host_memory(), placement.device.platform)
            said.append(
                f"Optimizer state: {size / 1e6:,.1f} of {total / 1e6:,.1f} MB a device lie in the "
                f"host's memory between updates ({sum(hosted)} of {len(leaves)} leaves; small and "
                f"observed ones stay on the device)."
            )
        else:
            said.append(f"Optimizer state stays on the device: {why_not}.")
    moves = moves or offload.memory_moves()
    return StateKeeping(forms, tuple(shared), tuple(hosted), shares, moves, tuple(said))


def decide(
    forms: Any,
    placement: Placement,
    taps: Sequence[Any],
    *,
    share: bool,
    offload_state: bool | None,
    microbatches: int,
    pipelined: bool = False,
) -> tuple[StateKeeping | None, tuple[str, ...]]:
    """Like `keep_state`, and say what was decided; None if the state is held plainly."""
    keeping = keep_state(
        forms,
        placement,
        taps,
        share=share,
        offload_state=offload_state,
        microbatches=microbatches,
        pipelined=pipelined,
    )
    asked = share or offload_state
    for sentence in keeping.decisions:
        # What was asked for and is not done is worth a warning; what is done, a line.
        (note_once if keeping.changes_nothing and asked else logger.info)(sentence)
    return None if keeping.changes_nothing else keeping, keeping.decisions


def check_options(share: Any, offload_state: Any) -> None:
    """Both options are switches; whether to offload may also be left open."""
    if not isinstance(share, bool):
        raise OptionError(
            f"shard_optimizer_state is True or False. Received: {share!r}. With True, each replica "
            f"keeps one share of the optimizer's state."
        )
    if offload_state is not None and not isinstance(offload_state, bool):
        raise OptionError(
            f"offload_optimizer_state is True, False, or None for where it pays. Received: "
            f"{offload_state!r}."
        )


def is_tapped(taps: Sequence[Any], name: str, form: Any) -> bool:
    """Whether some tap selects a tensor of this name."""
    entry = Entry(name, name.split("/")[0], tuple(form.shape), form.dtype)
    return any(matches(tap.select, entry) for tap in taps)


def _told_shares(leaves: Sequence[Any], shared: Sequence[bool], replicas: int) -> str:
    size = sum(_nbytes(form) for form, yes in zip(leaves, shared, strict=True) if yes)
    total = sum(_nbytes(form) for form in leaves)
    return (
        f"Optimizer state: {size / 1e6:,.1f} of {total / 1e6:,.1f} MB are shared out over {replicas} "
        f"replicas ({sum(shared)} of {len(leaves)} leaves; those of fewer than {LEAST} elements stay "
        f"whole)."
    )


def _leaf_names(forms: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(forms)[0]
    return [f"optimizer/{path_name(path) or '0'}" for path, _ in paths]


def _forms(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@functools.cache
def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 8)  # a random key has none


def _nbytes(form: Any) -> int:
    return math.prod(form.shape) * _itemsize(form.dtype)
