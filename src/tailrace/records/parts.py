"""The emissions of one execution for one tap, and how they become a record.

    emission  [replica,] step [, microbatch] [, layers ...], value
    record    one row per value, in the order in which they were computed; the leading dims are tags

Emissions come from the device padded, interleaved by replica and, for periodic taps, at the common
period of all taps. A `Part` keeps them so while a training runs; `record` puts them in order when they
are read, if they ever are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from tailrace.records.record import Record
from tailrace.taps.float_bits import LIMITS
from tailrace.taps.reductions import STATS, row_lengths
from tailrace.taps.tap import Chosen, Mode

PER_MICROBATCH = ("input", "buffer", "activation", "cotangent", "loss", "output", "aux", "grad")
"""Kinds of tensors that exist per microbatch, even if a step has only one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The emissions of one execution for one tap, unprocessed: the training loop must not wait.

    Attributes:
        one: the tap and the tensor.
        value: [replica,] step [, microbatch], then layers of scans, then the value.
        valid: flags of the entries that were computed; None for all.
        size: the number of values of the tensor, if `value` is partial statistics; -1 otherwise.
        first_step: the index of the first step of the execution.
        steps: the number of its steps.
        replicas: the number of replicas.
        period: periodic values exist for the last of every `period` steps.
        ends: the last step of each execution, if several were joined and the tap has one value per
            execution; the value then has an axis of executions instead of steps.
    """

    one: Chosen
    value: Any
    valid: Any
    size: int
    first_step: int
    steps: int
    replicas: int
    period: int
    ends: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The tensor."""
        return self.one.entry.name

    @property
    def kind(self) -> str:
        """What the tap keeps of it."""
        return self.one.tap.kind

    @property
    def collected(self) -> bool:
        """Whether there is one value per execution."""
        return self.one.tap.mode in (Mode.SUM, Mode.FINAL)

    def record(self) -> Record:
        """The finished record: flat, tagged, statistics merged."""
        one, value, valid, replicas = self.one, self.value, self.valid, self.replicas
        several = replicas > 1
        # A collected value has no loop dims, or one: that of the executions that were joined.
        loops = len(self.ends[:1]) if self.collected else one.loops
        # Equal on all replicas, as the program shows: one copy is recorded, without a replica.
        if several and not one.differs:
            value = jax.tree.map(lambda v: v[0], value)
            valid = valid[0] if valid is not None else None
            several = False
        if several:
            # Behind the steps: rows are then in the order in which values were computed.
            value = jax.tree.map(lambda v: np.moveaxis(v, 0, loops), value)
            valid = np.moveaxis(np.asarray(valid), 0, loops) if valid is not None else None
        tags = self._tags(np.shape(jax.tree.leaves(value)[0])[:loops], replicas if several else 1)
        count = len(tags[0])
        flat = jax.tree.map(lambda v: v.reshape(count, *v.shape[loops + several :]), value)
        keep, ran = None, None
        if valid is not None:
            made = np.asarray(valid)
            made = made.reshape(count, *made.shape[loops + several :])
            # A row is kept if any of its layers took the branch; `ran` says which ones did.
            keep = made.reshape(count, -1).any(axis=1)
            ran = made if made.ndim > 1 else None
        # All periodic taps are observed at a common period; this one asked for some of those steps.
        if one.tap.period > 1:
            seen = (tags[0] + 1) % one.tap.period == 0
            keep = seen if keep is None else keep & seen
        if keep is not None:
            flat = jax.tree.map(lambda v: v[keep], flat)
            tags = tuple(tag[keep] for tag in tags)
            ran = None if ran is None else ran[keep]
        if self.size >= 0:
            flat = merge_statistics(flat, self.size)
        elif keep is None:  # a copy: the device's buffer is read-only and larger
            flat = jax.tree.map(np.array, flat)
        steps, microbatches, of_replica = tags
        # A sum over an execution belongs to no microbatch.
        own = one.tap.mode is not Mode.SUM and (loops > 1 or one.entry.kind in PER_MICROBATCH)
        return Record(
            self.name,
            self.kind,
            flat,
            steps,
            microbatches if own else _filled(len(steps), -1),
            of_replica if several else _filled(len(steps), -1),
            _filled(len(steps), one.entry.stage),
            ran,
        )

    def _tags(self, counts: tuple[int, ...], replicas: int) -> tuple[np.ndarray, ...]:
        """Step, microbatch and replica of each value, in order; shared by the tensors of a step."""
        made, start, stride = counts[0] if counts else 1, self.first_step, 1
        if not counts and self.collected:  # one value per execution has the tag of its last step
            start += self.steps - 1
        elif self.one.tap.period > 1 and self.period > 1:
            # Looks are at fixed steps of the training, wherever this execution began.
            start, stride = start + self.period - 1 - start % self.period, self.period
        first, count = 0, math.prod(counts[1:])
        if self.one.tap.mode is Mode.FINAL:  # the last microbatch of the last step
            first, count = self.one.microbatches - 1, 1
        at = self.ends or range(start, start + stride * made, stride)
        return _grid(at, first, count, replicas)


