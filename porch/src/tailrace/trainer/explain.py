"""The cost of a program before it runs: memory by part, FLOPs, compile time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from tailrace.errors import TailraceError
from tailrace.feeds.elements import effective_batch_size
from tailrace.messages import size_text
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState

if TYPE_CHECKING:
    from tailrace.trainer.engine import Engine


@dataclasses.dataclass(frozen=True)
class Explanation:
    """XLA's analysis of a compiled program. All sizes are bytes on one device.

    Attributes:
        steps_per_execution: the number of steps per dispatch.
        effective_batch_size: examples per step, over all microbatches and replicas.
        parts: bytes by purpose.
        peak_bytes: XLA's estimate of peak memory use.
        flops_per_step: FLOPs of a step on one device by XLA's count, for all its microbatches. Of a
            loop in the model, XLA counts one iteration.
        compile_s: the time of compilation.
        decisions: messages about decisions on optimizer state, with reasons.
        pipeline: the cost of each stage, if there are stages.
        cause: why it was compiled: the first program, another shape or length.
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

    def __str__(self) -> str:
        rows = [*self.parts.items(), ("peak", self.peak_bytes)]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {size_text(size):>10}" for name, size in rows]
        batch = self.effective_batch_size
        return "\n".join(
            [
                f"{self.steps_per_execution} steps an execution, compiled in {self.compile_s:.2f} s"
                + (f": {self.cause}" if self.cause else ""),
                f"effective batch size: {batch:,}" if batch else "effective batch size: unknown",
                f"about {self.flops_per_step:,.0f} floating-point operations a step",
                "memory on each device:",
                *lines,
                *self.decisions,
                *([str(self.pipeline)] if self.pipeline is not None else []),
            ]
        )


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
    """Compile the loop of `runner` for `length` iterations and read XLA's analysis of it."""
    executable = runner.compiled(state, length)
    compiled = executable.compiled
    memory = compiled.memory_analysis()
    # XLA counts the body of a loop once, so multiply by steps and microbatches.
    flops = flops_of(compiled)
    flops += (microbatches - 1) * max(0.0, flops - flops_of_update)
    sizes = {name: _bytes(tree) for name, tree in parts.items() if jax.tree.leaves(tree)}
    if keeping is not None:  # what one device holds of it; the rest lies elsewhere
        sizes["optimizer state"] = keeping.device_bytes
    sizes["elements"] = runner.bytes_per_pass * length // runner.placement.local_replicas
    sizes["results"] = max(0, int(memory.output_size_in_bytes - memory.alias_size_in_bytes))
    sizes["temporaries"] = int(memory.temp_size_in_bytes)
    sizes["code"] = int(memory.generated_code_size_in_bytes)
    peak = int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return Explanation(
        length,
        effective_batch_size,
        sizes,
        peak,
        flops,
        executable.compile_s,
        decisions,
        cause=executable.reason[1],
    )


def explained(engine: Engine, example: Any, length: int) -> Explanation:
    """The cost of training on elements like `example`, with `length` steps per execution."""
    feed = engine.use([example])
    state, count = engine.state, engine.accumulation.microbatches
    batch = effective_batch_size(feed.spec(), count * engine.placement.replicas)
    explanation = explain(
        engine.runner,
        engine.loop_state,
        length,
        parts={
            "parameters": state.params,
            "optimizer state": state.optimizer_state,
            "model state": state.model_state,
        },
        keeping=engine.memory.keeping,
        decisions=engine.memory.all_decisions,
        effective_batch_size=batch,
        microbatches=count,
        flops_of_update=flops_of_update(engine),
    )
    if isinstance(engine.runner, PipelineRunner):
        stages = pipeline_report(engine.runner.assembly, timed=False)
        whole = ("parameters", "optimizer state", "model state")
        rest = {name: n for name, n in explanation.parts.items() if name not in whole}
        parts = {"parameters and state of stages": max(stages.held), **rest}
        explanation = dataclasses.replace(explanation, parts=parts, pipeline=stages)
    return explanation


def flops_of_update(engine: Engine) -> float:
    """The FLOPs of the optimizer per step."""
    optimizer, state, keeping = engine.optimizer, engine.state, engine.memory.keeping
    update = jax.jit(getattr(optimizer, "apply", None) or optimizer.update)
    held = keeping.forms if keeping is not None else state.optimizer_state
    try:
        return flops_of(update.lower(state.params, held, state.params))
    except TailraceError:  # usable only inside a program; its FLOPs are small anyway
        return 0.0


def flops_of(compiled: Any) -> float:
    """The FLOPs of a lowered or compiled program, by XLA's count."""
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list | tuple) else cost
    return float(cost.get("flops", 0.0))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
