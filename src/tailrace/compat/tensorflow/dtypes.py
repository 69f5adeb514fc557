"""TensorFlow's dtypes: `tf.float32` and others, which numpy, JAX, Keras and TensorFlow accept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.errors import TailraceError


class DType:
    """A dtype by TensorFlow's name; numpy, JAX, Keras and TensorFlow accept it.

    Args:
        name: the name.

    >>> import numpy as np
    >>> from tailrace.compat import tensorflow as tf
    >>> tf.float32, tf.float32 == "float32", np.zeros(2, tf.int32).dtype
    (tf.float32, True, dtype('int32'))
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = np.dtype("bool" if name == "bool" else jnp.dtype(name))
        # numpy, JAX and TensorFlow ask an object for its `dtype`, Keras for its `name`.

    @property
    def as_numpy_dtype(self) -> Any:
        """The class of numpy's scalars."""
        return self.dtype.type

    @property
    def is_floating(self) -> bool:
        """Whether its values are fractions."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_integer(self) -> bool:
        """Whether its values are whole numbers."""
        return bool(jnp.issubdtype(self.dtype, jnp.integer))

    @property
    def is_bool(self) -> bool:
        """Whether its values are true or false."""
        return self.name == "bool"

    @property
    def is_complex(self) -> bool:
        """Whether its values have an imaginary part."""
        return bool(jnp.issubdtype(self.dtype, jnp.complexfloating))

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    size = itemsize

    @property
    def base_dtype(self) -> DType:
        """The same."""
        return self

    @property
    def min(self) -> Any:
        """The smallest value."""
        return _limits(self.dtype).min

    @property
    def max(self) -> Any:
        """The largest value."""
        return _limits(self.dtype).max

    def __eq__(self, other: object) -> bool:
        # TensorFlow's own dtypes are compared too, without importing TensorFlow.
        named: Any = getattr(other, "as_numpy_dtype", other)
        try:
            return self.dtype == np.dtype(named)
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __getattr__(self, name: str) -> Any:
        # `x.dtype.kind`: programs use numpy's attributes as well. Not Python's own, which copying asks
        # for before there is a dtype.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dtype, name)

    def __str__(self) -> str:
        return self.name  # numpy's and Keras' text, by which they find a dtype again

    def __repr__(self) -> str:
        return f"tf.{self.name}"


def _limits(dtype: DTypeLike) -> Any:
    return jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)


NAMES = [
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
DTYPES = {name: DType(name) for name in NAMES}
OTHER_NAMES = {"half": "float16", "double": "float64"}


def as_dtype(value: TensorLike) -> DType:
    """The dtype that a name, a numpy dtype or a class means.

    Args:
        value: the name, dtype or class.

    Raises:
        UnknownDType: it names no dtype.

    >>> import numpy as np
    >>> from tailrace.compat import tensorflow as tf
    >>> tf.as_dtype("float32"), tf.as_dtype(np.int32), tf.as_dtype(float)
    (tf.float32, tf.int32, tf.float32)
    """
    if isinstance(value, DType):
        return value
    # Python's float is 64 bits wide for numpy; TensorFlow reads it as float32, and int as int32.
    if value is float:
        value = "float32"
    elif value is int:
        value = "int32"
    try:
        return DTYPES[np.dtype(getattr(value, "as_numpy_dtype", value)).name]
    except (TypeError, KeyError):
        raise UnknownDType(
            f"Cannot convert {value!r} to a dtype. The dtypes are {', '.join(NAMES)}."
        ) from None


class UnknownDType(TailraceError, TypeError):
    """What is no dtype."""


def narrowed(dtype: DTypeLike) -> Any:
    """The dtype that arrays have on the device: 64 bits become 32, as JAX does.

    >>> narrowed("int64"), narrowed(DTYPES["float16"])
    (dtype('int32'), dtype('float16'))
    """
    return jax.dtypes.canonicalize_dtype(as_dtype(dtype).dtype)
