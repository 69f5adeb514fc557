"""`tensorflow.compat.v1`: sessions, placeholders, variables by name, optimizers, losses.

In and out: names. Rule: a list of names; what they do is in `tensorflow/v1` and `ipu/graph`.
"""

from __future__ import annotations

from typing import Any

from tailrace.base.array_like import TensorLike as _TensorLike
from tailrace.compat import tensorflow as _tf
from tailrace.compat.ipu.graph.deferred import describe_everywhere as _describe_everywhere
from tailrace.compat.ipu.graph.named_variables import get_variable as get_variable
from tailrace.compat.ipu.graph.named_variables import get_variable_scope as get_variable_scope
from tailrace.compat.ipu.graph.named_variables import global_variables as global_variables
from tailrace.compat.ipu.graph.named_variables import trainable_variables as trainable_variables
from tailrace.compat.ipu.graph.named_variables import variable_scope as variable_scope
from tailrace.compat.originals.missing import RefusedName as _RefusedName
from tailrace.compat.tensorflow import checkpoints as _checkpoints
from tailrace.compat.tensorflow import host as _host
from tailrace.compat.tensorflow.namespaces import Namespace as _Namespace
from tailrace.compat.tensorflow.namespaces import look_up as _look_up
from tailrace.compat.tensorflow.operations.table import OPERATIONS as _OPERATIONS
from tailrace.compat.tensorflow.v1 import averages as _averages
from tailrace.compat.tensorflow.v1 import decays as _decays  # noqa: F401  (fills the table)
from tailrace.compat.tensorflow.v1 import gradients as _gradients  # noqa: F401
from tailrace.compat.tensorflow.v1 import initializers as _initializers
from tailrace.compat.tensorflow.v1 import iterators as _iterators
from tailrace.compat.tensorflow.v1 import layers as _layers
from tailrace.compat.tensorflow.v1 import losses as _losses
from tailrace.compat.tensorflow.v1 import operations as _operations
from tailrace.compat.tensorflow.v1 import optimizers as _optimizers
from tailrace.compat.tensorflow.v1 import saver as _saver
from tailrace.compat.tensorflow.v1 import summaries as _summaries
from tailrace.compat.tensorflow.v1.collections_of_graphs import (
    add_to_collection as add_to_collection,
)
from tailrace.compat.tensorflow.v1.collections_of_graphs import get_collection as get_collection
from tailrace.compat.tensorflow.v1.session import Graph as Graph
from tailrace.compat.tensorflow.v1.session import InteractiveSession as InteractiveSession
from tailrace.compat.tensorflow.v1.session import Session as Session
from tailrace.compat.tensorflow.v1.session import assignment as _assignment
from tailrace.compat.tensorflow.v1.session import get_default_graph as get_default_graph
from tailrace.compat.tensorflow.v1.session import get_default_session as get_default_session
from tailrace.compat.tensorflow.v1.session import (
    global_variables_initializer as global_variables_initializer,
)
from tailrace.compat.tensorflow.v1.session import (
    local_variables_initializer as local_variables_initializer,
)
from tailrace.compat.tensorflow.v1.session import nothing as _nothing
from tailrace.compat.tensorflow.v1.session import placeholder as placeholder
from tailrace.compat.tensorflow.v1.session import (
    placeholder_with_default as placeholder_with_default,
)
from tailrace.compat.tensorflow.v1.session import reset_default_graph as reset_default_graph
from tailrace.compat.tensorflow.v1.session import variables_initializer as variables_initializer

tables_initializer = local_variables_initializer
# Switches of TensorFlow's own runtime.
disable_resource_variables = enable_resource_variables = _nothing
disable_control_flow_v2 = disable_v2_tensorshape = _nothing


def disable_v2_behavior() -> None:
    """Describe operations on variables for a session, in the whole process, as TensorFlow 1 does."""
    _describe_everywhere(True)


def enable_v2_behavior() -> None:
    """Compute operations as they are written, outside of graphs and programs."""
    _describe_everywhere(False)


disable_eager_execution, enable_eager_execution = disable_v2_behavior, enable_v2_behavior


def _global_step(graph: object = None) -> Any:
    """The variable that counts steps; made if there is none yet."""
    del graph
    # One for each graph, found again by its name.
    return get_variable("global_step", [], "int32", trainable=False)


class _Former(_Namespace):
    """A module of operations: those of TensorFlow 1 where they differ, else those of TensorFlow 2."""

    def __init__(self, path: str, otherwise: str) -> None:
        super().__init__(path)
        self._otherwise = otherwise

    def __getattr__(self, name: str) -> Any:
        found = _OPERATIONS.get(f"{self._path}.{name}")
        # Not `_tf.nn`, which is this one in a program of TensorFlow 1.
        return getattr(_look_up("", self._otherwise), name) if found is None else found


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
    }
    | {
        "Checkpoint": _checkpoints.Checkpoint,
        "ExponentialMovingAverage": _averages.ExponentialMovingAverage,
        "CheckpointManager": _checkpoints.CheckpointManager,
        "Saver": _saver.Saver,
        "get_global_step": _global_step,
        "get_or_create_global_step": _global_step,
        "latest_checkpoint": _saver.latest_checkpoint,
    },
    # Examples, features and the rest of `tf.train` are TensorFlow's own.
    on_host=True,
)
assign, assign_add, assign_sub = map(_assignment, ("assign", "assign_add", "assign_sub"))
# Variables are always found again by name, whatever `reuse` says.
AUTO_REUSE = True


