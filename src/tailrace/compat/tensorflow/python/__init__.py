"""`tensorflow.python`: the modules inside TensorFlow that IPU programs import from.

`tensorflow.python.ipu` is `tailrace.compat.ipu`; `tensorflow.python.keras` is `tensorflow.keras`;
modules of operations (`tensorflow.python.ops.math_ops`) have what is at the top.

In and out: names. Rule: nothing is defined here; every name leads to where it is defined.
"""

from __future__ import annotations

from typing import Any

from tailrace.compat.tensorflow import dtypes as _dtypes
from tailrace.compat.tensorflow import host as _host
from tailrace.compat.tensorflow.namespaces import Namespace as _Namespace
from tailrace.compat.tensorflow.namespaces import unknown as _unknown
from tailrace.compat.tensorflow.operations.table import OPERATIONS as _OPERATIONS
from tailrace.compat.tensorflow.v1 import optimizers as _optimizers


class _Operations(_Namespace):
    """A file of operations, which has all of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # TensorFlow's files of operations have no modules: `math_ops.log` is `tf.math.log`.
        for path in (name, f"math.{name}", f"nn.{name}", f"random.{name}", f"linalg.{name}"):
            if path in _OPERATIONS:
                return _OPERATIONS[path]
        from tailrace.compat.tensorflow.compat import v1

        try:
            return getattr(v1, name)
        except AttributeError:
            raise _unknown("", name, []) from None


_FILES = [
    "array_ops",
    "control_flow_ops",
    "gen_array_ops",
    "gen_math_ops",
    "gen_nn_ops",
    "init_ops",
    "linalg_ops",
    "math_ops",
    "nn",
    "nn_impl",
    "nn_ops",
    "random_ops",
    "state_ops",
    "variable_scope",
    "variables",
]
ops = _Namespace("python.ops", {name: _Operations(f"python.ops.{name}") for name in _FILES})
framework = _Namespace(
    "python.framework",
    {
        "constant_op": _Operations("python.framework.constant_op"),
        "dtypes": _Namespace(
            "python.framework.dtypes",
            {**_dtypes.DTYPES, "DType": _dtypes.DType, "as_dtype": _dtypes.as_dtype},
        ),
        "ops": _Operations("python.framework.ops"),
        "tensor_shape": _Operations("python.framework.tensor_shape"),
    },
)
# Three classes of TensorFlow's files, one of its public interface.
_datasets = {
    name: lambda: _host.named("data.Dataset") for name in ("Dataset", "DatasetV1", "DatasetV2")
}
data = _Namespace(
    "python.data",
    {
        "ops": _Namespace(
            "python.data.ops",
            {"dataset_ops": _Namespace("python.data.ops.dataset_ops", late=_datasets)},
        ),
    },
)
training = _Namespace(
    "python.training",
    {
        "optimizer": _Namespace("python.training.optimizer", {"Optimizer": _optimizers.Optimizer}),
        "gradient_descent": _Namespace(
            "python.training.gradient_descent",
            {"GradientDescentOptimizer": _optimizers.GradientDescentOptimizer},
        ),
        "momentum": _Namespace(
            "python.training.momentum", {"MomentumOptimizer": _optimizers.MomentumOptimizer}
        ),
        "adam": _Namespace("python.training.adam", {"AdamOptimizer": _optimizers.AdamOptimizer}),
    },
)


def __getattr__(name: str) -> Any:
    if name == "ipu":
        from tailrace.compat import ipu

        return ipu
    if name == "keras":
        from tailrace.compat.tensorflow import keras

        return keras
    if name.startswith("__"):
        raise AttributeError(name)
    raise _unknown("python", name, ["data", "framework", "ipu", "keras", "ops", "training"])
