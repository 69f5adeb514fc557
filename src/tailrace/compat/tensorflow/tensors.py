"""The methods of TensorFlow's tensors: `loss.numpy()`, `x.get_shape()`.

Tensors here are JAX's arrays and values of programs, and Keras' symbolic tensors. Their classes get the
methods themselves, as JAX adds numpy's to them: a wrapper would have to be around every array.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from tailrace.compat.tensorflow.structures import TensorShape
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import Tracer


def add_methods() -> None:
    """Give arrays, values of programs and symbolic tensors the methods of TensorFlow's tensors."""
    array = type(jnp.zeros(()))
    for kind in (array, Tracer, keras.KerasTensor):
        _add(kind, "get_shape", _get_shape)
        _add(kind, "set_shape", _set_shape)
    _add(array, "numpy", np.asarray)
    _add(Tracer, "numpy", _no_value)


def _add(kind: Any, name: str, method: Any) -> None:
    if name not in vars(kind):

        def called(self: Any, *args: Any) -> Any:
            return method(self, *args)

        called.__name__, called.__doc__ = name, f"TensorFlow's `{name}`."
        setattr(kind, name, called)


def _get_shape(tensor: Any) -> TensorShape:
    return TensorShape(tensor.shape)


def _set_shape(tensor: Any, shape: Any) -> None:
    """Nothing: shapes are known."""
    del tensor, shape


def _no_value(tensor: Any) -> None:
    raise ProgramError(
        f"numpy() of a value of a program ({tensor.dtype}{list(tensor.shape)}): it is known only when "
        f"the program runs. Return it from the function, send it to an outfeed, or print it with "
        f"tf.print."
    )
