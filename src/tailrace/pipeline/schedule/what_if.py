"""What if it were another schedule, count, cut, or number of devices: a table of answers."""

import html
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tailrace.base.checks import check_number
from tailrace.errors import PlanError
from tailrace.pipeline.balance_cuts import balanced_cut, stage_sums
from tailrace.pipeline.schedule.costs import is_list
from tailrace.pipeline.schedule.device_mapping import read_flag, whole_number
from tailrace.pipeline.schedule.plan import Plan, plan
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.pipeline.schedule.simulator import Simulation, SimulationMode

_QUESTION = ("stages", "devices", "schedule", "mode", "count")
_ANSWER = ("time", "each", "speedup", "bubble", "ramps", "stash")
_COLUMNS = _QUESTION + _ANSWER


@dataclass(frozen=True)
class Case:
    """One result of `what_if`: a plan and its predicted cost, or why it is impossible.

    Attributes:
        stages: the number of stages.
        devices: the number of devices.
        schedule: the schedule.
        mode: how devices are synchronized.
        microbatches: the number of microbatches.
        cut: where the layers are cut.
        plan: the plan; None if the schedule cannot run.
        simulation: its predicted time; None if the schedule cannot run.
        speedup: the speedup over all layers on one device, for the same microbatches.
        stash_bytes: on the device with the most, if sizes were given.
        problem: why there is no result, or None.
    """

    stages: int
    devices: int
    schedule: PipelineSchedule
    mode: SimulationMode
    microbatches: int
    cut: tuple[int, ...]
    plan: Plan | None = None
    simulation: Simulation | None = None
    speedup: float = 0.0
    stash_bytes: int | None = None
    problem: str | None = None

    @property
    def per_microbatch(self) -> float:
        """The time per microbatch; infinite if there is no result."""
        return self.simulation.total / self.microbatches if self.simulation else float("inf")

    def cells(self) -> list[str]:
        """The row of this case, as text."""
        question = [self.stages, self.devices, self.schedule, self.mode, self.microbatches]
        if self.simulation is None or self.plan is None:
            return [*map(str, question), f"no: {self.problem}"]
        stash = f"{self.plan.stash_total}"
        if self.stash_bytes is not None:
            stash += f" ({self.stash_bytes} B peak)"
        return [
            *map(str, question),
            f"{self.simulation.total:.6g}",
            f"{self.per_microbatch:.4g}",
            f"{self.speedup:.2f}",
            f"{self.simulation.bubble * 100:.1f} %",
            f"{self.simulation.ramp_share * 100:.1f} %",
            stash,
        ]


@dataclass(frozen=True)
class WhatIf:
    """The cases of a comparison, fastest per microbatch first; those that cannot run last."""

    cases: tuple[Case, ...]

    @property
    def best(self) -> Case:
        """The fastest case."""
        if not self.cases or self.cases[0].simulation is None:
            raise PlanError("None of the cases can run; print the table to see why.")
        return self.cases[0]

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def __len__(self) -> int:
        return len(self.cases)

    def __str__(self) -> str:
        rows = [list(_COLUMNS), *(case.cells() for case in self.cases)]
        # The reason why a case cannot run is long and comes last: it does not count for widths.
        full = [row for row in rows if len(row) == len(_COLUMNS)]
        widths = [max(len(row[i]) for row in full) for i in range(len(_COLUMNS))]
        for row in rows:
            for i, cell in enumerate(row[: len(_QUESTION)]):
                widths[i] = max(widths[i], len(cell))
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=False)) for r in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body: list[str] = []
        for case in self.cases:
            cells = case.cells()
            span = len(_COLUMNS) - len(cells) + 1
            *first, last = (html.escape(cell) for cell in cells)
            row = "".join(f"<td>{cell}</td>" for cell in first)
            body.append(f"<tr>{row}<td colspan={span}>{last}</td></tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def what_if(
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    *,
    microbatches: int | Sequence[int] = 16,
    schedules: Iterable[PipelineSchedule | str] = tuple(PipelineSchedule),
    stages: int | Sequence[int] | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    devices: int | Sequence[int] | None = None,
    modes: Iterable[SimulationMode | str] = (SimulationMode.GATED,),
    transfer: float = 0.0,
    update: float | Sequence[float] = 0.0,
    stash_bytes: Sequence[int] | None = None,
    training: bool = True,
) -> WhatIf:
    """Compare pipelines of one model: every combination of the given options.

    Args:
        forward: the time of one forward of each layer (or of each stage, if none are joined).
        backward: likewise; twice the forward if not given.
        microbatches: the counts to try.
        schedules: the schedules to try.
        stages: numbers of stages to try; layers are joined so that the slowest stage is as fast as
            possible.
        cuts: cuts to try, each with the first layer of every stage after the first. Without `stages`
            and `cuts`, each layer is a stage.
        devices: numbers of devices to try; neighbouring stages share one where there are fewer
            devices than stages. Without it, each stage has a separate device.
        modes: how devices are synchronized; "free" shows the cost of a common clock.
        transfer: the time of one transfer between devices.
        update: the time of the update of a layer; a number for all, or one for each.
        stash_bytes: the residuals of one microbatch at each layer.
        training: whether there is a backward.

    Returns:
        A table that prints, with `.best` and `.cases`. "each" is the time for a microbatch,
        "ramps" the share of ramp-up and ramp-down, "stash" microbatches held over all devices. A
        combination that a schedule refuses is in the table, with the reason.

    Raises:
        PlanError: an argument has an invalid value, or none for each layer.

    >>> import tailrace as tr
    >>> table = tr.what_if([1.0] * 8, microbatches=[8, 32], stages=[2, 4], schedules=["grouped"])
    >>> print(table)
    stages  devices  schedule  mode   count  time  each   speedup  bubble  ramps    stash
    4       4        grouped   gated  32     210   6.562  3.66     8.6 %   31.4 %   16
    4       4        grouped   gated  8      66    8.25   2.91     27.3 %  100.0 %  16
    2       2        grouped   gated  32     396   12.38  1.94     3.0 %   15.2 %   4
    2       2        grouped   gated  8      108   13.5   1.78     11.1 %  55.6 %   4
    >>> table.best.cut
    (2, 4, 6)
    """
    training = read_flag(training, "training")
    forward = _times("forward", forward)
    if not forward:
        raise PlanError(
            "`forward` has the time of each layer, and there is at least one; received []."
        )
    back = [2.0 * time for time in forward] if backward is None else _times("backward", backward)
    if not training:
        back = [0.0] * len(forward)
    single = isinstance(update, int | float | np.number)
    updates = _times("update", [update] * len(forward) if single else update)
    if stash_bytes is not None:
        stash_bytes = [int(size) for size in _times("stash_bytes", stash_bytes)]
    for name, given in (("backward", back), ("update", updates), ("stash_bytes", stash_bytes)):
        if given is not None and len(given) != len(forward):
            raise PlanError(
                f"`{name}` has one value for each layer: received {len(given)} for "
                f"{len(forward)} layers."
            )
    alone = sum(forward) + sum(back)
    cases: list[Case] = []
    for cut, schedule, mode, count in itertools.product(
        _all_cuts(np.add(forward, back).tolist(), stages, cuts),
        map(PipelineSchedule.parse, _listed("schedules", schedules)),
        map(SimulationMode.parse, _listed("modes", modes)),
        _several("microbatches", microbatches),
    ):
        for number in _several("devices", devices) if devices is not None else [len(cut) + 1]:
            case = Case(len(cut) + 1, number, schedule, mode, count, cut)
            layers = _Layers(forward, back, updates, stash_bytes, transfer, training, alone)
            cases.append(layers.answer(case))
    # Per microbatch, so that counts can be compared; cases that cannot run have infinity and come last.
    return WhatIf(tuple(sorted(cases, key=lambda case: case.per_microbatch)))


