"""Values to emit from a program, and their reduction before that."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from tailrace.base.spans.scopes import TAPS
from tailrace.base.trees import Tree
from tailrace.taps.bit_digests import digest_many, whole_digests
from tailrace.taps.counted_loop import Looks
from tailrace.taps.frame import Emission, Frame
from tailrace.taps.reductions import (
    StatsKey,
    all_finite,
    histogram,
    histograms,
    pack_statistics,
)
from tailrace.taps.whole_reductions import (
    whole_all_finite,
    whole_form,
    whole_histogram,
    whole_statistics,
)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A value to emit from a program.

    Attributes:
        key: its name outside the program.
        output: the index of the result of its equation.
        reduce: a reduction to apply inside the loop, before it leaves; None for statistics, which are
            computed for all tensors of a loop body together.
        periodic: whether it is emitted only in the last of every `period` steps.
        collect: "stack" keeps one entry per iteration of a loop, "sum" and "final" one per execution;
            so does "last", and only steps that observe compute it: the last one does.
        guard: whether only its finiteness is of interest.
        skips: whether it is a guard that undoes a step in which it is not finite, and lets the loop
            continue.
        digest: whether only the digest of its bits is of interest.
        layers: the number of leading dims that are iterations of the user's scans, when it is
            collected.
        change: if given, nothing is emitted; the program continues with `change(value, step)` instead.
    """

    key: Hashable
    output: int = 0
    reduce: Callable[[jax.Array], Tree] | None = lambda value: value
    periodic: bool = False
    collect: str = "stack"
    guard: bool = False
    layers: int = 0
    digest: bool = False
    skips: bool = False
    change: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    @property
    def widens(self) -> bool:
        """Whether its reduction converts what it reads to float32 itself."""
        return self.guard or (self.collect == "stack" and self.reduce in (None, histogram))

    @property
    def sparse(self) -> bool:
        """Whether only iterations that observe emit it."""
        return self.periodic or self.collect == "last"


class FiniteKey(tuple[Hashable, ...]):
    """The key of a flag for the finiteness of some tensors: their names."""

    __slots__ = ()


class DigestKey(tuple[str, ...]):
    """The key of the digests of some tensors: their names."""

    __slots__ = ()


class RawKey(tuple[Wanted]):
    """The key of a tensor that was emitted whole and has yet to be reduced."""

    __slots__ = ()


def is_collected(key: Hashable) -> bool:
    """Whether our loops keep one value of an emission, not one per iteration."""
    return isinstance(key, DigestKey) or (isinstance(key, RawKey) and key[0].collect != "stack")


def looks_of(wants: Iterable[Wanted], period: int) -> Looks:
    """The steps that must observe, for these values."""
    wants = tuple(wants)
    last = any(want.collect == "last" for want in wants)
    # Without periodic values a look in every step would be for nothing but the last one's.
    return Looks(0 if last and not any(want.periodic for want in wants) else period, last)


def condense(frame: Frame, at_end: bool = False) -> None:
    """Replace the tensors that a part of a program emits by their reductions.

    Tensors that are summed or kept over the loop stay whole until its end.
    """
    with jax.named_scope(TAPS):
        _condense(frame, at_end)


def _condense(frame: Frame, at_end: bool) -> None:
    # Periodic ones are packed separately: the pack of the others must be the same in every iteration.
    sharded = frame.ambient.sharded
    packs: dict[bool, list[tuple[Hashable, Emission]]] = {False: [], True: []}
    guarded: list[tuple[Hashable, Emission]] = []
    digested: list[tuple[Any, Emission]] = []
    counted: list[tuple[Hashable, Emission]] = []
    for raw in [key for key in frame.emitted if isinstance(key, RawKey)]:
        (want,) = raw
        if want.collect in ("sum", "final") and not at_end:
            continue
        emission = frame.emitted.pop(raw)
        if want.guard:
            guarded.append((want.key, emission))
        elif want.digest:
            digested.append((want.key, emission))
        elif want.collect != "stack" and want.layers:
            _reduce_layers(want, emission, frame)
        elif want.reduce is None:
            packs[want.periodic].append((want.key, emission))
        elif want.reduce is histogram:
            counted.append((want.key, emission))
        else:
            reduce = whole_form(want.reduce) if sharded else want.reduce
            frame.emit(want.key, reduce(emission.value), emission.valid)
    if guarded:
        key = FiniteKey(key for key, _ in guarded)
        # Without a flag: a guard is reduced in the branch that computes it, before the branch adds one.
        test = whole_all_finite if sharded else all_finite
        frame.emit(key, test([e.value for _, e in guarded]))
    if digested:  # in one array: each array that leaves a device has a fixed cost
        names = [name for (name, _), _ in digested]
        values = [emission.value for _, emission in digested]
        if sharded:
            found = whole_digests(values, names)
        else:
            found = digest_many(values, names, [None] * len(names), in_memory=False)
        frame.emit(DigestKey(names), found)
    values = [emission.value for _, emission in counted]
    found = [whole_histogram(value) for value in values] if sharded else histograms(values)
    for (key, emission), counts in zip(counted, found, strict=True):
        frame.emit(key, counts, emission.valid)
    for pack in packs.values():
        # A pack has one validity flag, so a value with a flag is packed alone.
        alone = [[(k, e)] for k, e in pack if e.valid is not None]
        together = [(k, e) for k, e in pack if e.valid is None]
        for members in [together, *alone] if together else alone:
            key = StatsKey((k, *_sizes(int(e.value.size), sharded)) for k, e in members)
            pack = whole_statistics if sharded else pack_statistics
            frame.emit(key, pack([e.value for _, e in members]), members[0][1].valid)


def _packed(pack: Callable[[list[jax.Array]], jax.Array], value: jax.Array) -> jax.Array:
    return pack([value])


def _sizes(size: int, sharded: bool) -> tuple[int, ...]:
    """The size of a tensor; of a sharded one, also the number of rows of its statistics."""
    return (size, min(size, 1)) if sharded else (size,)


def fine(flag: Emission) -> jax.Array:
    """A flag for the finiteness of tensors; true where they were not computed at all."""
    if flag.valid is None:
        return flag.value
    missing = ~flag.valid
    return flag.value | missing.reshape(missing.shape + (1,) * (flag.value.ndim - missing.ndim))


def _reduce_layers(want: Wanted, emission: Emission, frame: Frame) -> None:
    """Reduce each layer of a value that was collected whole, as a scan does for other values."""
    key, sharded = want.key, frame.ambient.sharded
    if want.reduce is None:
        size = math.prod(emission.value.shape[want.layers :])
        key = StatsKey(((want.key, *_sizes(size, sharded)),))
        reduce = functools.partial(_packed, whole_statistics if sharded else pack_statistics)
    else:
        reduce = whole_form(want.reduce) if sharded else want.reduce
    for _ in range(want.layers):
        # Once for each of the user's scans around it: their iterations are its leading dims.
        reduce = jax.vmap(reduce)
    frame.emit(key, reduce(emission.value), emission.valid)
