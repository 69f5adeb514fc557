"""The proof that a plan is correct, from its ticks alone.

It does not depend on how schedules are made. It reads the ticks in order, counts finished units, and
checks for every unit whether it may run now:

    every stage takes the microbatches in order, each once forward and once backward
    what a unit needs was finished in an earlier tick: the stage before it (forward), the stage
        after it and its own forward (backward)
    the stash slot that a forward writes was read by the backward of its last owner
    a device does no more in a tick than the schedule allows

Because the order is part of the rules, a count per stage and device is enough: the proof takes time
per unit and memory per stage.
"""

from collections import Counter

from tailrace.errors import PlanError
from tailrace.pipeline.drawing import grid
from tailrace.pipeline.schedule import stash
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.pipeline.schedule.units import Kind, Tick, Unit

_WORD = {"F": "forward", "B": "backward"}


def check(plan: PlannedTicks) -> None:
    """Raise a PlanError, with the place in the grid, unless the ticks keep every rule."""
    state = _Progress(plan)
    for t, tick in enumerate(plan.iter_ticks()):
        _check_crowding(plan, t, tick)
        for unit in tick:
            problem = state.problem(unit)
            if problem:
                raise _broken(plan, t, unit, problem)
            state.run(unit)
        state.end_tick(tick)
    _check_complete(plan, state)


class _Progress:
    """The units finished so far, and those that the next tick can depend on."""

    def __init__(self, plan: PlannedTicks) -> None:
        self.plan = plan
        self.devices = [tuple(dict.fromkeys(stage)) for stage in plan.placement]
        # The number of microbatches that each (kind, stage, device) has finished; and that the
        # whole stage had finished before this tick.
        self.done: Counter[tuple[str, int, int]] = Counter()
        self.visible: Counter[tuple[str, int]] = Counter()

    def run(self, unit: Unit) -> None:
        self.done[unit.kind, unit.stage, unit.device] += 1

    def end_tick(self, tick: Tick) -> None:
        for kind, stage in {(unit.kind, unit.stage) for unit in tick}:
            # A concurrent stage has finished a microbatch when its last member has.
            self.visible[kind, stage] = min(
                self.done[kind, stage, device] for device in self.devices[stage]
            )

    def problem(self, unit: Unit) -> str | None:
        """A sentence about the rule that this unit breaks, or None."""
        return (
            self._misplaced(unit)
            or self._out_of_turn(unit)
            or (self._early_forward(unit) if unit.kind == "F" else self._early_backward(unit))
            or (self._overwrites(unit) if unit.kind == "F" else None)
        )

    def _misplaced(self, unit: Unit) -> str | None:
        plan = self.plan
        if not 0 <= unit.stage < plan.stages:
            return f"there is no stage {unit.stage}; stages are 0 to {plan.stages - 1}"
        if not 0 <= unit.microbatch < plan.microbatches:
            return (
                f"there is no microbatch {unit.microbatch}; they are 0 to {plan.microbatches - 1}"
            )
        if unit.device not in self.devices[unit.stage]:
            home = " and ".join(map(str, self.devices[unit.stage]))
            return f"stage {unit.stage} is on device {home}, not on device {unit.device}"
        if unit.kind == "B" and not plan.training:
            return "an inference plan has no backward"
        return None

    def _out_of_turn(self, unit: Unit) -> str | None:
        expected = self.done[unit.kind, unit.stage, unit.device]
        if unit.microbatch < expected:
            return f"it has run already: each {_WORD[unit.kind]} runs exactly once"
        if unit.microbatch > expected:
            return (
                f"microbatch {expected} has not run yet: a stage takes microbatches in order, "
                "each exactly once"
            )
        return None

    def _early_forward(self, unit: Unit) -> str | None:
        plan, stage, microbatch = self.plan, unit.stage, unit.microbatch
        if stage and self.visible["F", stage - 1] <= microbatch:
            return f"it needs the forward of stage {stage - 1}, finished in an earlier tick"
        if plan.schedule is PipelineSchedule.SEQUENTIAL and stage == 0:
            last = ("B", 0) if plan.training else ("F", plan.stages - 1)
            if self.visible[last] < microbatch:
                return f"microbatch {microbatch - 1} is still in flight: Sequential runs one alone"
        return None

    def _early_backward(self, unit: Unit) -> str | None:
        stage, microbatch, last = unit.stage, unit.microbatch, self.plan.stages - 1
        # The loss needs the outputs of every member of the last stage.
        needs, where = (("B", stage + 1), "backward") if stage < last else (("F", last), "forward")
        if self.visible["F", stage] <= microbatch:
            return f"it needs the forward of its own stage {stage}, finished in an earlier tick"
        if self.visible[needs] <= microbatch:
            return f"it needs the {where} of stage {needs[1]}, finished in an earlier tick"
        return None

    def _overwrites(self, unit: Unit) -> str | None:
        if not self.plan.training:
            return None
        # Backwards of this tick count: they come before its forwards, so that a slot may be read and
        # written again in one tick.
        slots = stash.slots(self.plan, unit.stage)
        owner = unit.microbatch - slots
        if owner >= self.done["B", unit.stage, unit.device]:
            return (
                f"it overwrites stash slot {unit.microbatch % slots} of stage {unit.stage} "
                f"({slots} slots), which microbatch {owner} still needs for its backward"
            )
        return None


