"""TensorFlow's interface for device programs: `from tailrace.compat import tensorflow as tf`.

It replaces `tensorflow`. Operations are Keras' and JAX's; tensors are JAX's arrays;
variables, models and layers are Keras'. What is done on the host (datasets, files, images, summaries)
is TensorFlow's own, where it is installed.

In: code written for TensorFlow, eager, in `tf.function` or in a graph. Out: JAX values, and programs.

    operations, structures, dtypes   what TensorFlow computes; `operations/table.py` has them by name
    tensors, tensor_shape, arrays    what TensorFlow's values have and JAX's do not
    variables, checkpoints           Keras' variables with TensorFlow's arguments; files of them
    function, control, tape          programs, loops and branches in them, gradients
    keras, v1, compat, python        the other interfaces that programs import
    namespaces, host                 where a name is looked up; TensorFlow's own, if installed

Rule: TensorFlow is imported only in `host`, and only when a name of the host is used.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial as _partial
from typing import Any

import jax
import numpy as np

import tailrace.keras as _tk  # noqa: F401  (selects the backend before Keras is imported)
from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.originals.missing import RefusedName as _RefusedName
from tailrace.compat.tensorflow import namespaces as _namespaces
from tailrace.compat.tensorflow import older_words as _older
from tailrace.compat.tensorflow import structures as _structures
from tailrace.compat.tensorflow import tensors as _tensors
from tailrace.compat.tensorflow.arrays import TensorArray
from tailrace.compat.tensorflow.control import autograph as _autograph
from tailrace.compat.tensorflow.dtypes import DTYPES, OTHER_NAMES, DType, as_dtype
from tailrace.compat.tensorflow.function import function
from tailrace.compat.tensorflow.namespaces import Namespace as _Namespace
from tailrace.compat.tensorflow.operations import casts as _casts  # noqa: F401
from tailrace.compat.tensorflow.operations import checks as _checks  # noqa: F401
from tailrace.compat.tensorflow.operations import (  # each fills the table
    control_flow as _control_flow,
)
from tailrace.compat.tensorflow.operations import elementwise as _elementwise  # noqa: F401
from tailrace.compat.tensorflow.operations import groups as _groups  # noqa: F401
from tailrace.compat.tensorflow.operations import matrices as _matrices  # noqa: F401
from tailrace.compat.tensorflow.operations import neural as _neural  # noqa: F401
from tailrace.compat.tensorflow.operations import random_numbers as _random_numbers
from tailrace.compat.tensorflow.operations import reductions as _reductions  # noqa: F401
from tailrace.compat.tensorflow.operations import shapes as _shapes  # noqa: F401
from tailrace.compat.tensorflow.structures import TensorSpec
from tailrace.compat.tensorflow.tape import GradientTape
from tailrace.compat.tensorflow.tensor_shape import TensorShape
from tailrace.compat.tensorflow.variables import Module, Variable
from tailrace.jaxprs.internals import Tracer as _Tracer

# At import: the program's next lines may be `from tensorflow.x import y`.
_namespaces.find_modules()
_tensors.add_methods()

__version__ = "2.6.3"  # the last that the originals were made for

newaxis = None
# For `isinstance` and annotations of programs; values of programs are of this class too.
Tensor = jax.Array
UnconnectedGradients = _Namespace("UnconnectedGradients", {"NONE": "none", "ZERO": "zero"})


def device(device_name: object) -> Any:
    """Without effect: programs run on the devices that are configured, the rest on the host.

    Args:
        device_name: the name of a device.

    >>> from tailrace.compat import tensorflow as tf
    >>> with tf.device("/device:IPU:0"):
    ...     pass
    """
    del device_name
    return contextlib.nullcontext()


def name_scope(name: str) -> Any:
    """What is computed inside has this name in records and profiles.

    Args:
        name: the name.

    >>> from tailrace.compat import tensorflow as tf
    >>> with tf.name_scope("encoder"):
    ...     x = tf.constant(1.0) + 1
    """
    return jax.named_scope(name)


def is_tensor(x: TensorLike) -> bool:
    """Whether a value is an array or a variable.

    Args:
        x: the value.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.is_tensor(tf.constant(1.0)), tf.is_tensor(1.0)
    (True, False)
    """
    from keras import KerasTensor

    return isinstance(x, jax.Array | Variable | KerasTensor)


def executing_eagerly() -> bool:
    """Whether operations run as they are written: outside programs.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.executing_eagerly()
    True
    """
    from tailrace.compat.ipu.graph.state import current

    return current() is None


def get_static_value(tensor: TensorLike, partial: bool = False) -> Any:
    """The value of a tensor, or None if it is known only when the program runs.

    Args:
        tensor: the tensor.
        partial: without effect.

    >>> from tailrace.compat import tensorflow as tf
    >>> tf.get_static_value(tf.constant([1, 2])).tolist()
    [1, 2]
    """
    del partial
    return None if isinstance(tensor, _Tracer) else np.asarray(tensor)


_NEST = {
    name: getattr(_structures, name)
    for name in (
        "assert_same_structure",
        "flatten",
        "is_nested",
        "map_structure",
        "pack_sequence_as",
    )
}


def _keras() -> Any:
    import tailrace.compat.tensorflow.keras as keras

    return keras


def _v1() -> Any:
    import tailrace.compat.tensorflow.compat.v1 as v1

    return v1


class _Train(_Namespace):
    """`tf.train`: in TensorFlow 2 it has no optimizers, so a program that uses one here is of 1."""

    def __getattr__(self, name: str) -> Any:
        # The names of the host are in both; so are those that Python asks any module for.
        if name in dir(_v1().train) and name not in _older.BOTH_TRAIN:
            return _older.begin(f"train.{name}", _v1)
        return getattr(_v1().train, name)

    def __dir__(self) -> list[str]:
        return dir(_v1().train)


_NAMES: dict[str, Any] = {
    "train": _Train("train"),
    **DTYPES,
    **{other: DTYPES[name] for other, name in OTHER_NAMES.items()},
    "dtypes": _Namespace("dtypes", {**DTYPES, "DType": DType, "as_dtype": as_dtype}),
    "nest": _Namespace("nest", _NEST),
    "autograph": _Namespace(
        "autograph",
        {
            "experimental": _Namespace(
                "autograph.experimental",
                {
                    "do_not_convert": _autograph.do_not_convert,
                    "set_loop_options": lambda *_, **__: None,
                },
            ),
            "set_verbosity": lambda *_, **__: None,
        },
    ),
    "control_dependencies": _control_flow.control_dependencies,
    "random": _Namespace("random", {"set_seed": _random_numbers.set_seed}),
}


def _python() -> Any:
    import tailrace.compat.tensorflow.python as python

    return python


def _compat() -> Any:
    import tailrace.compat.tensorflow.compat.v1

    return tailrace.compat.tensorflow.compat


def _estimator() -> Any:
    raise _RefusedName(
        "tf.estimator is not available: TensorFlow has removed estimators. Use a Keras model in an "
        "IPUStrategy, or pipelining_ops.pipeline."
    )


_INITIALIZERS = {
    "constant_initializer": "Constant",
    "glorot_normal_initializer": "GlorotNormal",
    "glorot_uniform_initializer": "GlorotUniform",
    "ones_initializer": "Ones",
    "orthogonal_initializer": "Orthogonal",
    "random_normal_initializer": "RandomNormal",
    "random_uniform_initializer": "RandomUniform",
    "variance_scaling_initializer": "VarianceScaling",
    "zeros_initializer": "Zeros",
}
"""Initializers of TensorFlow, and those of Keras."""


def _initializer(name: str) -> Any:
    kind = getattr(_keras().initializers, name)

    def made(*args: Any, dtype: DTypeLike = None, **options: Any) -> Any:
        del dtype  # a variable says its own
        return kind(*args, **options)

    made.is_class = True  # type: ignore[attr-defined]  # for `initializer=tf.zeros_initializer`
    return made


# Looked up when they are asked for: some of these modules import this one.
_LATE = {
    **{name: _partial(_initializer, kind) for name, kind in _INITIALIZERS.items()},
    "keras": _keras,
    "compat": _compat,
    "python": _python,
    "optimizers": lambda: _keras().optimizers,
    "losses": lambda: _keras().losses,
    "metrics": lambda: _keras().metrics,
    "initializers": lambda: _keras().initializers,
    "estimator": _estimator,
    **{name: _partial(_older.begin, name, _v1) for name in _older.WORDS},
    "Graph": lambda: _v1().Graph,
    "gradients": lambda: _v1().gradients,
}


__all__ = [  # the rest is looked up
    "DType",
    "GradientTape",
    "Module",
    "TensorArray",
    "TensorShape",
    "TensorSpec",
    "Variable",
    "as_dtype",
    "device",
    "function",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if _older.is_changed(name):
        return getattr(_v1(), name)
    return _namespaces.look_up("", name, _NAMES, _LATE, on_host=False)


def __dir__() -> list[str]:
    here = {name for name in vars(sys.modules[__name__]) if not name.startswith("_")}
    return sorted({*here, *_NAMES, *_LATE, *_namespaces.names_under("")})
