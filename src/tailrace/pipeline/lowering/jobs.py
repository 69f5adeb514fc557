"""What each stage does of one microbatch, and which values pass between stages.

The body of the loop over microbatches has one equation for every forward and backward of a stage, and
equations around them (accumulation, names, results). Here every equation finds the unit it belongs to:
the last one, in the order F0 F1 ... B1 B0, whose values it uses. What depends on the element and the
counters alone is computed wherever it is used.

A value that another unit needs goes there unit by unit, so that only neighbours talk; from a forward
to the backward of the same stage it is stashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tailrace.errors import PipelineError
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import Jaxpr, JaxprEqn, Literal, Var, variables
from tailrace.jaxprs.own_equations import has_role, is_mark, tag_in, unit_in
from tailrace.jaxprs.stretches import makers, used_by
from tailrace.jaxprs.walk import concerns_us

Who = tuple[str, int, int]
"""A unit: "F" or "B", stage, member."""


@dataclasses.dataclass(eq=False)
class Job:
    """What one unit does of one microbatch.

    Attributes:
        who: which unit it is.
        equations: their indices in the body; those in `copies` are also run elsewhere, which has
            their effects.
        copies: see there.
        carries: the carried values that it owns: reads, and writes if they change.
        receives: variables that come with the message of another unit.
        sends: variables that go to another unit.
        takes: variables from the stash.
        puts: variables for the stash.
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


