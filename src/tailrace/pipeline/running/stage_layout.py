"""A pipelined loop laid out on the devices of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.devices.devices import available
from tailrace.jaxprs.internals import value_of, variables
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.lowering.jobs import Jobs
from tailrace.pipeline.running.leaf_digests import leaf_digests
from tailrace.pipeline.running.pipeline_executable import PipelinePlacement, PipelineProgram
from tailrace.pipeline.running.stage_buffers import StageBuffers
from tailrace.pipeline.schedule.device_mapping import require_devices
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.memory.activation_offload import check_fits
from tailrace.program.running.device_program import Piece
from tailrace.program.running.loop_layout import LoopLayout
from tailrace.program.running.loop_state import Buffer, LoopState
from tailrace.program.running.segments import TracedLoop
from tailrace.taps.catalogue import Entry


class Planned(Protocol):
    """A `Pipeline` or a `ForwardPipeline`: its plan follows from the sizes of its stages."""

    def plan(self, sizes: tuple[int, ...], training: bool = True, count: int | None = None) -> Plan:
        """The plan of an execution of `count` microbatches, for stages of these sizes."""
        ...


class StageLayout(LoopLayout):
    """The carry in the buffers of the stages' devices.

    Args:
        program: the traced loop; its body holds the loop over microbatches.
        carried: the shapes of the carry, for the names of its leaves.
        pipeline: the options of its execution.
        replicas: the number of copies of the pipeline.
        each: for each leaf of the carry, whether it differs per replica.
        training: whether there are backwards.
        hosted: the leaves that are in host memory between updates.
        stash_on_host: whether forwards keep residuals for backwards in host memory.
    """

    placement: PipelinePlacement

    def __init__(
        self,
        program: TracedLoop,
        carried: Tree,
        pipeline: Planned,
        replicas: int,
        each: Sequence[bool],
        *,
        training: bool,
        hosted: frozenset[int],
        stash_on_host: bool,
    ) -> None:
        loop = program.loop.equations[0]
        jobs = Jobs(loop)
        self.plan = plan = pipeline.plan(jobs.sizes, training, jobs.microbatches)
        super().__init__(program, PipelinePlacement(replicas, len(plan.devices)))
        # After the plan, which decides how many devices the stages of a traced function need.
        require_devices(plan.devices, replicas, len(available()))
        # Three numberings: leaves of the tree, results of the loop, places in buffers. `_numbers` goes
        # from the first to the second (-1: the loop does not change that leaf), the assembly to the
        # third.
        number: dict[Any, int] = {var: i for i, var in enumerate(loop.outvars)}
        self._numbers = numbers = [number.get(var, -1) for var in program.traced.jaxpr.outvars]
        own = [i for i, flag in enumerate(each) if flag and replicas > 1]
        self._own = frozenset(numbers[i] for i in own if numbers[i] >= 0)
        away = frozenset(numbers[i] for i in hosted if numbers[i] >= 0)
        self.assembly = Assembly(loop, jobs, plan, replicas, self._own, away, stash_on_host)
        if stash_on_host:
            device, mesh = self.placement.device, self.placement.mesh
            local = len(mesh.local_devices)
            check_fits(self.assembly.stash_layout.nbytes * local, device.platform)
        self._buffers = StageBuffers(self.assembly, self.placement)
        self._stages = self._stages_by_name(carried)

    def take(self, state: LoopState) -> None:
        """Fill the buffers; from then on, carried values are not looked up by variable."""
        known, program = state.values, self._program
        starts = [value_of(known, start) for _, start in program.loop.start]
        # Popped: the values are now in the buffers, and a second copy would keep its memory.
        for var in program.traced.jaxpr.invars[: program.num_carried]:
            value = known.pop(var)
            if var in program.loop.reads:  # the loop does not change it
                known[var] = self.placement.own(value)
        self._buffers.fill(state, starts)

    def carried(self, state: LoopState) -> Tree:
        """The loop's current carry, as a tree like the one it was given."""
        return jax.tree.unflatten(self._program.traced.out_structure, self.leaves(state))

    def leaves(self, state: LoopState, first: int = 0) -> list[Any]:
        """The leaves of the carry, from one on."""
        numbers = self._numbers[first:]
        inside = self._buffers.values(state, [number for number in numbers if number >= 0])
        results = self._program.traced.jaxpr.outvars[first:]
        return [
            value_of(state.values, var) if number < 0 else inside[number]
            for var, number in zip(results, numbers, strict=True)
        ]

    def carried_by(self, state: LoopState, replica: int) -> list[Any]:
        """The leaves of the carry of one replica, then what the loop reads: a pipeline's inputs."""
        mine = [
            leaf[replica] if number in self._own else leaf
            for leaf, number in zip(self.leaves(state), self._numbers, strict=True)
        ]
        inputs = self._program.traced.jaxpr.invars[self._program.num_carried :]
        return [*mine, *(np.asarray(state.values[var]) for var in inputs)]

    @property
    def on_devices(self) -> bool:
        """Whether no buffer is in host memory."""
        return not any(self.assembly.held_layout.hosted)

    def held(self, state: LoopState) -> list[Any]:
        """The buffers of the devices, values equal on all, and values that do not change."""
        outside = zip(self._program.traced.jaxpr.outvars, self._numbers, strict=True)
        alone = (value_of(state.values, var) for var, number in outside if number < 0)
        return [*self._buffers.arrays(state), *alone]

    def digests(
        self, held: Sequence[Any], names: Sequence[str], sizes: Sequence[int | None]
    ) -> jax.Array:
        """The digest of each leaf, [leaves, 2]; each device reads what it holds."""
        return leaf_digests(self.assembly, self.placement.mesh, self._numbers, held, names, sizes)

    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the carry, by their index in the tree; devices without them do nothing."""
        numbers = self._numbers
        inside = {numbers[i]: value for i, value in leaves.items() if numbers[i] >= 0}
        self._buffers.replace(state, inside)
        # The rest is in no buffer: the loop leaves it alone, and all devices have it alike.
        for index in leaves.keys() - {i for i, number in enumerate(numbers) if number >= 0}:
            for var in variables(self._program.traced.jaxpr.outvars[index : index + 1]):
                value, form = leaves[index], jax.typeof(state.values[var])
                alike = value[0] if np.ndim(value) > len(form.shape) else value
                state.values[var] = self.placement.own(alike)

    def device_program(self, piece: Piece) -> PipelineProgram:
        """The program of a piece of the loop: one for all devices."""
        return PipelineProgram(piece, self.assembly)

    def by_element(self, value: Tree) -> Tree:
        """Emissions with iterations and microbatches in one dim: that of the elements."""
        at = 0 if self.placement.replicas == 1 else 1

        def merge(leaf: jax.Array) -> Any:
            return leaf.reshape(*leaf.shape[:at], -1, *leaf.shape[at + 2 :])

        return jax.tree.map(merge, value)

    def leaves_in(self, key: Any) -> list[int]:
        """The leaves whose values are in a buffer, on any device."""
        if not isinstance(key, Buffer):
            return []
        places = {key.number}
        if key.kind == "held":
            slots = (slot for device in self.assembly.held_layout.slots for slot in device.items())
            places = {number for number, slot in slots if slot.buffer == key.number}
        return [leaf for leaf, number in enumerate(self._numbers) if number in places]

    def stage_of(self, entry: Entry) -> int:
        """The stage that a tensor belongs to, by its name; -1 if to none or several."""
        if entry.stage >= 0:
            return entry.stage
        kind, _, rest = entry.name.partition("/")
        # By the kind of the name first: these are not leaves of the carry.
        if kind in ("loss", "aux", "output"):
            return self.plan.stages - 1
        if kind == "input":
            return 0
        name, _, one = rest.partition("@")
        if one.isdigit():
            return int(one)
        while name:
            if name in self._stages:
                return self._stages[name]
            # Optimizer state of a parameter is named after it: "0/mu/dense/kernel".
            name = name.partition("/")[2] if kind == "optimizer" else ""
        return -1

    def _stages_by_name(self, carried: Tree) -> dict[str, int]:
        """The one stage that uses each parameter and each leaf of the model state."""
        a = self.assembly
        numbers: dict[Any, int] = {var: i for i, var in enumerate(a.carry_in)}
        users: dict[int, set[int]] = {}
        for (_, stage, _), job in a.jobs.jobs.items():
            starts = [a.jobs.starts[carry] for carry in job.carries]
            for var in variables([*a.jobs.constants(job.equations), *starts]):
                if (number := numbers.get(a.before.root(var))) is not None:
                    users.setdefault(number, set()).add(stage)
        found = {}
        paths = jax.tree_util.tree_flatten_with_path(carried)[0]
        for (path, _), number in zip(paths, self._numbers, strict=True):
            if len(stages := users.get(number, set())) == 1:
                found[path_name(path[1:]) or "params"] = next(iter(stages))
        return found