@functools.lru_cache(maxsize=8)
def _grid(
    at: range | tuple[int, ...], microbatch: int, microbatches: int, replicas: int
) -> tuple[np.ndarray, ...]:
    """Step, microbatch and replica of all values of the steps `at`; read-only."""
    # Cached by what decides them: the tensors of a step have the same tags, and there may be hundreds.
    steps = np.arange(at.start, at.stop, at.step) if isinstance(at, range) else np.array(at)
    micro = microbatch + np.arange(microbatches)
    grid = np.meshgrid(steps, micro, np.arange(replicas), indexing="ij")
    return tuple(_for_reading(axis.reshape(-1)) for axis in grid)


@functools.lru_cache(maxsize=8)
def _filled(count: int, value: int) -> np.ndarray:
    return _for_reading(np.full(count, value))


def forget_tags() -> None:
    """Drop cached tags: those of long executions are megabytes."""
    _grid.cache_clear()
    _filled.cache_clear()


def _for_reading(shared: np.ndarray) -> np.ndarray:
    # Many records share one array of tags: a user who writes to it would change the others.
    shared.flags.writeable = False
    return shared


def merge_statistics(partial: np.ndarray, size: int) -> np.ndarray:
    """Statistics of a tensor of `size` values, from its rows: [..., rows, 8] to [...]."""
    # Make each quantity contiguous: the sums below would otherwise stride over every eighth number.
    parts = np.ascontiguousarray(np.moveaxis(partial, -1, 0)).astype(np.float64)
    _, _, low, high, nan, inf, zero, _ = parts
    # All of this in float64: sums over many rows would lose digits in float32.
    # A tensor that was sharded has one row, whatever its size.
    lengths = np.array([size]) if partial.shape[-2] == 1 else row_lengths(size)
    count = lengths.astype(np.float64) - nan - inf
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        total, squares, shift, unit = _in_units(parts, partial.dtype.itemsize)
        mean = shift + np.where(count > 0, total / count, 0)
        spread = np.maximum(squares - np.where(count > 0, total**2 / count, 0), 0)
        whole = count.sum(-1)
        overall = (mean * count).sum(-1) / whole
        between = (count * (mean - overall[..., None]) ** 2).sum(-1)
        variance = (spread.sum(-1) + between) / whole
        out = np.empty(overall.shape, STATS)
        out["mean"], out["std"] = overall / unit, np.sqrt(variance) / unit
        out["min"] = np.where(whole > 0, low.min(-1, initial=np.inf), np.nan)
        out["max"] = np.where(whole > 0, high.max(-1, initial=-np.inf), np.nan)
        out["nan"], out["inf"] = nan.sum(-1), inf.sum(-1)
        out["zero"] = zero.sum(-1) / max(size, 1)
    return out


def _in_units(
    parts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | float]:
    """Sums, sums of squares and shifts of rows in a unit of their tensor, and that unit.

    Rows at the ends of the range were scaled on the device. In float64 every sum of float32 has its
    place; those of float64 do not, so each tensor is measured by its largest value.
    """
    total, squares, low, high, *_, shift = parts
    limits, ratio, unit = LIMITS[width], 1.0, 1.0
    size = np.where(low <= high, np.maximum(np.abs(low), np.abs(high)), 0)
    if width == 8:
        exponent = np.frexp(size.max(-1, initial=0))[1]
        unit = np.ldexp(1.0, np.clip(-exponent, -1000, 1000))
        shift, ratio = shift * unit[..., None], unit[..., None]
    if (squares < 0).any():
        ratio = ratio / np.where(squares < 0, np.where(size < 1, limits.up, limits.down), 1.0)
    elif width == 4:
        return total, squares, shift, unit
    return total * ratio, np.abs(squares) * ratio * ratio, shift, unit
