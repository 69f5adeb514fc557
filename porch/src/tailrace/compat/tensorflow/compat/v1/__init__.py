"""`tensorflow.compat.v1`: sessions, placeholders, variables by name, optimizers, losses."""

from __future__ import annotations

from typing import Any

from tailrace.compat import tensorflow as _tf
from tailrace.compat.ipu.graph.variables import get_variable as get_variable
from tailrace.compat.ipu.graph.variables import global_variables as global_variables
from tailrace.compat.ipu.graph.variables import trainable_variables as trainable_variables
from tailrace.compat.ipu.graph.variables import variable_scope as variable_scope
from tailrace.compat.tensorflow.namespaces import Namespace as _Namespace
from tailrace.compat.tensorflow.operations.table import OPERATIONS as _OPERATIONS
from tailrace.compat.tensorflow.v1 import losses as _losses  # noqa: F401  (fills the table)
from tailrace.compat.tensorflow.v1 import optimizers as _optimizers
from tailrace.compat.tensorflow.v1.session import Graph as Graph
from tailrace.compat.tensorflow.v1.session import Session as Session
from tailrace.compat.tensorflow.v1.session import get_default_graph as get_default_graph
from tailrace.compat.tensorflow.v1.session import (
    global_variables_initializer as global_variables_initializer,
)
from tailrace.compat.tensorflow.v1.session import nothing as _nothing
from tailrace.compat.tensorflow.v1.session import placeholder as placeholder
from tailrace.compat.tensorflow.v1.session import (
    placeholder_with_default as placeholder_with_default,
)

InteractiveSession = Session
local_variables_initializer = tables_initializer = global_variables_initializer
disable_v2_behavior = disable_eager_execution = enable_v2_behavior = _nothing
disable_resource_variables = enable_resource_variables = reset_default_graph = _nothing
disable_control_flow_v2 = disable_v2_tensorshape = enable_eager_execution = _nothing

train = _Namespace(
    "train",
    {
        name: getattr(_optimizers, name)
        for name in (
            "AdagradOptimizer",
            "AdamOptimizer",
            "GradientDescentOptimizer",
            "MomentumOptimizer",
            "Optimizer",
            "RMSPropOptimizer",
        )
    },
    on_host=True,
)
losses = _Namespace("compat.v1.losses")
logging = _Namespace(
    "compat.v1.logging",
    {"set_verbosity": _nothing, **dict.fromkeys(("DEBUG", "INFO", "WARN", "ERROR", "FATAL"), 0)},
)

_RENAMED = {
    "random_normal": "random.normal",
    "random_uniform": "random.uniform",
    "truncated_normal": "random.truncated_normal",
    "set_random_seed": "random.set_seed",
    "log": "math.log",
    "div": "math.floordiv",
}
"""Names of TensorFlow 1 that have another since."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "ConfigProto":
        return _nothing
    path = _RENAMED.get(name, name)
    if path in _OPERATIONS:
        return _OPERATIONS[path]
    found: Any = _tf
    for part in path.split("."):
        found = getattr(found, part)
    return found
