"""What `pipelining_ops.pipeline` does in a program.

A program with a pipeline is run on the host up to the pipeline, which is then dispatched as one
execution, each stage on its device. Only where that cannot be (an inference pipeline next to loops, or
whose stages write variables) it is traced into the program like everything else, on one device.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.result import Result
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.pipelining.forward_pipeline import Inference
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineOptions
from tailrace.compat.ipu.pipelining.stage_model import infer
from tailrace.compat.ipu.pipelining.training_pipeline import Training

_running: contextvars.ContextVar[PipelineProgram | None] = contextvars.ContextVar(
    "ipu_pipeline", default=None
)


def is_running() -> bool:
    """Whether a program with a pipeline runs: up to it, on the host, its functions are called."""
    return _running.get() is not None


def add(options: PipelineOptions) -> Operation:
    """Add a pipeline to the program that is being traced, or run it if the program runs."""
    program, scope = _running.get(), current()
    if program is not None:
        program.run(options)
    elif scope is None:
        raise IPURuntimeError(
            "A pipeline is part of a program: call it in a function given to ipu_compiler.compile."
        )
    else:
        found = scope.found
        if scope.looking:
            found.shards = max(found.shards, options.shards)
            found.pipelines += 1
        # It is dispatched from the host, as an execution of the engine: no loop can hold it.
        if options.training:
            if scope.loop is not None:
                raise IPURuntimeError(
                    "A training pipeline must be in the compiled function itself, not inside a loop. "
                    "Use repeat_count= to run it several times."
                )
            found.trains = True
        else:
            before = found.loops
            infer(options)
            # The loops of the pipeline itself are not the program's; a loop around it is.
            found.loops = before + (scope.loop is not None)
    return Operation(options.name or "pipeline")


class PipelineProgram:
    """A compiled program whose work is a pipeline."""

    def __init__(self, computation: Callable[..., Any], ordinal: int) -> None:
        self._computation, self._ordinal = computation, ordinal
        self._pipeline: Training | Inference | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the function; its pipeline is dispatched where the function calls it."""
        token = _running.set(self)
        try:
            result = Result(self._computation(*inputs))
        finally:
            _running.reset(token)
        return result.with_values(result.tensors)

    def run(self, options: PipelineOptions) -> None:
        """Run the pipeline; the first call compiles it."""
        # The options of the first call are the program's; later calls give other inputs only.
        if self._pipeline is None:
            kind = Training if options.training else Inference
            self._pipeline = kind(options, self._ordinal)
        self._pipeline.run(options.inputs)
