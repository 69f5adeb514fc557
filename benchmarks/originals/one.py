"""One program in this process, with data supplied: `python -m benchmarks.originals.one PROGRAM ...`.

The program is run as if it had been called itself. The last line printed is what it computed
(`reports`). With ORIGINALS_PLAIN its imports lead to the plain libraries, and Keras has that backend.
"""

from __future__ import annotations

import functools
import os
import pathlib
import runpy
import sys
from typing import Any

from benchmarks.originals import reports


def main() -> None:
    """Run the program that the command line names."""
    backend = os.environ.get("ORIGINALS_PLAIN")
    plain = bool(backend)
    with_torch = os.environ.get("ORIGINALS_FOLDER") == "pytorch"
    os.environ["KERAS_BACKEND"] = backend or "jax"
    if not plain:
        import tailrace.compat  # noqa: F401  (the devices are asked for before anything uses JAX)
    from benchmarks.originals import data

    if images := os.environ.get("ORIGINALS_IMAGES"):
        data.TRAIN, data.TEST = map(int, images.split())
        data.PHOTOGRAPHS = data.TRAIN, data.TEST
    if with_torch:
        data.supply_torch()
        if "import transformers" in pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"):
            data.supply_transformers()
        if not plain:
            _watch_torch()
    else:
        data.supply_keras(plain)
        _watch_keras(plain)
    _same_start(with_torch, plain)
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(pathlib.Path(program).parent)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        print(f"\n{reports.shown()}", flush=True)


def _same_start(with_torch: bool, plain: bool) -> None:
    """The same initial values and order of data in every run of a program."""
    import numpy as np

    np.random.seed(0)
    if with_torch:
        import torch

        torch.manual_seed(0)
        return
    import tensorflow

    from benchmarks.originals.plain.keras_values import same_initial_values, same_random_data

    tensorflow.random.set_seed(0)
    same_initial_values()
    same_random_data(plain)


def _watch_keras(plain: bool) -> None:
    """Report what models, device functions and queues return."""
    if plain:
        from benchmarks.originals.plain import ipu

        ipu.install()
    else:
        from tailrace.compat.ipu import ipu_outfeed_queue, ipu_strategy

        queue, strategy = ipu_outfeed_queue.IPUOutfeedQueue, ipu_strategy.IPUStrategy
        _watch(queue, "dequeue", functools.partial(reports.report, "dequeued"))
        _watch(strategy, "run", functools.partial(reports.report, "returned"))
    keras = sys.modules["keras"]
    _watch(keras.Model, "fit", reports.report_fit)
    _watch(keras.Model, "evaluate", functools.partial(reports.report, "evaluated"))
    _watch(keras.Model, "predict", functools.partial(reports.report, "predicted"))


def _watch_torch() -> None:
    """Report losses of training and results of inference."""
    from tailrace.compat.poptorch.executor import PoplarExecutor
    from tailrace.torch.models.training import TrainingModel

    def report(out: Any, model: Any) -> None:
        if isinstance(model, TrainingModel):
            reports.report("loss", reports.loss_of(out))
        else:
            reports.report("output", out)

    plain = PoplarExecutor.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        report(out, self)
        return out

    PoplarExecutor.__call__ = called


def _watch(owner: Any, name: str, report: Any) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        report(out)
        return out

    setattr(owner, name, called)


if __name__ == "__main__":
    main()