class Dissection:
    """The body of a loop over microbatches, as jobs.

    Attributes:
        jobs: by unit, in the order in which a microbatch meets them.
        loose: carried values that depend on no unit (the sum of weights), which are run ahead.
        ahead: equations that do that; `from_ahead` are variables they make.
    """

    def __init__(self, loop: JaxprEqn, sizes: tuple[int, ...], training: bool) -> None:
        scan = as_scan(loop)
        self.body: Jaxpr = scan.body.jaxpr
        self.consts, self.carried = scan.num_consts, scan.num_carry
        self.sizes = sizes
        order = [("F", s, m) for s, n in enumerate(sizes) for m in range(n)]
        if training:
            order += [("B", s, m) for s in reversed(range(len(sizes))) for m in range(sizes[s])]
        self.jobs: dict[Who, Job] = {who: Job(who) for who in order}
        self._rank = {who: self._position(who) for who in order}
        _, self.carry_in, _ = scan.split(self.body.invars)
        self.carry_out, _ = scan.split_results(self.body.outvars)
        self._made: dict[Any, int] = makers(self.body.eqns)
        self._home: dict[int, Who | None] = {}
        self._owner: dict[int, Who] = {}
        self._find_loose()
        self._place_equations()
        self._copy_free_equations()
        self._route()

    def owner(self, carry: int) -> Who | None:
        """The unit that holds a carried value; None if no unit uses it."""
        return self._owner.get(carry)

    # -- which unit an equation belongs to ------------------------------------------------------

    def _position(self, who: Who) -> int:
        kind, stage, _ = who
        return stage if kind == "F" else 2 * len(self.sizes) - 1 - stage

    def _find_loose(self) -> None:
        """Carried values that change, and depend on nothing that a unit makes."""
        number = {var: i for i, var in enumerate(self.carry_in)}
        depends: dict[Any, set[Any]] = {var: {i} for var, i in number.items()}
        same: dict[Any, Any] = {}
        for eqn in self.body.eqns:
            found: set[Any] = set() if unit_in(eqn) is None else {"unit"}
            for var in variables(eqn.invars):
                found |= depends.get(var, set())
            depends.update((var, found) for var in eqn.outvars)
            if is_mark(eqn):  # the same value by another name
                given = zip(eqn.outvars, eqn.invars, strict=True)
                same.update((out, same.get(var, var)) for out, var in given if isinstance(var, Var))
        loose = {
            i
            for i, var in enumerate(self.carry_out)
            if not isinstance(var, Literal) and same.get(var, var) is not self.carry_in[i]
        }
        while True:
            kept = {
                i
                for i in loose
                if "unit" not in depends.get(self.carry_out[i], set())
                and depends.get(self.carry_out[i], set()) <= loose
            }
            if kept == loose:
                break
            loose = kept
        self.loose = sorted(loose)
        self._depends, self._number = depends, number

    def _is_free(self, eqn: JaxprEqn) -> bool:
        """Whether an equation depends on the element, the counters and what is loose alone."""
        if unit_in(eqn) is not None:
            return False
        found = set().union(*(self._depends.get(v, set()) for v in variables(eqn.invars)))
        return found <= set(self.loose)

    def _place_equations(self) -> None:
        waiting: set[int] = set()
        for index, eqn in enumerate(self.body.eqns):
            if self._is_free(eqn):
                self._home[index] = None
                continue
            if (unit := unit_in(eqn)) is not None:
                self._settle(index, unit.who, waiting)
                continue
            homes = [
                self._home[self._made[v]]
                for v in variables(eqn.invars)
                if v in self._made and self._made[v] not in waiting
            ]
            homes = [home for home in homes if home is not None]
            if homes:
                self._settle(index, self._latest(homes), waiting)
            else:
                waiting.add(index)  # it depends on what is carried alone: whoever uses it first
        for index, var in enumerate(self.carry_out):
            if isinstance(var, Literal) or index in self.loose:
                continue
            writer = self._home.get(self._made[var]) if var in self._made else None
            if writer is None:
                continue
            reader = self._owner.setdefault(index, writer)
            if reader != writer:
                raise PipelineError(
                    f"Model state is read and written by one stage. Leaf {index} of what the loop "
                    f"carries is read first in stage {reader[1]} and written in stage {writer[1]}. "
                    f"Update it where it is read, or give each stage its own."
                )
        for index in sorted(waiting):
            if concerns_us(self.body.eqns[index]):
                self._settle(index, next(iter(self.jobs)), waiting)

    def _latest(self, homes: Sequence[Who]) -> Who:
        """The last of some units; behind them, if several members of a stage come last."""
        rank = max(self._rank[home] for home in homes)
        last = {home for home in homes if self._rank[home] == rank}
        if len(last) == 1:
            return last.pop()
        for who, position in self._rank.items():
            if position == rank + 1:
                return who
        raise PipelineError(
            f"Members of the group of concurrent stages {next(iter(last))[1]} make values that are "
            f"used together, and no stage comes after them to do that. Add a stage behind the group."
        )

    def _settle(self, index: int, who: Who, waiting: set[int]) -> None:
        """An equation belongs to a unit, and so does what waits to be used first."""
        waiting.discard(index)
        self._home[index] = who
        self.jobs[who].equations.append(index)
        for var in variables(self.body.eqns[index].invars):
            if var in self._number and self._number[var] not in self.loose:
                self._owner.setdefault(self._number[var], who)
            elif self._made.get(var) in waiting:
                self._settle(self._made[var], who, waiting)

    def _copy_free_equations(self) -> None:
        """Into each job the free equations that it needs; the first to need one has its effects."""
        eqns = self.body.eqns
        seen: set[int] = set()
        counter = [i for i, e in enumerate(eqns) if has_role(e, "loop")]
        used: dict[Who, set[int]] = {}
        for who, job in self.jobs.items():
            needed: set[int] = set(counter) if job.equations else set()
            stack = list(job.equations)
            while stack:
                for var in variables(eqns[stack.pop()].invars):
                    made = self._made.get(var)
                    if made is not None and self._home[made] is None and made not in needed:
                        needed.add(made)
                        stack.append(made)
            used[who] = needed
        first = next(iter(self.jobs))
        everyone = set().union(*used.values())
        for index, eqn in enumerate(eqns):
            # An enqueue or a named value of the element that no unit uses still has its effect.
            if self._home[index] is None and index not in everyone and concerns_us(eqn):
                used[first] |= self._closure(index)
        for who, job in self.jobs.items():
            job.copies = {i for i in used[who] if i in seen}
            seen |= used[who]
            job.equations = sorted({*job.equations, *used[who]})
        for carry, who in self._owner.items():
            self.jobs[who].carries.append(carry)
        loose = set(self.loose)
        self.ahead = [
            i
            for i, e in enumerate(eqns)
            if self._home[i] is None
            and loose
            and not ((tag := tag_in(e)) is not None and tag.role not in ("loop", "value"))
        ]
        self.from_ahead = [
            var
            for i in self.ahead
            for var in eqns[i].outvars
            if self._depends.get(var, set()) & loose
        ]

    def _closure(self, index: int) -> set[int]:
        found = {index}
        for var in variables(self.body.eqns[index].invars):
            if var in self._made:
                found |= self._closure(self._made[var])
        return found

    # -- which values pass between units --------------------------------------------------------

    def _route(self) -> None:
        made: dict[Any, Who] = {}
        for who, job in self.jobs.items():
            for index in job.equations:
                if self._home[index] is not None:
                    made.update((var, who) for var in self.body.eqns[index].outvars)
        for var, number in self._number.items():
            if number in self._owner:
                made[var] = self._owner[number]
        for who, job in self.jobs.items():
            for var in used_by(self.body.eqns[i] for i in job.equations):
                if var in made and made[var] != who:
                    self._send(var, made[var], who)

    def _send(self, var: Any, start: Who, end: Who) -> None:
        here = start
        for there in self._path(start, end):
            sender, receiver = self.jobs[here], self.jobs[there]
            if here[1:] == there[1:]:
                if var not in sender.puts:
                    sender.puts.append(var)
                    receiver.takes.append(var)
            elif var not in receiver.receives.setdefault(here, []):
                receiver.receives[here].append(var)
                sender.sends.setdefault(there, []).append(var)
            here = there

    def _path(self, start: Who, end: Who) -> Iterable[Who]:
        """The units that a value passes on its way, without the first."""
        (kind, stage, member), (end_kind, end_stage, end_member) = start, end
        if kind == "F" and end_kind == "F":
            yield from self._forward(stage, end_stage, end_member)
        elif kind == "F" and (stage < end_stage or (stage, member) == end[1:]):
            yield from self._forward(stage, end_stage, end_member)
            yield end
        elif kind == "F":
            if stage == end_stage:  # another member of the same stage: by way of the next one
                yield from self._forward(stage, stage + 1, 0)
                stage, member = stage + 1, 0
            yield ("B", stage, member)
            yield from self._backward(stage, end_stage, end_member)
        else:
            yield from self._backward(stage, end_stage, end_member)

    def _forward(self, start: int, end: int, member: int) -> Iterable[Who]:
        for stage in range(start + 1, end + 1):
            yield ("F", stage, member if stage == end else 0)

    def _backward(self, start: int, end: int, member: int) -> Iterable[Who]:
        for stage in reversed(range(end, start)):
            yield ("B", stage, member if stage == end else 0)
