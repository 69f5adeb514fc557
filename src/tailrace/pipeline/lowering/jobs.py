"""What each unit does with one microbatch, and which values go from unit to unit.

In: a plain step. The body of its loop over microbatches consists of calls that name their units
(`stage.py`) and of *free* equations, which depend on the element, the counters and constants alone.
Out: a `Job` for each unit: the calls it runs, the carried values it owns, what it receives and sends,
what it takes from the stash and puts there.

A value that another unit needs travels from neighbour to neighbour; from a forward to the backward of
the same stage it is stashed. Free equations are repeated in each unit that needs them: each
device has the elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tailrace.errors import PipelineError
from tailrace.jaxprs.control import as_scan, scan_of
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Literal, Var, variables
from tailrace.jaxprs.own_equations import has_role, unit_in
from tailrace.jaxprs.stretches import makers, used_by
from tailrace.jaxprs.walk import concerns_us
from tailrace.pipeline.lowering.stage import AHEAD, Who


@dataclasses.dataclass(eq=False)
class Job:
    """What one unit does with one microbatch.

    Attributes:
        who: the unit.
        equations: their indices in the body, in order.
        copies: those of them that another job also runs; that job has their effects (what taps and
            outfeeds see).
        carries: the carried values that it owns, by number. Only this unit reads them and writes those
            that change.
        receives: variables in the message of another unit.
        sends: variables sent to another unit.
        takes: variables read from the stash.
        puts: variables written to the stash.
    """

    who: Who
    equations: list[int] = dataclasses.field(default_factory=list)
    copies: set[int] = dataclasses.field(default_factory=set)
    carries: list[int] = dataclasses.field(default_factory=list)
    receives: dict[Who, list[Any]] = dataclasses.field(default_factory=dict)
    sends: dict[Who, list[Any]] = dataclasses.field(default_factory=dict)
    takes: list[Any] = dataclasses.field(default_factory=list)
    puts: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.equations or self.receives or self.sends or self.takes or self.puts)


class Jobs:
    """The loop over microbatches of a step, as jobs.

    Args:
        steps: the equation of the loop over steps.

    Attributes:
        index: the index of the loop over microbatches in the body of that loop.
        loop: its equation.
        body: its body.
        microbatches: the number of microbatches per step.
        sizes: the number of members of each stage.
        carry_in: the variables of carried values at the start of a microbatch; `carry_out` at its end.
        outside: for each constant of the body, its variable (or literal) outside.
        starts: the variables (or literals) outside of the initial carried values.
        jobs: by unit, in the order in which a microbatch passes them.
        loose: carried values, by number, that depend on elements alone (the sum of weights): they are
            computed before all jobs.
        ahead: the equations that do this.
        from_ahead: variables they compute for jobs, one value per microbatch.
    """

    def __init__(self, steps: JaxprEqn) -> None:
        step = as_scan(steps).body.jaxpr
        self.index = _loop_of_units(step)
        self.loop: JaxprEqn = step.eqns[self.index]
        scan = as_scan(self.loop)
        self.body: Jaxpr = scan.body.jaxpr
        self.microbatches = scan.length
        self.consts, self.carried = scan.num_consts, scan.num_carry
        _, self.carry_in, _ = scan.split(self.body.invars)
        self.carry_out, _ = scan.split_results(self.body.outvars)
        self.outside = dict(zip(self.body.invars[: self.consts], self.loop.invars, strict=False))
        self.starts = self.loop.invars[self.consts : self.consts + self.carried]
        self._home: dict[int, Who] = {
            index: unit.who
            for index, eqn in enumerate(self.body.eqns)
            if (unit := unit_in(eqn)) is not None
        }
        self.sizes = _sizes(self._home.values())
        self.jobs: dict[Who, Job] = {who: Job(who) for who in self._order()}
        for index, who in self._home.items():
            if who != AHEAD:
                self.jobs[who].equations.append(index)
        self._made: dict[Any, int] = makers(self.body.eqns)
        # In this order: carried values get their owners, or are computed ahead; free equations are
        # copied to the units that need them; only what a unit still lacks has to be sent there.
        self._own_carried()
        self._run_ahead()
        self._copy_free_equations()
        self._route()

    def owner(self, carry: int) -> Who | None:
        """The unit that owns a carried value; None if no unit uses it."""
        return self._owner.get(carry)

    def programs(self, who: Who) -> list[Any]:
        """The calls of a unit: the forward or backward of its stage, and the calls around it."""
        units = filter(None, map(unit_in, self.body.eqns))
        return [unit.program for unit in units if unit.who == who]

    def constants(self, equations: Iterable[int]) -> list[Any]:
        """The variables from outside the loop that some equations use, without carried values."""
        used = used_by(self.body.eqns[i] for i in equations)
        return [self.outside[var] for var in used if var in self.outside]

    def _order(self) -> Iterable[Who]:
        """All units, in the order in which a microbatch passes them."""
        stages = range(len(self.sizes))
        yield from (("F", s, m) for s in stages for m in range(self.sizes[s]))
        # A forward pipeline (evaluation, prediction) has no backwards at all.
        if any(kind == "B" for kind, _, _ in self._home.values()):
            yield from (("B", s, m) for s in reversed(stages) for m in range(self.sizes[s]))

    # -- which equations a unit runs ------------------------------------------------------------

    def _own_carried(self) -> None:
        """A carried value belongs to the unit that reads it first, which must also write it."""
        self._number = {var: number for number, var in enumerate(self.carry_in)}
        self._owner: dict[int, Who] = {}
        for who, job in self.jobs.items():
            for var in used_by(self.body.eqns[i] for i in job.equations):
                if var in self._number:
                    self._owner.setdefault(self._number[var], who)
        # Two units would see each other's values in the order of ticks, not of microbatches: only one
        # unit may keep a value from one microbatch to the next.
        for number, var in enumerate(self.carry_out):
            if isinstance(var, Literal) or var not in self._made:
                continue  # it does not change
            writer = self._home[self._made[var]]
            if writer == AHEAD:
                continue
            reader = self._owner.setdefault(number, writer)
            if reader != writer:
                raise PipelineError(
                    f"Model state is read and written by one stage. Leaf {number} of what the loop "
                    f"carries is read first in stage {reader[1]} and written in stage {writer[1]}. "
                    f"Update it where it is read, or give each stage its own."
                )
        for number, who in self._owner.items():
            self.jobs[who].carries.append(number)

    def _run_ahead(self) -> None:
        eqns = self.body.eqns
        # They run for all microbatches before the first tick, on all devices alike: in the order of
        # ticks, the backward of one microbatch could come before the element of the one before it.
        units = [index for index, who in self._home.items() if who == AHEAD]
        self.ahead = sorted({*units, *self._free_for(units)})
        self.from_ahead = [var for index in units for var in eqns[index].outvars]
        self.loose = sorted(
            self._number[v] for v in used_by(eqns[i] for i in units) if v in self._number
        )

    def _copy_free_equations(self) -> None:
        """Add to each job the free equations that it needs.

        The first job also gets those that send something out, used by a job or not: it is sent once.
        """
        free = [
            i for i, eqn in enumerate(self.body.eqns) if i not in self._home and concerns_us(eqn)
        ]
        first, *others = self.jobs.values()
        first.equations = sorted(
            {*first.equations, *free, *self._free_for([*first.equations, *free])}
        )
        for job in others:
            if job.equations:
                job.copies = self._free_for(job.equations)
                job.equations = sorted({*job.equations, *job.copies})

    def _free_for(self, equations: Iterable[int]) -> set[int]:
        """The free equations behind the operands of some equations, and the loop's counter."""
        eqns = self.body.eqns
        waiting = list(equations)
        found = {i for i, eqn in enumerate(eqns) if has_role(eqn, "loop")} if waiting else set()
        while waiting:
            for var in variables(eqns[waiting.pop()].invars):
                made = self._made.get(var)
                if made is not None and made not in self._home and made not in found:
                    found.add(made)
                    waiting.append(made)
        return found

    # -- which values pass between units --------------------------------------------------------

    def _route(self) -> None:
        # Results of the units that run ahead are not routed: every device computes them itself.
        made: dict[Any, Who] = {
            var: who
            for index, who in self._home.items()
            if who != AHEAD
            for var in self.body.eqns[index].outvars
        }
        made.update((self.carry_in[number], who) for number, who in self._owner.items())
        for who, job in self.jobs.items():
            for var in used_by(self.body.eqns[i] for i in job.equations):
                if var in made and made[var] != who:
                    self._send(var, made[var], who)

    def _send(self, var: Var, start: Who, end: Who) -> None:
        # A value that several units need travels once: it is added to each message on the way that
        # does not have it yet, and the units on the way read it there.
        here = start
        for there in self._path(start, end):
            sender, receiver = self.jobs[here], self.jobs[there]
            # Same stage and member: from its forward to its backward, so on one device, many ticks
            # apart.
            if here[1:] == there[1:]:
                if var not in sender.puts:
                    sender.puts.append(var)
                    receiver.takes.append(var)
            elif var not in receiver.receives.setdefault(here, []):
                receiver.receives[here].append(var)
                sender.sends.setdefault(there, []).append(var)
            here = there

    def _path(self, start: Who, end: Who) -> Iterable[Who]:
        """The units that a value passes on its way, without the first.

        Forwards send to forwards and backwards to backwards, one stage at a time. From a forward to a
        backward a value passes through the stash of one stage: that of the receiver, or that of the
        producer if the receiver is an earlier stage.
        """
        (kind, stage, member), (end_kind, end_stage, end_member) = start, end
        if end_kind == "F" or (kind == "F" and stage < end_stage) or start[1:] == end[1:]:
            yield from _through("F", range(stage + 1, end_stage + 1), end_member)
            if end_kind == "B":
                yield end
            return
        if kind == "F":
            if stage == end_stage:  # another member of the same stage: through the next stage
                stage, member = stage + 1, 0
                # Members of a group have no messages between them; both have a path to the next stage.
                yield ("F", stage, member)
            yield ("B", stage, member)
        yield from _through("B", range(stage - 1, end_stage - 1, -1), end_member)


def _through(kind: str, stages: range, member: int) -> Iterable[Who]:
    """Units of some stages: member 0 of each on the way, then `member` of the last."""
    yield from ((kind, stage, member if stage == stages[-1] else 0) for stage in stages)


def _loop_of_units(step: Jaxpr) -> int:
    for index, eqn in enumerate(step.eqns):
        scan = scan_of(eqn)
        if scan is not None and any(unit_in(inner) for inner in scan.body.jaxpr.eqns):
            return index
    raise PipelineError("This program holds no pipeline.")


def _sizes(units: Iterable[Who]) -> tuple[int, ...]:
    members: dict[int, int] = {}
    for _, stage, member in units:
        members[stage] = max(members.get(stage, 0), member + 1)
    return tuple(members[stage] for stage in sorted(members) if stage >= 0)
