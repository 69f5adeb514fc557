"""The layout of a pipelined step: which device does what, and in which buffers values are.

All of it follows from the traced step and the plan, before anything is emitted:

    jobs       what each unit does of one microbatch                     (jobs.py)
    before     what comes before the loop over microbatches, by device   (update_partition.py)
    after      the reductions and the update behind it, by device
    layouts    the common buffers in which devices keep unequal values   (buffers.py)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import Atom, Jaxpr, JaxprEqn, Literal, nbytes, variables
from tailrace.jaxprs.walk import concerns_us
from tailrace.pipeline.lowering.buffers import Form, Layout
from tailrace.pipeline.lowering.jobs import Jobs
from tailrace.pipeline.lowering.stage import Who
from tailrace.pipeline.lowering.stash_layout import StashLayout, Whose
from tailrace.pipeline.lowering.update_partition import Devices, Spread, guess_homes
from tailrace.pipeline.schedule.plan import Plan

_LARGE = 16_384


class Assembly:
    """A step of a pipeline, taken apart by device.

    Args:
        loop: the equation of the loop over steps.
        jobs: the loop over microbatches in it.
        plan: which device runs which unit when.
        replicas: the number of copies of the pipeline.
        each: the carried values that differ per replica, by number.
        hosted: the carried values that are in host memory between updates.
        stash_on_host: whether the stash is in host memory.
    """

    def __init__(
        self,
        loop: JaxprEqn,
        jobs: Jobs,
        plan: Plan,
        replicas: int,
        each: frozenset[int] = frozenset(),
        hosted: frozenset[int] = frozenset(),
        stash_on_host: bool = False,
    ) -> None:
        self.jobs, self.plan, self.replicas, self.each = jobs, plan, replicas, each
        self.hosted, self.stash_on_host = hosted, stash_on_host
        scan = as_scan(loop)
        self.body: Jaxpr = scan.body.jaxpr
        self.num_consts = scan.num_consts
        _, self.carry_in, _ = scan.split(self.body.invars)
        self.carry_out, _ = scan.split_results(self.body.outvars)
        self.num_devices = len(plan.devices)
        self.constants = _constants(self.body)
        self._place()
        self._lay_out()

    def device(self, who: Who) -> int:
        """The place on the stage axis of the device that runs a unit."""
        return self.plan.devices.index(self.plan.placement[who[1]][who[2]])

    # -- who has what ---------------------------------------------------------------------------

    def _place(self) -> None:
        # The order matters: jobs say where parameters are, jobs say where gradients end up, and only
        # both together say where optimizer state belongs.
        eqns = self.body.eqns
        constant = set(self.constants)
        before = [
            (i, e) for i, e in enumerate(eqns[: self.jobs.index]) if not _made_of(e, constant)
        ]
        after = [
            (i, e)
            for i, e in enumerate(eqns[self.jobs.index + 1 :], start=self.jobs.index + 1)
            if not _made_of(e, constant)
        ]
        self.before_indices = [i for i, _ in before]
        self.after_indices = [i for i, _ in after]
        # Parameters are on the devices of the stages that read them. So what stages need is known
        # first.
        needed = self._needed_by_jobs()
        held = _traced_back(needed, [e for _, e in before], self.carry_in)
        self.before = Spread([e for _, e in before], held, needed, self.replicas)
        # Results of the loop: accumulators and model state are where their unit runs. A value that
        # no unit owns left the loop unchanged: it is a new name of its initial value.
        results: dict[Any, Devices] = {}
        same = dict(self.before.same)
        for number, out in enumerate(self.jobs.loop.outvars[: self.jobs.carried]):
            owner = self.jobs.owner(number)
            start = self.jobs.starts[number]
            if owner is not None:
                results[out] = frozenset([self.device(owner)])
            elif number not in self.jobs.loose and not isinstance(start, Literal):
                same[out] = self.before.root(start)
        # Optimizer state is where the update combines it with gradients. That follows from the
        # equations, once the gradients have their places.
        have = {v: d for v, d in self.before.at.items() if d is not None} | results
        rest = [v for v in self.carry_in if v not in held]
        follow = [e for _, e in after]
        aliased = {out: have[root] for out, root in same.items() if root in have}
        guessed = guess_homes(follow, have | aliased, rest)
        self.held: dict[Any, Devices] = {**held, **guessed}
        have.update(guessed)
        # A step ends with every value where it was at the start, for the next step.
        wanted: dict[Any, Devices | None] = {}
        for given, out in zip(self.carry_in, self.carry_out, strict=True):
            if not isinstance(out, Literal):
                need = self.held.get(given)
                # One result may be several carried values: it must be wherever any of them is held.
                old = wanted.get(out, need)
                wanted[out] = need | old if need is not None and old is not None else None
        self.after = Spread(follow, have, wanted, self.replicas, same)

    def _needed_by_jobs(self) -> dict[Any, Devices | None]:
        """The devices on which the loop over microbatches needs each value from before it."""
        jobs = self.jobs
        needed: dict[Any, Devices | None] = {}

        def need(var: Atom, devices: Devices | None) -> None:
            if isinstance(var, Literal):
                return
            old = needed.get(var, frozenset())
            needed[var] = None if devices is None or old is None else old | devices

        for who, job in jobs.jobs.items():
            here = frozenset([self.device(who)])
            for var in [*jobs.constants(job.equations), *(jobs.starts[n] for n in job.carries)]:
                need(var, here)
        # What is computed ahead of the ticks is computed on all devices.
        for var in [*jobs.constants(jobs.ahead), *(jobs.starts[n] for n in jobs.loose)]:
            need(var, None)
        return needed

    # -- in which buffers -----------------------------------------------------------------------

    def _lay_out(self) -> None:
        jobs, devices = self.jobs, range(self.num_devices)
        self.held_layout = self._by_device(
            {
                i: (
                    self.held[var],
                    Form.of(var.aval, each=i in self.each, hosted=i in self.hosted),
                )
                for i, var in enumerate(self.carry_in)
                if var in self.held
            }
        )
        # Neither needed by some stages only, nor combined with values of one device by the update:
        # each device has a copy, and all compute it alike.
        self.everywhere = [i for i, var in enumerate(self.carry_in) if var not in self.held]
        self.carry_layout = self._by_device(
            {
                number: (frozenset([self.device(owner)]), Form.of(jobs.carry_in[number].aval))
                for number in range(jobs.carried)
                if (owner := jobs.owner(number)) is not None
            }
        )
        # A forward writes it and the backward of the same stage, on the same device, reads it, so a
        # stash is never sent. It has a slot for each microbatch that the plan has in flight there.
        stash: list[dict[Whose, list[Any]]] = [{} for _ in devices]
        for who, job in jobs.jobs.items():
            if job.puts:
                stash[self.device(who)][who[1:]] = job.puts
        depths = {whose: self.plan.slots(whose[0]) for each in stash for whose in each}
        self.stash_layout = StashLayout(stash, depths, self.stash_on_host)
        self.channels = self._channels()

    def _by_device(self, values: Mapping[Hashable, tuple[Devices, Form]]) -> Layout:
        return Layout(
            [
                {key: form for key, (where, form) in values.items() if device in where}
                for device in range(self.num_devices)
            ]
        )

    def _channels(self) -> list[Channel]:
        """Messages between units, in exchanges in which no device sends or receives two."""
        channels: list[Channel] = []
        for who, job in self.jobs.jobs.items():
            for to, sent in job.sends.items():
                # One exchange has at most one message from and to each device. Messages between
                # several pairs of devices are sent together: fewer exchanges per tick.
                ends = (self.device(who), self.device(to))
                for channel in channels:
                    # The first one with room: a straight pipeline of any length has at most two
                    # exchanges per tick.
                    if channel.admits(ends):
                        break
                else:
                    channels.append(channel := Channel())
                channel.add((who, to), ends, sent)
        for channel in channels:
            channel.close()
        return channels


class Channel:
    """The messages of one exchange: at most one from and one to each device."""

    def __init__(self) -> None:
        self.edges: list[tuple[Who, Who]] = []
        self.pairs: list[tuple[int, int]] = []
        self.variables: list[list[Any]] = []

    def admits(self, ends: tuple[int, int]) -> bool:
        """Whether a message between these devices fits in."""
        return all(ends[0] != a and ends[1] != b for a, b in self.pairs)

    def add(self, edge: tuple[Who, Who], ends: tuple[int, int], variables: Sequence[Any]) -> None:
        """One more message."""
        self.edges.append(edge)
        self.pairs.append(ends)
        self.variables.append(list(variables))

    def close(self) -> None:
        """Called after the last message; lays them out."""
        self.layout = Layout(
            [{var: Form.of(var.aval) for var in each} for each in self.variables], together=True
        )


def _constants(body: Jaxpr) -> dict[Any, JaxprEqn]:
    """Large values computed without operands (zeros to accumulate in), by variable."""
    # Computed wherever they are used: if they were kept, zeros for the accumulators of all stages
    # would fill every device.
    found: dict[Any, JaxprEqn] = {}
    for eqn in body.eqns:
        operands = variables(eqn.invars)
        if concerns_us(eqn) or eqn.effects or not all(v in found for v in operands):
            continue
        if operands or max((nbytes(v.aval) for v in eqn.outvars), default=0) > _LARGE:
            found.update((v, eqn) for v in eqn.outvars)
    return found


def _made_of(eqn: JaxprEqn, constant: set[Any]) -> bool:
    return bool(eqn.outvars) and all(v in constant for v in eqn.outvars)


def _traced_back(
    needed: Mapping[Any, Devices | None], before: Sequence[JaxprEqn], carried: Sequence[Any]
) -> dict[Any, Devices]:
    """The devices on which carried values are needed, through the equations that come before."""
    want: dict[Any, Devices | None] = dict(needed)
    for eqn in reversed(before):
        # Empty at the end: nothing needs its results, so its operands are not needed for it.
        where: Devices | None = frozenset()
        for out in eqn.outvars:
            if out in want:
                got = want[out]
                where = None if got is None or where is None else where | got
        if where == frozenset():
            continue
        for var in variables(eqn.invars):
            old = want.get(var, frozenset())
            want[var] = None if where is None or old is None else old | where
    found: dict[Any, Devices] = {}
    for var in carried:
        devices = want.get(var, frozenset())
        if devices:
            found[var] = devices
    return found
