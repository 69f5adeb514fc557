"""Taps: requests to observe tensors of a step."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import check_count, member_named, member_of
from tailrace.base.messages import size_text
from tailrace.base.paths import check_path
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, SelectionError
from tailrace.jaxprs.array_trees import returning_arrays
from tailrace.jaxprs.walk import Position
from tailrace.taps.catalogue import Catalogue, Entry, Select, check_selection
from tailrace.taps.reductions import NUM_BINS, histogram, norm, row_lengths
from tailrace.taps.wanted import Wanted

MOST_BYTES = 1 << 30
"""The default limit of the bytes that the taps of one execution return."""


class Reduce(enum.StrEnum):
    """What a tap keeps of a tensor."""

    TENSOR = "tensor"
    STATS = "stats"
    HISTOGRAM = "histogram"
    NORM = "norm"

    @classmethod
    def _missing_(cls, value: object) -> Reduce:
        return member_named(cls, value, "reduce", also=", or a JAX function")


class Mode(enum.StrEnum):
    """Which values a tap keeps: all, their sum over an execution, or the last one of an execution."""

    ALL = "all"
    SUM = "sum"
    FINAL = "final"

    @classmethod
    def _missing_(cls, value: object) -> Mode:
        return member_named(cls, value, "mode", also=", or tr.every(n)")


@dataclasses.dataclass(frozen=True)
class Every:
    """Keep the values of steps n-1, 2n-1, ...; made by `tr.every(n)`."""

    n: int

    def __post_init__(self) -> None:
        n = check_count("n", self.n, at_least=1, error=OptionError, more=" in tr.every(n)")
        # As a plain int: NumPy integers would not compare or print like one.
        object.__setattr__(self, "n", n)


def every(n: int) -> Every:
    """A mode for taps: keep every n-th step (n-1, 2n-1, ...), with all its microbatches.

    Raises:
        OptionError: `n` is less than 1.

    >>> import tailrace as tr
    >>> tr.every(10)
    Every(n=10)
    """
    return Every(n)


@dataclasses.dataclass(frozen=True)
class Tap:
    """A request to observe tensors.

    Args:
        select: the tensors: a glob over names (`*` crosses `/`), `re.compile(...)`, a function of
            a catalogue entry, or a list of these.
        mode: "all" values, their "sum" over an execution, the "final" one of an execution, or
            `tr.every(n)` steps. Sum and final keep one record per execution.
        reduce: what to keep of each value: the "tensor", its "stats" (mean, std, min, max, NaN, Inf,
            fraction of zeros), a "histogram" of binary exponents, its "norm", or a JAX function.
        live: whether to deliver records while training runs, through `trainer.records.stream()`.
            Executions chosen by "auto" are then short; results are bit-equal.

    Raises:
        OptionError: `mode` or `reduce` is not a valid one.

    >>> import tailrace as tr
    >>> tr.Tap("grad/*", mode=tr.every(10)).reduce
    <Reduce.STATS: 'stats'>
    """

    select: Select
    mode: Mode | Every | str = Mode.ALL
    reduce: Reduce | str | Callable[[jax.Array], Tree] = Reduce.STATS
    live: bool = False

    def __post_init__(self) -> None:
        check_selection(self.select)
        if not isinstance(self.mode, Every):
            object.__setattr__(self, "mode", member_of(Mode, self.mode))
        if not callable(self.reduce):
            object.__setattr__(self, "reduce", member_of(Reduce, self.reduce))

    @property
    def kind(self) -> str:
        """The name that distinguishes its records from those of another tap on the same tensor."""
        if isinstance(self.reduce, Reduce):
            return str(self.reduce)
        return getattr(self.reduce, "__name__", "function")

    @property
    def period(self) -> int:
        """The number of steps between observations."""
        return self.mode.n if isinstance(self.mode, Every) else 1

    def wanted(self, key: Hashable, output: int, layers: int = 0) -> Wanted:
        """The request to the rewriter for one tensor, which is inside `layers` scans."""
        collect = "stack"
        if self.mode in (Mode.SUM, Mode.FINAL):
            collect = "sum" if self.mode is Mode.SUM else "final"
        return Wanted(key, output, self._function(), self.period > 1, collect, layers=layers)

    def _function(self) -> Callable[[jax.Array], Tree] | None:
        if self.reduce is Reduce.STATS:
            return None
        if self.reduce is Reduce.TENSOR:
            return lambda value: value
        if self.reduce is Reduce.NORM:
            return norm
        return histogram if self.reduce is Reduce.HISTOGRAM else self.reduce  # type: ignore[return-value]

    def nbytes(self, entry: Entry) -> int:
        """Bytes of one record of a tensor."""
        if self.reduce is Reduce.STATS:
            # Eight float32 for each row that leaves the device; the host merges them.
            return len(row_lengths(max(1, int(np.prod(entry.shape))))) * 32
        if self.reduce is Reduce.HISTOGRAM:
            return NUM_BINS * 4
        if self.reduce is Reduce.NORM:
            return 4
        if self.reduce is Reduce.TENSOR:
            return entry.nbytes
        own: Any = self.reduce
        reduce = returning_arrays(f"The function {self.kind!r} of a tap returns", own)
        out = jax.eval_shape(reduce, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(out))


@dataclasses.dataclass(frozen=True)
class StopOnNonfinite:
    """A guard: training stops at the first NaN or Inf; made by `tr.stop_on_nonfinite`."""

    select: Select
    on_nonfinite: str = "stop"
    limit: int = 10
    bundle: str | os.PathLike[str] | None = None

    # Constants of the class, not fields: they are read like those of a `Tap`, and no user may set them.
    period = 1
    mode = Mode.ALL
    kind = "finite"

    def __post_init__(self) -> None:
        check_selection(self.select)
        if self.on_nonfinite not in ("stop", "skip"):
            raise OptionError(
                f"on_nonfinite is 'stop' or 'skip'. Received: on_nonfinite={self.on_nonfinite!r}."
            )
        check_count("limit", self.limit, at_least=0, error=OptionError, more=" (steps)")
        if not self.skips and self.limit != StopOnNonfinite.limit:
            raise OptionError(
                f"limit is the number of steps that on_nonfinite='skip' may skip, and "
                f"on_nonfinite='stop' stops at the first. Received: limit={self.limit} with 'stop'. "
                f"Give on_nonfinite='skip' too, or leave limit out."
            )
        if self.bundle is not None:
            check_path("bundle", self.bundle)
            if self.skips:
                raise OptionError(
                    "A bundle is of the step that stops the training, and on_nonfinite='skip' goes on "
                    "after it. Give bundle= with on_nonfinite='stop', or look at a step that was "
                    "skipped with trainer.replay."
                )

    @property
    def skips(self) -> bool:
        """Whether bad steps are undone and training continues."""
        return self.on_nonfinite == "skip"

    def wanted(self, key: Hashable, output: int, layers: int = 0) -> Wanted:
        """The request to the rewriter: a check."""
        return Wanted(key, output, guard=True, skips=self.skips)

    def nbytes(self, entry: Entry) -> int:
        """Bytes of one flag."""
        return 1


@dataclasses.dataclass(frozen=True)
class GradientDigest:
    """The digest of the gradients that the optimizer receives in the last step of each execution."""

    select: Select = "reduced/*"

    period = 1
    mode = Mode.FINAL
    kind = "digest"

    def wanted(self, key: Hashable, output: int, layers: int = 0) -> Wanted:
        """The request to the rewriter for one gradient."""
        return Wanted(key, output, collect="last", digest=True)

    def nbytes(self, entry: Entry) -> int:
        """Bytes of one digest."""
        return 8


AnyTap: TypeAlias = Tap | StopOnNonfinite | GradientDigest
"""A request to observe tensors, of the user or of Tailrace itself."""

Observe: TypeAlias = (
    "Select | Tap | StopOnNonfinite | Iterable[Select | Tap | StopOnNonfinite] | None"
)
"""What users give as `observe=`: taps, or selections whose statistics are wanted; one or several."""


def stop_on_nonfinite(
    select: Select = ("loss", "grad/*"),
    on_nonfinite: str = "stop",
    limit: int = 10,
    bundle: str | os.PathLike[str] | None = None,
) -> StopOnNonfinite:
    """Stop training at the first NaN or Inf in the selected tensors; pass it in `observe=`.

    Args:
        select: the tensors.
        on_nonfinite: "stop", or "skip": a bad step changes no state, `history["skipped"]` lists it, and
            training continues.
        limit: with "skip", the number of steps of a fit that may be skipped before it stops. Of several
            guards the smallest limit counts; all of them skip, or all stop.
        bundle: with "stop", a new directory to write the bad step to: the state before it, its
            elements, seed and step; `trainer.replay_bundle` runs it on another machine. If it exists,
            the bundle is written beside it: `bundle-2`.

    The device checks every step, and the host reads the checks when an execution has ended. After a bad
    step, training returns to the start of that execution and runs the steps before the bad one again:
    the parameters are then those before that step, and `tr.errors.NonFiniteError` names the step,
    microbatch, tensor, operation and line. Executions in flight keep a copy of the state they started
    from. A guard that skips selects between old and new state in every step.

    Raises:
        OptionError: an argument has an invalid value.

    >>> import tailrace as tr
    >>> tr.stop_on_nonfinite("grad/*").select
    'grad/*'
    """
    # A list, so that each of its parts must match something: a guard that guards nothing is a mistake.
    select = list(select) if isinstance(select, tuple) else select
    return StopOnNonfinite(select, on_nonfinite, limit, bundle)


def guarding(observe: Observe, on_nonfinite: str | None) -> Observe:
    """The value of `observe=`, with the guard that `on_nonfinite=` requests."""
    if on_nonfinite is None:
        return observe
    return [*parse_taps(observe), stop_on_nonfinite(on_nonfinite=on_nonfinite)]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A tap, applied to one tensor of a program.

    Attributes:
        tap: the request.
        entry: the tensor.
        loops: the number of Tailrace loops around it (over steps, over microbatches).
        differs: whether it differs between replicas.
        microbatches: the number of its values per step.
        layers: the number of the user's scans around it.
    """

    tap: AnyTap
    entry: Entry
    loops: int
    differs: bool
    microbatches: int = 1
    layers: int = 0

    @functools.cached_property
    def key(self) -> tuple[str, str]:
        """The name of the tensor, and what is kept of it."""
        return (self.entry.name, self.tap.kind)


