"""Running a loop over pipelined steps: state goes into the devices' buffers and comes out of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tailrace.data.trees import Tree
from tailrace.devices.devices import REPLICA, STAGE, available, resolve_replicas
from tailrace.errors import PipelineError
from tailrace.jaxprs.internals import value_of, variables
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.lowering.buffers import Slot, wrapped
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.lowering.jobs import Jobs
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.buffer_writes import Patches, cut_out, patched
from tailrace.pipeline.running.leaf_digests import leaf_digests
from tailrace.pipeline.running.pipeline_executable import PipelineExecutable, PipelinePlacement
from tailrace.pipeline.schedule.device_mapping import require_devices
from tailrace.program.memory.activation_offload import check_fits
from tailrace.program.memory.host_memory import HOST_MEMORY
from tailrace.program.running.executable import Executable, Placement
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import Buffer, LoopState, Numbers
from tailrace.program.running.segments import Segment
from tailrace.taps.catalogue import Entry


class PipelineRunner(LoopRunner):
    """A loop over pipelined steps, run in dispatches of any length.

    Args:
        function: as for `LoopRunner`; its body holds the loop over microbatches.
        carried: as there.
        read: as there.
        pipeline: how it is to run.
        placement: the devices, if they are known already.
        each: as there.
        training: whether there are backwards.
        hosted: the leaves of `carried` that lie in the memory of the host between updates.
        stash_on_host: whether forwards keep residuals for backwards in host memory.
    """

    placement: PipelinePlacement

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        carried: Tree,
        read: Tree,
        pipeline: Pipeline,
        placement: Placement,
        each: Sequence[bool] | None = None,
        training: bool = True,
        hosted: frozenset[int] = frozenset(),
        stash_on_host: bool = False,
    ) -> None:
        super().__init__(function, carried, read, placement, each)
        loop = self._loop.equations[0]
        jobs = Jobs(loop)
        self.plan = plan = pipeline.plan(jobs.sizes, training, jobs.microbatches)
        self.placement = PipelinePlacement(placement.replicas, len(plan.devices))
        require_devices(plan.devices, placement.replicas, len(available()))
        self._consts = self.placement.put(self.traced.consts)
        own = frozenset(i for i, flag in enumerate(each or ()) if flag and placement.replicas > 1)
        # Three numberings: leaves of the tree, results of the loop, places in buffers. `_results` goes
        # from the first to the second (-1: the loop leaves that leaf alone), the assembly to the third.
        number: dict[Any, int] = {var: i for i, var in enumerate(loop.outvars)}
        results = [number.get(var, -1) for var in self.traced.jaxpr.outvars]
        self._own = frozenset(results[i] for i in own if results[i] >= 0)
        away = frozenset(results[i] for i in hosted if results[i] >= 0)
        self.assembly = Assembly(
            loop, jobs, plan, placement.replicas, self._own, away, stash_on_host
        )
        if stash_on_host:
            device, mesh = self.placement.device, self.placement.mesh
            local = len(mesh.local_devices)
            check_fits(self.assembly.stash_layout.nbytes * local, device.platform)
        self._results = results
        self._stages = self._stages_by_name(carried)

    def begin(self, carried: Tree, read: Tree) -> LoopState:
        """The buffers that dispatches work on, filled from `carried`, and `read`."""
        jaxpr = self.traced.jaxpr
        state = LoopState(dict(zip(jaxpr.constvars, self._consts, strict=True)))
        known = state.values
        leaves = jax.tree.leaves(carried)
        known.update(zip(jaxpr.invars, leaves, strict=False))
        self.read(state, read)
        for segment in self._before:
            self._executable(segment, None).run(state, Numbers(0, 0))
        # From here on, what the loop carries is in buffers and no longer found by variable.
        starts = [value_of(known, start) for _, start in self._loop.start]
        for var in jaxpr.invars[: self._num_carried]:
            value = known.pop(var)
            if var in self._loop.reads:  # the loop does not change it
                known[var] = self.placement.own(value)
        self._fill(state, starts)
        return state

    def by_element(self, value: Any) -> Any:
        """What each element made: passes and microbatches in one dim."""
        at = 0 if self.placement.replicas == 1 else 1

        def merge(leaf: Any) -> Any:
            return leaf.reshape(*leaf.shape[:at], -1, *leaf.shape[at + 2 :])

        return jax.tree.map(merge, value)

    def read(self, state: LoopState, read: Tree) -> None:
        """Other values for what the loop only reads."""
        leaves = self.placement.put(jax.tree.leaves(read))
        state.values.update(zip(self.traced.jaxpr.invars[self._num_carried :], leaves, strict=True))

    def carried(self, state: LoopState) -> Any:
        """What the loop carries now, as the tree that it was given."""
        carried = self._leaves(state, [number for number in self._results if number >= 0])
        leaves = [
            value_of(state.values, var) if number < 0 else carried[number]
            for var, number in zip(self.traced.jaxpr.outvars, self._results, strict=True)
        ]
        return jax.tree.unflatten(self.traced.out_structure, leaves)

    def carried_by(self, state: LoopState, replica: int) -> list[Any]:
        """The leaves of what the loop carries as one replica has them, then what it reads."""
        leaves = jax.tree.leaves(self.carried(state))
        mine = [
            leaf[replica] if number in self._own else leaf
            for leaf, number in zip(leaves, self._results, strict=True)
        ]
        read = (state.values[var] for var in self.traced.jaxpr.invars[self._num_carried :])
        return [*mine, *map(np.asarray, read)]

    def held(self, state: LoopState) -> list[Any]:
        """The buffers of the devices, then what all have alike, then what the loop leaves alone."""
        a = self.assembly
        outside = zip(self.traced.jaxpr.outvars, self._results, strict=True)
        return [
            *(state.values[Buffer("held", i)] for i in range(len(a.held_layout.buffers))),
            *(state.values[Buffer("all", number)] for number in a.everywhere),
            *(value_of(state.values, var) for var, number in outside if number < 0),
        ]

    def digests(
        self, held: Sequence[Any], names: Sequence[str], sizes: Sequence[int | None]
    ) -> Any:
        """The digest of each leaf, [leaves, 2]; each device reads what it holds."""
        return leaf_digests(self.assembly, self.placement.mesh, self._results, held, names, sizes)

    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Other values for some of what the loop carries, by their number in the tree."""
        given = {self._results[number]: value for number, value in leaves.items()}
        layout = self.assembly.held_layout
        self._fill_everywhere(state, given)
        for index, (each, hosted) in enumerate(zip(layout.each, layout.hosted, strict=True)):
            patches = self._patches(index, given)
            if patches and hosted:
                held = self._leaves(state, range(len(self._loop.start)))
                self._fill_held(state, {**held, **given}, index)
            elif patches:
                state.values[Buffer("held", index)] = patched(
                    state.values[Buffer("held", index)], patches, each
                )

    def stage_of(self, entry: Entry) -> int:
        """The stage that a tensor belongs to, by its name; -1 if to none or several."""
        if entry.stage >= 0:
            return entry.stage
        kind, _, rest = entry.name.partition("/")
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
            # What an optimizer keeps for a parameter is called after it: "0/mu/dense/kernel".
            name = name.partition("/")[2] if kind == "optimizer" else ""
        return -1

    # -- inside ---------------------------------------------------------------------------------

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
        for (path, _), number in zip(paths, self._results, strict=True):
            if len(stages := users.get(number, set())) == 1:
                found[path_name(path[1:]) or "params"] = next(iter(stages))
        return found

    def _fill(self, state: LoopState, leaves: Sequence[Any]) -> None:
        """Put values into the buffers of the devices that hold them."""
        given = dict(enumerate(leaves))
        self._fill_everywhere(state, given)
        for index in range(len(self.assembly.held_layout.buffers)):
            self._fill_held(state, given, index)

    def _fill_everywhere(self, state: LoopState, given: Mapping[int, Any]) -> None:
        a, placement = self.assembly, self.placement
        for number in a.everywhere:
            if number not in given:
                continue
            value = given[number]
            if number in a.each:
                value = _for_each(value, self._form(number), placement.replicas)
                state.values[Buffer("all", number)] = placement.own_each(value)
            else:
                state.values[Buffer("all", number)] = placement.own(value)

    def _fill_held(self, state: LoopState, given: Mapping[int, Any], index: int) -> None:
        """Make one buffer anew, with the values of all devices."""
        a, placement, layout = self.assembly, self.placement, self.assembly.held_layout
        form, each = layout.buffers[index], layout.each[index]
        lead = (placement.replicas, a.num_devices) if each else (a.num_devices,)
        block = np.zeros((*lead, math.prod(form.shape)), form.dtype)
        for (replica, device), parts in self._patches(index, given).items():
            for place, flat in parts.items():
                where = (replica, device) if each else (device,)
                block[(*where, slice(place, place + len(flat)))] = np.asarray(flat)
        spec = PartitionSpec(REPLICA, STAGE) if each else PartitionSpec(STAGE)
        sharding = NamedSharding(placement.mesh, spec)
        if layout.hosted[index]:
            sharding = sharding.with_memory_kind(HOST_MEMORY)
        block = block.reshape(*lead, *form.shape)
        state.values[Buffer("held", index)] = _owned(jax.device_put(block, sharding))

    def _patches(self, index: int, given: Mapping[int, Any]) -> Patches:
        """Where in a buffer the values of some leaves belong."""
        layout, replicas = self.assembly.held_layout, self.placement.replicas
        each = layout.each[index]
        found: dict[tuple[int, int], dict[int, Any]] = {}
        for device, slots in enumerate(layout.slots):
            for number, slot in slots.items():
                if slot.buffer != index or number not in given:
                    continue
                value = given[number]  # type: ignore[index]
                if slot.form.is_key:
                    value = jax.random.key_data(value)
                if each:
                    value = _for_each(value, self._form(number), replicas)
                rows = np.asarray(value).reshape(replicas if each else 1, -1)
                for replica, row in enumerate(rows):
                    found.setdefault((replica, device), {})[slot.offset] = row
        return found

    def _leaves(self, state: LoopState, numbers: Iterable[int]) -> dict[int, Any]:
        """Values that the loop carries, from where they lie, on the first device of all."""
        a, first = self.assembly, self.placement.device
        found: dict[int, Any] = {}
        together: dict[tuple[int, int], dict[int, Slot]] = {}
        for number in dict.fromkeys(numbers):
            if number in a.everywhere:
                value = self.placement.readable(state.values[Buffer("all", number)])
                found[number] = jax.device_put(value, first)
                continue
            device = min(d for d, slots in enumerate(a.held_layout.slots) if number in slots)
            slot = a.held_layout.slots[device][number]
            together.setdefault((slot.buffer, device), {})[number] = slot
        for (buffer, device), slots in together.items():
            forms = [slot.form for slot in slots.values()]
            rows = self._rows(state.values[Buffer("held", buffer)], device, forms[0].each)
            places = tuple((slot.offset, slot.form.stored.shape) for slot in slots.values())
            parts = jax.device_put([cut_out(row, places) for row in rows], first)
            for number, form, *values in zip(slots, forms, *parts, strict=True):
                value = jnp.stack(values) if form.each else values[0]
                found[number] = wrapped(value, form)
        return found

    def _rows(self, buffer: Any, device: int, each: bool) -> list[Any]:
        """What one device of each replica has in a buffer, flat; of one replica if all are alike."""
        if buffer.sharding.memory_kind == HOST_MEMORY:  # where no operation can be done with it
            buffer = jax.device_put(buffer, buffer.sharding.with_memory_kind("device"))
        if not self.placement.in_one_process:  # the device may be another process's
            whole = self.placement.readable(buffer)
            return [row[device].reshape(-1) for row in (whole if each else [whole])]
        parts = {}
        for shard in buffer.addressable_shards:
            starts = [index.start or 0 for index in shard.index]
            replica, stage = starts[:2] if each else (0, starts[0])
            if stage == device:
                parts[replica] = shard.data
        return [parts[key].reshape(-1) for key in sorted(parts)]

    def _form(self, number: int) -> Any:
        return self.assembly.carry_in[number].aval

    def _new_executable(
        self, segment: Segment, length: int | None, counted: bool, period: int
    ) -> Executable:
        if segment is not self._loop:
            return super()._new_executable(segment, length, counted, period)
        assert length is not None
        return PipelineExecutable(
            segment,
            self.placement,
            self.assembly,
            length=length,
            counted=counted,
            wanted=self.wanted,
            period=period,
            muted=self.muted,
        )


def place_pipeline(pipeline: Pipeline, replicas: int | None) -> PipelinePlacement:
    """The devices of a pipeline, as far as they are known before it is traced."""
    if pipeline.sizes or pipeline.device_mapping is not None:
        sizes = pipeline.sizes or tuple(
            len(each) if isinstance(each, tuple | list) else 1
            for each in pipeline.device_mapping or ()
        )
        stages = len(pipeline.plan(sizes).devices)
        return PipelinePlacement(resolve_replicas(replicas, stages), stages)
    if replicas is None:
        raise PipelineError(
            "How many copies of a pipeline the devices hold is known once its stages are. Give "
            "replicas=, or tr.Pipeline(device_mapping=...)."
        )
    return PipelinePlacement(resolve_replicas(replicas), 0)


def _owned(value: Any) -> Any:
    """A copy that nothing else holds, so that a loop may overwrite it."""
    if value.sharding.memory_kind == HOST_MEMORY:
        return value  # it was copied there
    return jnp.copy(value)


def _for_each(value: Any, form: Any, replicas: int) -> Any:
    """A value for each replica: the same for all if there is one only."""
    if jnp.ndim(value) == len(form.shape):
        return jnp.broadcast_to(value, (replicas, *jnp.shape(value)))
    return value
