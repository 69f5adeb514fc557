"""Running a loop over pipelined steps: state goes into the devices' buffers and comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tailrace._jax import JaxprEqn, value_of
from tailrace.devices import REPLICA, STAGE, resolve_replicas
from tailrace.errors import PipelineError
from tailrace.marks import unit_p
from tailrace.pipeline.assembly import Assembly
from tailrace.pipeline.executable import PipelineExecutable, PipelinePlacement
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.slots import wrapped
from tailrace.program.executable import Executable, Numbers, Placement
from tailrace.program.runner import LoopRunner


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
    """

    placement: PipelinePlacement

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        carried: Any,
        read: Any,
        pipeline: Pipeline,
        placement: Placement,
        each: Sequence[bool] | None = None,
        training: bool = True,
    ) -> None:
        super().__init__(function, carried, read, placement, each)
        loop = self._loop.equations[0]
        sizes, count = _sizes(loop)
        plan = pipeline.plan(sizes, training, count)
        self.placement = PipelinePlacement(placement.replicas, len(plan.devices))
        self._consts = self.placement.put(self.traced.consts)
        own = frozenset(i for i, flag in enumerate(each or ()) if flag and placement.replicas > 1)
        number = {var: i for i, var in enumerate(loop.outvars)}
        results = [number.get(var, -1) for var in self.traced.jaxpr.outvars]
        self._own = frozenset(results[i] for i in own if results[i] >= 0)
        self.plan = plan
        self.assembly = Assembly(loop, plan, placement.replicas, self._own)
        self._results = results

    def begin(self, carried: Any, read: Any) -> dict[Any, Any]:
        """The buffers that dispatches work on, filled from `carried`, and `read`."""
        jaxpr = self.traced.jaxpr
        known = dict(zip(jaxpr.constvars, self._consts, strict=True))
        leaves = jax.tree.leaves(carried)
        known.update(zip(jaxpr.invars, leaves, strict=False))
        self.read(known, read)
        for segment in self._before:
            self._executable(segment, None).run(known, Numbers(0, 0))
        starts = [value_of(known, start) for _, start in self._loop.start]
        for var in jaxpr.invars[: self._num_carried]:
            if var not in self._loop.reads:
                known.pop(var, None)
        self._fill(known, starts)
        return known

    def read(self, known: dict[Any, Any], read: Any) -> None:
        """Other values for what the loop only reads."""
        leaves = self.placement.put(jax.tree.leaves(read))
        known.update(zip(self.traced.jaxpr.invars[self._num_carried :], leaves, strict=True))

    def carried(self, known: dict[Any, Any]) -> Any:
        """What the loop carries now, as the tree that it was given."""
        leaves = []
        for var, number in zip(self.traced.jaxpr.outvars, self._results, strict=True):
            leaves.append(value_of(known, var) if number < 0 else self._leaf(known, number))
        return jax.tree.unflatten(self.traced.out_structure, leaves)

    def replace(self, known: dict[Any, Any], leaves: Mapping[int, Any]) -> None:
        """Other values for some of what the loop carries, by their number in the tree."""
        total = len(self._loop.start)
        values: list[Any] = [None] * total
        for number in range(total):
            values[number] = self._leaf(known, number)
        for number, value in leaves.items():
            values[self._results[number]] = value
        self._fill(known, values)

    # -- inside ---------------------------------------------------------------------------------

    def _fill(self, known: dict[Any, Any], leaves: Sequence[Any]) -> None:
        """Put values into the buffers of the devices that hold them."""
        a, placement = self.assembly, self.placement
        layout, replicas = a.held_layout, placement.replicas
        for number in a.everywhere:
            value = leaves[number]
            if number in a.each:
                value = _for_each(value, self._form(number), replicas)
                known["all", number] = placement.own_each(value)
            else:
                known["all", number] = placement.own(value)
        for index, (form, each) in enumerate(zip(layout.buffers, layout.each, strict=True)):
            lead = (replicas, a.num_devices) if each else (a.num_devices,)
            block = np.zeros((*lead, *form.shape), form.dtype)
            for device, slots in enumerate(layout.slots):
                for number, slot in slots.items():
                    if slot.buffer != index:
                        continue
                    value = leaves[number]  # type: ignore[index]
                    if slot.form.is_key:
                        value = jax.random.key_data(value)
                    if each:
                        value = _for_each(value, self._form(number), replicas)
                    flat = np.asarray(value).reshape(*lead[:-1], -1)
                    stop = slot.offset + flat.shape[-1]
                    block[..., device, slot.offset : stop] = flat
            spec = PartitionSpec(REPLICA, STAGE) if each else PartitionSpec(STAGE)
            sharding = NamedSharding(placement.mesh, spec)
            known["held", index] = jnp.copy(jax.device_put(block, sharding))

    def _leaf(self, known: dict[Any, Any], number: int) -> Any:
        """A value that the loop carries, from where it lies, on the first device of all."""
        a, first = self.assembly, self.placement.device
        if number in a.everywhere:
            return jax.device_put(known["all", number], first)
        device = min(d for d, slots in enumerate(a.held_layout.slots) if number in slots)
        slot = a.held_layout.slots[device][number]
        parts = {}
        for shard in known["held", slot.buffer].addressable_shards:
            *replica, stage, _ = (index.start or 0 for index in shard.index)
            if stage == device:
                parts[tuple(replica)] = shard.data
        flat = [parts[key].reshape(-1) for key in sorted(parts)]
        flat = [jax.device_put(f[slot.offset : slot.offset + slot.form.size], first) for f in flat]
        values = [f.reshape(slot.form.stored.shape) for f in flat]
        value = jnp.stack(values) if slot.form.each else values[0]
        return wrapped(value, slot.form)

    def _form(self, number: int) -> Any:
        return self.assembly.carry_in[number].aval

    def _executable(self, segment: Any, length: int | None, period: int = 1) -> Executable:
        key = (segment.first, length, period)
        if segment is self._loop and key not in self._executables:
            assert length is not None
            self._executables[key] = PipelineExecutable(
                segment,
                self.placement,
                self.assembly,
                length=length,
                wanted=self.wanted,
                period=period,
            )
        return super()._executable(segment, length, period)


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


def _sizes(loop: JaxprEqn) -> tuple[tuple[int, ...], int]:
    """For each stage how many members it has, and the number of microbatches, of a traced loop."""
    for eqn in loop.params["jaxpr"].jaxpr.eqns:
        inner = eqn.params.get("jaxpr")
        units = [e.params for e in inner.jaxpr.eqns if e.primitive is unit_p] if inner else []
        if units:
            stages = max(unit["stage"] for unit in units) + 1
            sizes = [
                max(unit["member"] for unit in units if unit["stage"] == stage) + 1
                for stage in range(stages)
            ]
            return tuple(sizes), eqn.params["length"]
    raise PipelineError("This program holds no pipeline.")


def _for_each(value: Any, form: Any, replicas: int) -> Any:
    """A value for each replica: the same for all if there is one only."""
    if jnp.ndim(value) == len(form.shape):
        return jnp.broadcast_to(value, (replicas, *jnp.shape(value)))
    return value
