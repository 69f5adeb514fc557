"""Which device computes what in the part of a step outside of stages: names, reductions, the update.

Parameters, gradients and optimizer state of a stage are on its device. An equation runs where its
operands are. Where they are on several devices (a global norm, a weight that two stages share) small
values are sent to all devices and the equation runs on all of them; otherwise it runs where its
largest operand is, and the others are sent there. Values are sent, and gradients averaged over
replicas, between phases: within a phase no device waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tailrace.jaxprs.internals import JaxprEqn, Literal, Var, nbytes, variables
from tailrace.jaxprs.own_equations import is_mark, reduction_in

Devices = frozenset[int]
"""Numbers of devices; None means all of them."""

_SMALL = 65_536
"""Values of at most this many bytes are sent to all devices, rather than moving the work to one."""

_NUMBER = 64
"""The most bytes of a value that counts as a number."""


@dataclasses.dataclass
class Phase:
    """The work between two exchanges.

    Attributes:
        sent: variables that are sent to all devices before it.
        reduced: equations that average over replicas before it.
        everywhere: equations that all devices run.
        local: equations of each device.
    """

    sent: list[Any] = dataclasses.field(default_factory=list)
    reduced: list[int] = dataclasses.field(default_factory=list)
    everywhere: list[int] = dataclasses.field(default_factory=list)
    local: dict[int, list[int]] = dataclasses.field(default_factory=dict)


class Spread:
    """Where and when each equation of a stretch of program runs.

    Args:
        equations: the stretch.
        held: the devices that have each variable from outside; a variable without an entry is
            everywhere.
        needed: the devices that must have a variable afterwards, or None (everywhere).
        replicas: the number of replicas.
        same: aliases of variables, from earlier stretches.

    Attributes:
        phases: in order.
        needed: the devices that must have a variable afterwards, without aliases.
        at: the devices that have each variable, or None (everywhere).
        same: aliases of variables.
        sent_at: the phase before which a variable is sent to all.
        made_at: the phase in which a variable is computed.
    """

    def __init__(
        self,
        equations: Sequence[JaxprEqn],
        held: Mapping[Any, Devices],
        needed: Mapping[Any, Devices | None],
        replicas: int,
        same: Mapping[Any, Any] | None = None,
    ) -> None:
        self.equations = equations
        self.replicas = replicas
        self.at: dict[Any, Devices | None] = dict(held)
        self.same: dict[Any, Any] = dict(same or {})
        self.made_at: dict[Any, int] = {}
        self.sent_at: dict[Any, int] = {}
        self._where: dict[int, Devices | None] = {}
        self._when: dict[int, int] = {}
        for index, eqn in enumerate(equations):
            self._place(index, eqn)
        self.needed: dict[Any, Devices | None] = {}
        for var, need in needed.items():
            if isinstance(var, Var):  # several may be aliases of one
                root = self.root(var)
                old = self.needed.get(root, frozenset())
                self.needed[root] = None if need is None or old is None else old | need
        # Everything has its place now. Values that are needed elsewhere at the end are sent too;
        # only then is the number of phases known.
        for var, need in self.needed.items():
            self.ready(var, need)
        last = max([0, *self._when.values(), *self.sent_at.values()])
        self._delay(last)
        self.phases = [Phase() for _ in range(last + 1)]
        for index, when in self._when.items():
            phase, where = self.phases[when], self._where[index]
            if self._is_reduction(equations[index]) and where is not None:
                phase.reduced.append(index)
            elif where is None:
                phase.everywhere.append(index)
            else:
                for device in sorted(where):
                    phase.local.setdefault(device, []).append(index)
        for var, when in self.sent_at.items():
            self.phases[when].sent.append(var)

    def where(self, index: int) -> list[int]:
        """The devices that run an equation, if not all do."""
        return sorted(self._where[index] or ())

    def root(self, var: Var) -> Any:
        """The variable that this is an alias of."""
        while var in self.same:
            var = self.same[var]
        return var

    def ready(self, var: Var, where: Devices | None) -> int:
        """The phase from which a variable is on these devices; it is sent there if necessary."""
        var = self.root(var)
        at = self.at.get(var)
        made = self.made_at.get(var, 0)
        # Sent once, to all: a second device that needs it finds it there. Exchanges come before
        # phases, so a value of one phase is elsewhere in the next.
        if at is None or (where is not None and where <= at):
            return made
        return self.sent_at.setdefault(var, made + 1)

    # -- inside ---------------------------------------------------------------------------------

    def _is_reduction(self, eqn: JaxprEqn) -> bool:
        return reduction_in(eqn) is not None and self.replicas > 1

    def _place(self, index: int, eqn: JaxprEqn) -> None:
        operands = [self.root(v) for v in variables(eqn.invars)]
        if is_mark(eqn) or (reduction_in(eqn) is not None and self.replicas == 1):
            # Nothing is computed: the result is an alias of the operand, and in the same place.
            for out, given in zip(eqn.outvars, eqn.invars, strict=True):
                if not isinstance(given, Literal) and _dtype(out) == _dtype(given):
                    self.same[out] = self.root(given)
        local = [v for v in operands if self.at.get(v) is not None]
        where = _meeting_place(local, self.at)
        # A number that is combined with numbers that were sent is sent too: a norm over all stages,
        # summed leaf by leaf, then takes one exchange, not one per stage.
        sent = any(self.at.get(v) is None and self.made_at.get(v, 0) for v in operands)
        if sent and all(nbytes(v.aval) <= _NUMBER for v in [*operands, *eqn.outvars]):
            where = None
        # As early as its last operand allows; `_delay` moves it back later.
        when = max([self.ready(v, where) for v in operands], default=0)
        # Replicas also exchange before a phase, the results of the previous one.
        if self._is_reduction(eqn) and where is not None:
            when += 1
        self._where[index], self._when[index] = where, when
        for var in eqn.outvars:
            if var not in self.same:
                self.at[var], self.made_at[var] = where, when

    def _delay(self, last: int) -> None:
        """Run the equations of single devices as late as possible: less is kept between phases."""
        # `late`: the last phase in which a value may be computed, from its users backwards.
        late: dict[Any, int] = {}
        for var in self.needed:
            late[var] = last
        for var, when in self.sent_at.items():
            late[var] = min(late.get(var, last), when - 1)
        for index in reversed(range(len(self.equations))):
            if index not in self._when:
                continue
            eqn, where = self.equations[index], self._where[index]
            reduction = self._is_reduction(eqn) and where is not None
            # Exchanges stay where they are, and what all devices run cannot be delayed for one.
            if where is not None and not reduction:
                due = [late[self.root(v)] for v in eqn.outvars if self.root(v) in late]
                if due:
                    self._when[index] = max(self._when[index], min(due))
                    for var in eqn.outvars:
                        if var not in self.same:
                            self.made_at[var] = self._when[index]
            # A reduction is an exchange before its phase: its operands are due one phase earlier.
            when = self._when[index] - (1 if reduction else 0)
            for var in variables(eqn.invars):
                root = self.root(var)
                late[root] = min(late.get(root, last), when)


def guess_homes(
    equations: Sequence[JaxprEqn], held: Mapping[Any, Devices], unknown: Iterable[Any]
) -> dict[Any, Devices]:
    """The device that needs each variable of unknown place, if it is the only one."""
    # Nothing says to which stage a leaf of the optimizer state belongs. But the equation that
    # combines it with a gradient has a place. `wild`: the variables without a place that a value is
    # computed from.
    at: dict[Any, Devices | None] = dict(held)
    wild: dict[Any, set[Any]] = {var: {var} for var in unknown}
    needs: dict[Any, set[int]] = {var: set() for var in unknown}
    by_all: set[Any] = set()
    for eqn in equations:
        operands = variables(eqn.invars)
        local = [v for v in operands if at.get(v) is not None]
        leaves = set().union(*(wild.get(v, set()) for v in operands))
        if not local:  # its place is still open: what it is computed from is passed on
            wild.update((v, leaves) for v in eqn.outvars)
            continue
        where = _meeting_place(local, at)
        for leaf in leaves:
            if where is None:
                by_all.add(leaf)
            else:
                needs[leaf].add(min(where))
        at.update((v, where) for v in eqn.outvars)
    return {
        var: frozenset(devices)
        for var, devices in needs.items()
        if len(devices) == 1 and var not in by_all
    }


def _dtype(var: Any) -> Any:
    return var.aval.dtype  # the mean of integers is a float


def _meeting_place(local: Sequence[Any], at: Mapping[Any, Devices | None]) -> Devices | None:
    """The device for an equation with operands `local` that are not everywhere; None for all.

    A device that has all operands, if there is one. Otherwise, if operands are large, the device of
    the largest. Small operands are sent to all devices, and all run it.
    """
    places = [place for v in local if (place := at[v]) is not None]
    common = frozenset.intersection(*places) if places else None
    if common:
        return common
    if any(nbytes(v.aval) > _SMALL for v in local):
        largest = at[max(local, key=lambda v: nbytes(v.aval))]
        assert largest is not None
        return frozenset([min(largest)])
    return None
