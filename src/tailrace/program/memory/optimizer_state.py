"""Where optimizer state is held between updates: sharded over replicas, offloaded to host memory.

By default, every replica holds all of it on its device. `StateKeeping` records for each leaf how it is
held instead, and computes the update from the held form.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import logger, note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs.internals import nbytes
from tailrace.jaxprs.marks import path_name
from tailrace.program.memory import host_memory
from tailrace.program.memory.host_memory import Moves
from tailrace.program.memory.sharded_state import LEAST, Shares
from tailrace.program.running.placement import Placement
from tailrace.taps.catalogue import Entry, matches
from tailrace.taps.tap import AnyTap, StopOnNonfinite


@dataclasses.dataclass(frozen=True)
class StateKeeping:
    """How each leaf of the optimizer state is held.

    Attributes:
        forms: the state as the optimizer sees it: a tree of shapes.
        shared: for each leaf, whether it is sharded over replicas.
        hosted: for each leaf, whether it is in host memory.
        shares: how leaves are sharded.
        moves: transfers leaves between the memories.
        decisions: messages about the decisions and their reasons.
    """

    forms: Any
    shared: tuple[bool, ...]
    hosted: tuple[bool, ...]
    shares: Shares
    moves: Moves
    decisions: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether every leaf is held in the default way."""
        return not any(self.shared) and not any(self.hosted)

    @property
    def held_forms(self) -> Tree:
        """The state as one replica holds it."""
        return self._map(lambda form, shared: self.shares.form(form) if shared else form)

    @property
    def host_bytes(self) -> int:
        """The bytes that one replica holds in host memory."""
        held = zip(jax.tree.leaves(self.held_forms), self.hosted, strict=True)
        return sum(nbytes(form) for form, hosted in held if hosted)

    @property
    def device_bytes(self) -> int:
        """The bytes that one replica holds on its device between updates."""
        return sum(nbytes(form) for form in jax.tree.leaves(self.held_forms)) - self.host_bytes

    def hold(self, leaves: Iterable[Any], placement: Placement) -> Tree:
        """Place the leaves of a whole state in their held form.

        Each is placed before the next is requested: all of them may be too large for one device.
        """
        held = [self._hold(place, value, placement) for place, value in enumerate(leaves)]
        return jax.tree.unflatten(jax.tree.structure(self.forms), held)

    def _hold(self, place: int, value: TensorLike, placement: Placement) -> Any:
        if self.shares.by_sum:  # a pipeline places it later, with replicas as dim 0
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

    def hold_some(
        self, leaves: Mapping[int, Any], first: int, placement: Placement
    ) -> dict[int, Any]:
        """Replacements of leaves by index, those of the state (from `first` on) as they are held."""
        # The indices are those of the whole training state; only some of them belong to the optimizer.
        count = len(self.shared)
        return {
            number: self._hold(number - first, value, placement)
            if first <= number < first + count
            else value
            for number, value in leaves.items()
        }

    def whole(self, held: Tree, placement: Placement) -> Tree:
        """The state as the optimizer sees it, on the device; all processes must call this."""

        def one(form: jax.ShapeDtypeStruct, shared: bool, hosted: bool, value: jax.Array) -> Any:
            if hosted and self.moves_memory and not self.shares.by_sum:
                # No operation runs on an array in host memory, not even a slice.
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

    def _map(self, function: Callable[[Any, bool], Any]) -> Tree:
        leaves, structure = jax.tree.flatten(self.forms)
        return jax.tree.unflatten(structure, map(function, leaves, self.shared))

    @property
    def moves_memory(self) -> bool:
        """Whether leaves are really offloaded; otherwise only the order of the program is the same."""
        return self.moves is not host_memory.NO_MOVES


# -- deciding -----------------------------------------------------------------------------------