def parse_taps(observe: Observe) -> list[Tap | StopOnNonfinite]:
    """The value of `observe=` as taps; a bare selection means its statistics."""
    if observe is None:
        return []
    # A string is iterable too, but it is one selection.
    alone = isinstance(observe, str | Tap | StopOnNonfinite) or not isinstance(observe, Iterable)
    try:
        listed: list[Any] = [observe] if alone else list(cast(Iterable[Any], observe))
    except TypeError:  # a 0-d array
        listed = [observe]
    return [tap if isinstance(tap, Tap | StopOnNonfinite) else Tap(tap) for tap in listed]


def in_every_step(tap: Tap | StopOnNonfinite) -> Tap | StopOnNonfinite:
    """A tap without its period, for steps that are chosen in another way.

    >>> in_every_step(Tap("grad/*", mode=every(10))).mode
    <Mode.ALL: 'all'>
    """
    return (
        dataclasses.replace(tap, mode=Mode.ALL) if isinstance(tap, Tap) and tap.period > 1 else tap
    )


def refuse_guards(taps: Sequence[AnyTap], where: str) -> None:
    """Refuse guards where there is no trainer: nothing keeps the state from before a bad step."""
    if any(isinstance(tap, StopOnNonfinite) for tap in taps):
        raise OptionError(
            f"tr.stop_on_nonfinite guards the steps of a tr.Trainer, which returns to the state before "
            f"a bad step. In {where}, tap the tensors and look at their NaN counts."
        )