def dimension_value(dimension: object) -> int | None:
    """A length of a shape as a number; None if it is not known."""
    length: Any = getattr(dimension, "value", dimension)
    return length


GraphKeys = _Namespace(
    "compat.v1.GraphKeys",
    {"GLOBAL_VARIABLES": "variables", "TRAINABLE_VARIABLES": "trainable_variables"}
    | {
        name: name.lower()
        for name in ("LOSSES", "REGULARIZATION_LOSSES", "UPDATE_OPS", "SUMMARIES")
    },
)
losses = _Namespace("compat.v1.losses", _losses.LOSS_NAMES)
nn = _Former("compat.v1.nn", "nn")
math = _Former("compat.v1.math", "math")
data = _Namespace("data", _iterators.ITERATORS, on_host=True)
summary = _Namespace("compat.v1.summary", _summaries.SUMMARIES)
layers = _Namespace("compat.v1.layers", _layers.LAYERS)
logging = _Namespace(
    "compat.v1.logging",
    # Levels of a logger that is not here: any number will do.
    {"set_verbosity": _nothing, **dict.fromkeys(("DEBUG", "INFO", "WARN", "ERROR", "FATAL"), 0)},
)


class _Metrics:
    """Keras' metrics; those of TensorFlow 1 are refused."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(_tf.keras.metrics, name, None)
        if found is None:
            raise _RefusedName(
                f"tf.metrics.{name} kept sums in local variables. Compute the value of a batch: "
                f"tf.reduce_mean(tf.cast(tf.equal(labels, predictions), tf.float32)), and take the "
                f"mean on the host; or use keras.metrics."
            )
        return found


metrics = _Metrics()


class _Initializers:
    """`tf.initializers`: those of TensorFlow 1 under their short names, and Keras' classes."""

    def __getattr__(self, name: str) -> Any:
        if f"{name}_initializer" in (*_initializers.INITIALIZERS, *_tf._INITIALIZERS):
            return __getattr__(f"{name}_initializer")
        return getattr(_tf.keras.initializers, name)


initializers = _Initializers()


def to_float(x: _TensorLike, name: str | None = None) -> Any:
    """The values as float32."""
    return _OPERATIONS["cast"](x, "float32", name=name)


def to_int64(x: _TensorLike, name: str | None = None) -> Any:
    """The values as int64, which are 32 bits wide here."""
    return _OPERATIONS["cast"](x, "int64", name=name)


def to_int32(x: _TensorLike, name: str | None = None) -> Any:
    """The values as int32."""
    return _OPERATIONS["cast"](x, "int32", name=name)


_IN_MATH = (
    "angle bincount ceil conj count_nonzero cumprod digamma erf erfc expm1 floordiv floormod imag "
    "is_finite is_inf is_nan lgamma log log1p log_sigmoid logical_xor mod real reciprocal rint rsqrt "
    "segment_max segment_min segment_prod segment_sum unsorted_segment_max unsorted_segment_min "
    "unsorted_segment_prod unsorted_segment_sum"
)
_RENAMED = {
    **{name: f"math.{name}" for name in _IN_MATH.split()},
    **{name: f"linalg.{name}" for name in ("cholesky", "global_norm", "qr", "trace")},
    "depth_to_space": "nn.depth_to_space",
    "lin_space": "linspace",
    "matrix_band_part": "linalg.band_part",
    "matrix_determinant": "linalg.det",
    "matrix_diag": "linalg.diag",
    "matrix_diag_part": "linalg.diag_part",
    "matrix_inverse": "linalg.inv",
    "matrix_solve": "linalg.solve",
    "matrix_transpose": "linalg.matrix_transpose",
    "random_normal": "random.normal",
    "random_shuffle": "random.shuffle",
    "random_uniform": "random.uniform",
    "reverse_v2": "reverse",
    "self_adjoint_eig": "linalg.eigh",
    "set_random_seed": "random.set_seed",
    "space_to_depth": "nn.space_to_depth",
    "truncated_normal": "random.truncated_normal",
}
"""Names of TensorFlow 1 that have another since."""


_HOST = frozenset(["app", "flags", "gfile", "python_io", "resource_loader"])
"""Modules of TensorFlow 1 that have nothing to do with devices: TensorFlow's own."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    # What it returns is given to `Session(config=...)`, which has no use for it.
    if name == "ConfigProto":
        return _nothing
    if name in _HOST:
        return _host.named(f"compat.v1.{name}")
    if name in _initializers.INITIALIZERS:
        return _initializers.INITIALIZERS[name]
    # Not by `_tf`, where most of these are words of TensorFlow 1.
    if name in _tf._INITIALIZERS:
        return _tf._initializer(_tf._INITIALIZERS[name])
    path = _RENAMED.get(name, name)
    # First what TensorFlow 1 computes otherwise, then what only has another name since.
    if f"compat.v1.{name}" in _OPERATIONS:
        return _OPERATIONS[f"compat.v1.{name}"]
    if name in _operations.SCATTERS:
        return _operations.SCATTERS[name]
    if path in _OPERATIONS:
        return _OPERATIONS[path]
    found: Any = _tf
    for part in path.split("."):
        found = getattr(found, part)
    return found