def keep_state(
    forms: Tree,
    placement: Placement,
    taps: Sequence[AnyTap],
    *,
    share: bool,
    offload_state: bool | None,
    microbatches: int,
    pipelined: bool = False,
    moves: Moves | None = None,
) -> StateKeeping:
    """Decide how the optimizer state is held.

    Args:
        forms: the state as the optimizer creates it: a tree of shapes.
        placement: the replicas.
        taps: the taps: leaves of the state that are observed stay on the device.
        share: whether to shard it over replicas.
        offload_state: whether to offload it to host memory; None: if that pays.
        microbatches: the number of microbatches per step.
        pipelined: whether the model is a pipeline.
        moves: the transfers to use; None for the device's, if it supports them.
    """
    leaves = jax.tree.leaves(forms)
    said: list[str] = []
    shares = Shares(placement.replicas, by_sum=pipelined)
    shared = hosted = [False] * len(leaves)
    if share and placement.replicas > 1:
        # A collective has a fixed cost, which a small leaf (a step counter, a bias) would pay for
        # nothing.
        shared = [math.prod(form.shape) >= LEAST for form in leaves]
        said.append(_shares_message(leaves, shared, placement.replicas))
    elif share:
        said.append("shard_optimizer_state has no effect with one replica.")
    # With one microbatch the transfers have nothing to hide behind; with several, gradients are
    # computed meanwhile.
    if microbatches > 1 if offload_state is None else offload_state:
        guarded = any(isinstance(tap, StopOnNonfinite) for tap in taps)
        why_not = None if moves is not None else host_memory.obstacle(placement.device, guarded)
        if why_not is None:
            held = [shares.form(f) if s else f for f, s in zip(leaves, shared, strict=True)]
            hosted = _offloaded(held, forms, taps)
            if moves is None:
                _check_room(held, hosted, placement)
            said.append(_offload_message(held, hosted))
        else:
            said.append(f"Optimizer state stays on the device: {why_not}.")
    moves = moves or host_memory.memory_moves()
    return StateKeeping(forms, tuple(shared), tuple(hosted), shares, moves, tuple(said))


def _offloaded(held: Sequence[Any], forms: Tree, taps: Sequence[AnyTap]) -> list[bool]:
    """For each leaf as it is held, whether it goes to host memory: if it is large and not observed."""
    # A tap reads it in every step, for which it would be fetched each time.
    whole = zip(_leaf_names(forms), jax.tree.leaves(forms), strict=True)
    seen = [is_tapped(taps, name, form) for name, form in whole]
    return [
        nbytes(form) >= host_memory.LEAST_BYTES and not tapped
        for form, tapped in zip(held, seen, strict=True)
    ]


def _check_room(held: Sequence[Any], hosted: Sequence[bool], placement: Placement) -> None:
    """Refuse what does not fit into host memory."""
    # Before anything is allocated: a host that swaps, or is killed, gives no message.
    local = _bytes_of(held, hosted) * placement.local_replicas
    host_memory.check_fits(local, host_memory.free_host_memory(), placement.device.platform)


def log_decisions(keeping: StateKeeping, requested: bool) -> None:
    """Log the decisions; `requested` says whether the user asked for one of them."""
    for sentence in keeping.decisions:
        # A request that is not fulfilled is worth a warning; one that is, a line.
        (note_once if keeping.changes_nothing and requested else logger.info)(sentence)


def check_options(share: object, offload_state: object) -> None:
    """Refuse values other than True and False; offload may also be None."""
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


def is_tapped(taps: Sequence[AnyTap], name: str, form: jax.ShapeDtypeStruct) -> bool:
    """Whether any tap selects a tensor of this name."""
    entry = Entry(name, name.split("/")[0], tuple(form.shape), form.dtype)
    return any(matches(tap.select, entry) for tap in taps)


def _shares_message(leaves: Sequence[Any], shared: Sequence[bool], replicas: int) -> str:
    size, total = _bytes_of(leaves, shared), _bytes_of(leaves)
    return (
        f"Optimizer state: {size / 1e6:,.1f} of {total / 1e6:,.1f} MB are sharded over {replicas} "
        f"replicas ({sum(shared)} of {len(leaves)} leaves; those of fewer than {LEAST} elements stay "
        f"whole)."
    )


def _offload_message(held: Sequence[Any], hosted: Sequence[bool]) -> str:
    size, total = _bytes_of(held, hosted), _bytes_of(held)
    return (
        f"Optimizer state: {size / 1e6:,.1f} of {total / 1e6:,.1f} MB per device are in the "
        f"host's memory between updates ({sum(hosted)} of {len(held)} leaves; small and "
        f"observed ones stay on the device)."
    )


def _bytes_of(forms: Sequence[Any], flags: Sequence[bool] | None = None) -> int:
    """The bytes of some leaves: those whose flag is true, or all."""
    flags = [True] * len(forms) if flags is None else flags
    return sum(nbytes(form) for form, yes in zip(forms, flags, strict=True) if yes)


def _leaf_names(forms: Tree) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(forms)[0]
    return [f"optimizer/{path_name(path) or '0'}" for path, _ in paths]
