"""Computing in a lower precision than that of the parameters."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.errors import OptionError

_CHOICES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of the loss function's computation.

    The loss function gets its parameters and the floats of its batch in this dtype. The casts are part
    of the differentiated function, so gradients have the dtype of the parameters. Model state keeps its
    dtype: a running mean needs all its bits.
    """

    dtype: Any

    @classmethod
    def of(cls, value: DTypeLike) -> Precision | None:
        """Parse the value of `precision=`: None, the name of a dtype, or a dtype."""
        if value is None:
            return None
        try:
            dtype = jnp.dtype(value)
        except (TypeError, ValueError):  # "16-mixed" reads as a record of formats
            dtype = None
        if dtype is None or dtype.name not in _CHOICES:
            raise OptionError(
                f"precision is None or one of {', '.join(map(repr, _CHOICES))}: the dtype in which the "
                f"loss function computes. Received: precision={value!r}."
            )
        return cls(dtype)

    def narrow(self, tree: Tree) -> Tree:
        """A tree with its floats cast to this dtype; integers and 8-bit floats are unchanged."""
        return jax.tree.map(lambda x: x.astype(self.dtype) if _is_float(x) else x, tree)

    def widen(self, tree: Tree) -> Tree:
        """A tree with its leaves of this dtype cast to float32."""

        def one(x: object) -> Any:
            x = jnp.asarray(x)
            # Only this dtype: what the function itself cast to another one, it wanted there.
            return x.astype(wide_dtype(x.dtype)) if x.dtype == self.dtype else x

        return jax.tree.map(one, tree)


def same_dtypes(after: Tree, before: Tree) -> Tree:
    """The tree `after` with its leaves cast to the dtypes of `before`."""
    return jax.tree.map(lambda a, b: jnp.asarray(a).astype(b.dtype), after, before)


def _is_float(value: jax.Array) -> bool:
    # 8-bit floats are data that was quantized on purpose.
    return jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1


def wide_dtype(dtype: np.dtype) -> DTypeLike:
    """Float32, or a wider dtype itself. Not by promotion, which strict promotion refuses."""
    return jnp.float32 if dtype.itemsize < 4 else dtype