def common_period(taps: Sequence[AnyTap]) -> int:
    """The period that serves all periodic taps: the greatest common divisor of theirs."""
    # One loop structure serves all taps. With periods of 10 and 15 the device looks every 5 steps, and
    # the host drops what a tap did not ask for.
    periods = [tap.period for tap in taps if tap.period > 1]
    return math.gcd(*periods) if periods else 1


def choose(
    taps: Sequence[AnyTap], catalogue: Catalogue, describe: Callable[[Entry], tuple[Any, ...]]
) -> list[Chosen]:
    """Apply taps to a catalogue; `describe` gives the other fields of `Chosen` for an entry."""
    chosen: dict[tuple[str, str], Chosen] = {}
    for tap in taps:
        for entry in _numbers(catalogue.select(tap.select)):
            one = Chosen(tap, entry, *describe(entry))
            # Records are found by tensor and kind; a second one of the same would silently replace the
            # first.
            if one.key in chosen and chosen[one.key].tap != tap:
                if isinstance(tap, StopOnNonfinite):
                    continue  # guards of a trainer all stop or all skip: the flag is the same
                raise OptionError(
                    f"Two taps keep the same of one tensor: {one.key[0]!r} has {one.key[1]!r} "
                    f"twice, with different modes. Narrow one of the selections."
                )
            chosen[one.key] = one
    return list(chosen.values())