def _check_crowding(plan: PlannedTicks, t: int, tick: Tick) -> None:
    """Refuse more work in a tick than the schedule allows."""
    # A schedule also limits the work per tick, which the stash and the executor rely on: units that
    # could run, but not together, are refused.
    seen: dict[tuple[object, ...], Unit] = {}
    for unit in tick:
        if plan.schedule is PipelineSchedule.GROUPED:
            place: tuple[object, ...] = (unit.device, unit.stage, unit.kind)
            rule = "Grouped allows one forward and one backward of a stage on a device in a tick"
        else:
            place = (unit.device,)
            rule = f"{plan.schedule.value.capitalize()} allows one unit on a device in a tick"
        if place in seen:
            raise _broken(plan, t, unit, f"{rule}, and {seen[place]} is there too")
        seen[place] = unit
        if plan.schedule is PipelineSchedule.SEQUENTIAL and unit[1:] != tick[0][1:]:
            problem = f"Sequential runs one stage at a time, and {tick[0]} is there too"
            raise _broken(plan, t, unit, problem)


def _check_complete(plan: PlannedTicks, state: _Progress) -> None:
    kinds: tuple[Kind, ...] = ("F", "B") if plan.training else ("F",)
    for kind in kinds:
        for stage, devices in enumerate(state.devices):
            for device in devices:
                missing = state.done[kind, stage, device]
                if missing < plan.microbatches:
                    unit = Unit(device, kind, stage, missing)
                    raise _incomplete(plan, unit)


def _incomplete(plan: PlannedTicks, unit: Unit) -> PlanError:
    """The error for a unit that no tick has; the arrow points at the end, where it is missing."""
    picture = grid.draw_around(plan, plan.num_ticks - 1, unit.device)
    return PlanError(
        f"The plan ends before its work is done: {_name(unit)} never runs, and each "
        f"{_WORD[unit.kind]} runs exactly once.\n\n{picture}\n\nAdd that unit, or use the ticks "
        "that `plan(...)` makes."
    )


def _broken(plan: PlannedTicks, t: int, unit: Unit, problem: str) -> PlanError:
    """The error for one broken rule, with the neighbourhood in the grid and an arrow."""
    picture = grid.draw_around(plan, t, unit.device)
    return PlanError(
        f"The plan breaks a rule in tick {t}: {_name(unit)} cannot be there, because {problem}."
        f"\n\n{picture}\n\nMove or remove that unit, or use the ticks that `plan(...)` makes."
    )


def _name(unit: Unit) -> str:
    return (
        f"the {_WORD[unit.kind]} of microbatch {unit.microbatch} at stage {unit.stage} on device "
        f"{unit.device} ({unit})"
    )