@dataclass(frozen=True)
class _Layers:
    """The model that all cases share."""

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    stash_bytes: Sequence[int] | None
    transfer: float
    training: bool
    alone: float

    def answer(self, case: Case) -> Case:
        """The case with its simulation, or with the reason why it cannot run."""
        question = (
            case.stages, case.devices, case.schedule, case.mode, case.microbatches, case.cut,
        )  # fmt: skip
        try:
            made = plan(
                case.stages,
                case.microbatches,
                case.schedule,
                _folded(case.stages, case.devices),
                self.training,
            )
        except PlanError as error:  # a row of the table, with the reason in place of a result
            return Case(*question, problem=re.split(r"\. |, because", str(error))[0])
        simulation = made.simulate(
            stage_sums(self.forward, case.cut),
            stage_sums(self.backward, case.cut) if self.training else None,
            self.transfer,
            stage_sums(self.update, case.cut),
            case.mode,
        )
        # For the same work: one device pays the update of all layers too, but no transfer and no ramp.
        one_device = case.microbatches * self.alone + sum(self.update)
        peak = None
        if self.stash_bytes is not None:
            sizes = [int(size) for size in stage_sums(self.stash_bytes, case.cut)]
            peak = made.stash_bytes(sizes).peak
        speedup = one_device / simulation.total if simulation.total else 0.0
        return Case(*question, made, simulation, speedup, peak)


def _all_cuts(
    costs: list[float], stages: int | Sequence[int] | None, cuts: Sequence[Sequence[int]] | None
) -> list[tuple[int, ...]]:
    found = [tuple(_several("cuts", cut)) for cut in _listed("cuts", () if cuts is None else cuts)]
    several = _several("stages", () if stages is None else stages)
    found += [balanced_cut(costs, number) for number in several]
    if stages is None and cuts is None:
        found.append(tuple(range(1, len(costs))))
    for cut in found:
        stage_sums(costs, cut)  # refuses an invalid cut
    # A cut may be asked for twice, by `stages` and by `cuts`.
    return list(dict.fromkeys(found))


def _several(name: str, value: object) -> list[int]:
    """One whole number, or several."""
    several: Sequence[Any] = value if is_list(value) else [value]
    return [whole_number(one, name) for one in several]


def _times(name: str, given: object) -> list[float]:
    return [check_number(name, time, error=PlanError) for time in _listed(name, given)]


def _listed(name: str, given: object) -> list[Any]:
    """The given values as a list; refuses text and numbers."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise PlanError(f"`{name}` is a list; received {given!r}.")
    try:
        return list(cast(Iterable[Any], given))
    except TypeError as error:  # a 0-d array
        raise PlanError(f"`{name}` is a list; received {given!r}.") from error


def _folded(stages: int, devices: int) -> list[int]:
    """Stages on fewer devices: neighbours share one."""
    if not 1 <= devices <= stages:
        raise PlanError(
            f"There are between one device and one for each stage: {devices} devices cannot be "
            f"shared out to {stages} stages"
        )
    return [stage * devices // stages for stage in range(stages)]
