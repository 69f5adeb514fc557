"""The seeds' own programming interface: `from tailrace.compat import ipu`.

It stands where programs import `tensorflow.python.ipu`, submodules too. Everything here is a few lines
over the engine; docs/guides/moving.md has a table of every name and what became of it.
"""

from __future__ import annotations

import importlib
from typing import Any

from tailrace.compat.ipu import config as config
from tailrace.compat.ipu import dataset_benchmark as dataset_benchmark
from tailrace.compat.ipu import eager as eager
from tailrace.compat.ipu import errors as errors
from tailrace.compat.ipu import gradient_accumulation as gradient_accumulation
from tailrace.compat.ipu import ipu_compiler as ipu_compiler
from tailrace.compat.ipu import ipu_infeed_queue as ipu_infeed_queue
from tailrace.compat.ipu import ipu_outfeed_queue as ipu_outfeed_queue
from tailrace.compat.ipu import loops as loops
from tailrace.compat.ipu import ops as ops
from tailrace.compat.ipu import optimizers as optimizers
from tailrace.compat.ipu import pipelining_ops as pipelining_ops
from tailrace.compat.ipu import scopes as scopes
from tailrace.compat.ipu import utils as utils
from tailrace.compat.ipu.graph import variables as variables
from tailrace.compat.ipu.graph.gradients import GradientTape as GradientTape
from tailrace.compat.ipu.graph.variables import Variable as Variable
from tailrace.compat.ipu.graph.variables import get_variable as get_variable
from tailrace.compat.ipu.graph.variables import variable_scope as variable_scope
from tailrace.compat.ipu.settings import absent as absent

_LATE = ("ipu_strategy", "keras")
"""Submodules that need Keras, imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return importlib.import_module(f"tailrace.compat.ipu.{name}")
    return absent.refuse("ipu", name)