def _numbers(selected: Sequence[Entry]) -> list[Entry]:
    """The selected tensors without random keys, of which there is nothing to see; not only those."""
    found = [entry for entry in selected if not jnp.issubdtype(entry.dtype, jax.dtypes.extended)]
    if selected and not found:
        raise SelectionError(
            f"Taps observe numbers. Received a selection of random keys alone: "
            f"{', '.join(entry.name for entry in selected[:5])}. Observe jax.random.key_data(key)."
        )
    return found


def wanted_of(chosen: Sequence[Chosen]) -> dict[Position, list[Wanted]]:
    """What a rewriter must emit, by position."""
    found: dict[Position, list[Wanted]] = {}
    for one in chosen:
        want = one.tap.wanted(one.key, one.entry.output, one.layers)
        found.setdefault(one.entry.position, []).append(want)
    return found


def bytes_per_step(chosen: Sequence[Chosen], microbatches: int, replicas: int) -> float:
    """The bytes of the records of one step."""
    total = 0.0
    for one in chosen:
        # One value per execution, whatever its length, so it does not limit the length.
        if one.tap.mode in (Mode.SUM, Mode.FINAL):
            continue
        # Inside the second loop, over microbatches, a tensor has a value for each of them.
        count = (microbatches if one.loops > 1 else 1) * replicas
        total += one.tap.nbytes(one.entry) * count / one.tap.period
    return total


def check_bytes(
    chosen: Sequence[Chosen], steps: int, microbatches: int, replicas: int, most: int
) -> None:
    """Refuse taps that would return more bytes per execution than the limit."""
    per_step = bytes_per_step(chosen, microbatches, replicas)
    if per_step * steps > most:
        largest = max(chosen, key=lambda one: one.tap.nbytes(one.entry) / one.tap.period)
        raise OptionError(
            f"Taps would return {size_text(per_step * steps)} from one execution of {steps} steps with "
            f"{microbatches} microbatches, more than the limit of {size_text(most)}. The largest "
            f"is {largest.entry.name!r} ({largest.tap.kind}, "
            f"{largest.tap.nbytes(largest.entry):,} bytes a record). Look less often "
            f"(mode=tr.every(n), 'sum' or 'final'), keep less (reduce='stats'), use fewer "
            f"steps_per_execution (a shorter tr.repeat) or microbatches, or raise observe_bytes."
        )
