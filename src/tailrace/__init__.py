"""Training that stays on the device: fed by an infeed, read through an outfeed, open to view.

>>> import tailrace as tr

Each public name is loaded when it is first used, so that the command line can print its help
without JAX. Type checkers read the same names from `__init__.pyi`.
"""

import os as _os
from importlib import import_module as _import_module
from typing import Any as _Any

from tailrace._version import __version__ as __version__
from tailrace.devices.environment import apply_environment as _apply_environment

_HOMES = {
    "Accumulation": "program.step.accumulation",
    "Balance": "pipeline.balance",
    "Callback": "trainer.callbacks.callback",
    "Checkpoint": "trainer.checkpoints.checkpoint",
    "DeviceError": "errors",
    "History": "records.history",
    "InfeedQueue": "feeds.infeed",
    "LossScale": "program.step.loss_scale",
    "MaybeOutfeedQueue": "records.filtered_outfeed",
    "OutfeedMode": "feeds.outfeed",
    "OutfeedQueue": "feeds.outfeed",
    "Pipeline": "pipeline.pipeline",
    "PipelineSchedule": "pipeline.schedule.schedules",
    "Program": "program.compile",
    "Records": "records.records",
    "Reduction": "program.step.accumulation",
    "TailraceError": "errors",
    "Tap": "taps.tap",
    "Trainer": "trainer.trainer",
    "balance": "pipeline.balance",
    "batches": "data.batches",
    "callbacks": "trainer",
    "compile": "program.compile",
    "configure": "devices.devices",
    "counter": "base.spans.span",
    "cross_replica_mean": "program.in_program",
    "cross_replica_sum": "program.in_program",
    "data": "",
    "dataset_benchmark": "feeds.benchmark.measure",
    "diff": "runs.diff.run_diff",
    "distributed": "devices.processes",
    "errors": "",
    "every": "taps.tap",
    "infeed_benchmark": "feeds.benchmark.measure",
    "key": "program.in_program",
    "mark": "program.mark",
    "microbatch": "program.in_program",
    "observe": "program.observe",
    "on_spike": "trainer.callbacks.on_spike",
    "open_run": "runs.reader",
    "optimizers": "program",
    "plan": "pipeline.schedule.plan",
    "print_tensor": "records.print_tensor",
    "recomputation_checkpoint": "pipeline.lowering.forward_backward",
    "repeat": "program.loops",
    "replica": "program.in_program",
    "stage_boundary": "pipeline.boundary",
    "step": "program.in_program",
    "stop_on_nonfinite": "taps.tap",
    "trace": "profiling.timeline.trace",
    "training": "program.in_program",
    "verify": "trainer.verify",
    "what_if": "pipeline.schedule.what_if",
    "while_loop": "program.loops",
}
"""Where each public name is defined; a name without a home is a module of the package itself.

By string, as nowhere else in the core: `import tailrace` must not load what a program does not use, and
type checkers read `__init__.pyi`.
"""

_MODULES = {"callbacks", "data", "distributed", "errors", "optimizers"}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    room = f"tailrace.{home}".rstrip(".")
    value = (
        _import_module(f"{room}.{name}")
        if name in _MODULES
        else getattr(_import_module(room), name)
    )
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


_apply_environment()
if _os.environ.get("TAILRACE_TRACE"):
    from tailrace.profiling.timeline.trace import trace_process as _trace_process

    _trace_process()
