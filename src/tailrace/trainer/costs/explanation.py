"""What a program will need before it runs: memory by part, FLOPs, compile time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from tailrace.base.messages import counted, size_text
from tailrace.base.trees import Tree
from tailrace.program.compiling.build import REWRITES
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.step.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What XLA says about a compiled program. All sizes are bytes on one device.

    Attributes:
        steps_per_execution: the number of steps per dispatch.
        effective_batch_size: examples in a step, over all microbatches and replicas.
        parts: bytes by what they hold.
        peak_bytes: what XLA expects to hold at once.
        flops_per_step: floating-point operations of a step on one device, as XLA counts them, for
            all its microbatches. Of a loop of the model's own, XLA counts one pass.
        compile_s: the seconds that compiling took.
        decisions: sentences that say what was decided about the optimizer's state, and why.
        pipeline: what each stage costs, if there are stages.
        cause: why it was compiled: the first program of its form, another shape or length.
        rewrites: how often the program is rewritten, by the name of the rewrite.
        compiler_options: the options of XLA's compiler that were chosen or given.
    """

    steps_per_execution: int
    effective_batch_size: int | None
    parts: dict[str, int]
    peak_bytes: int
    flops_per_step: float
    compile_s: float
    decisions: tuple[str, ...] = ()
    pipeline: Any = None
    cause: str = ""
    rewrites: dict[str, int] = dataclasses.field(default_factory=dict)
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rows = [*self.parts.items(), ("peak", self.peak_bytes)]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {size_text(size):>10}" for name, size in rows]
        batch = self.effective_batch_size
        return "\n".join(
            [
                f"{counted(self.steps_per_execution, 'step')} an execution, "
                f"compiled in {self.compile_s:.2f} s" + (f": {self.cause}" if self.cause else ""),
                f"effective batch size: {batch:,}" if batch else "effective batch size: unknown",
                f"about {self.flops_per_step:,.0f} floating-point operations a step",
                "memory on each device:",
                *lines,
                *self.decisions,
                *self._built(),
                *([str(self.pipeline)] if self.pipeline is not None else []),
            ]
        )

    def _built(self) -> list[str]:
        """How the program is built, where that is not as XLA would do it by itself."""
        lines = [
            f"rewritten in {counted(count, 'place')}: {REWRITES[name]} "
            f"(rewrites={{{name!r}: False}} switches it off)"
            for name, count in self.rewrites.items()
            if count
        ]
        options = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        return [*lines, f"compiled with {options}"] if options else lines


def explain(
    runner: LoopRunner,
    state: LoopState,
    length: int,
    parts: dict[str, Any],
    effective_batch_size: int | None,
    microbatches: int = 1,
    flops_of_update: float = 0.0,
    keeping: StateKeeping | None = None,
    decisions: tuple[str, ...] = (),
) -> Explanation:
    """Compile the loop of `runner` for `length` passes and read XLA's analysis of it."""
    executable = runner.compiled(state, length)
    compiled = executable.compiled
    memory = compiled.memory_analysis()
    # XLA counts the body of a loop once: that of the steps, and that of the microbatches.
    flops = flops_of(compiled)
    # The update is outside of the loop of microbatches: it runs once.
    flops += (microbatches - 1) * max(0.0, flops - flops_of_update)
    sizes = {name: tree_bytes(tree) for name, tree in parts.items() if jax.tree.leaves(tree)}
    if keeping is not None:  # the part that one device holds
        sizes["optimizer state"] = keeping.device_bytes
    sharding = runner.placement.sharding
    parts_of_elements = (
        runner.placement.local_replicas if sharding is None else sharding.batches.parts
    )
    sizes["elements"] = runner.bytes_per_pass * length // parts_of_elements
    sizes["results"] = max(0, int(memory.output_size_in_bytes - memory.alias_size_in_bytes))
    sizes["temporaries"] = int(memory.temp_size_in_bytes)
    sizes["code"] = int(memory.generated_code_size_in_bytes)
    return Explanation(
        length,
        effective_batch_size,
        sizes,
        executable.peak_bytes,
        flops,
        executable.compile_s,
        decisions,
        cause=executable.reason[1],
        rewrites=runner.rewritten,
        compiler_options=runner.built["options"],
    )


def flops_of(compiled: jax.stages.Lowered | jax.stages.Compiled) -> float:
    """The floating-point operations of something lowered or compiled, as XLA counts them."""
    cost = compiled.cost_analysis() or {}
    # Some versions of JAX return a list with an entry for each device.
    cost = cost[0] if isinstance(cost, list | tuple) else cost
    return float(cost.get("flops", 0.0))


def state_bytes(form: TrainState, keeping: StateKeeping | None) -> dict[str, int]:
    """The bytes of a training state on each device, by what they hold.

    Args:
        form: the shapes of the state.
        keeping: how optimizer state is held; None for replicated on the devices.
    """
    sizes = {name: tree_bytes(tree) for name, tree in form.parts.items()}
    return sizes if keeping is None else {**sizes, "optimizer state": keeping.device_bytes}


def tree_bytes(tree: Tree) -> int:
    """The bytes of all arrays of a tree, or of those that its shapes describe.

    Of shapes with shardings, those on one device.
    """
    return sum(_size_of(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size_of(leaf: Any) -> int:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return math.prod(leaf.sharding.shard_shape(leaf.shape))
    return leaf.size
