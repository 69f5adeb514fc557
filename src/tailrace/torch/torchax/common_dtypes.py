"""The dtype in which PyTorch computes a function of several tensors, and what it refuses.

JAX promotes by rules of its own: -1 as a tensor without dimensions stays -1 next to bytes, where
PyTorch makes it 255. The dtype of the result does not show that, and a comparison has none to show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import _prims_common as prims

from tailrace.base.trees import Tree
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.torchax.results import as_wide, is_pointwise, plainly

aten = torch.ops.aten

_COMMON = (
    "__and__ __lshift__ __or__ __rshift__ __xor__ add addcdiv addcmul bitwise_and bitwise_left_shift "
    "bitwise_or bitwise_right_shift bitwise_xor clamp clamp_max clamp_min div eq floor_divide fmax "
    "fmin fmod gcd ge gt lcm le lt maximum minimum mul ne pow remainder rsub sub where"
)

COMMON = frozenset(getattr(aten, name) for name in _COMMON.split())
"""Operations that PyTorch computes in one dtype, to which it promotes all of their arguments."""


def in_common_dtype(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], to: Callable[..., Any]
) -> tuple[Any, Any]:
    """The arguments of such an operation, whole numbers and booleans in the dtype that it computes in.

    Floats are left to JAX, which promotes those as PyTorch does.
    """
    packet = getattr(func, "overloadpacket", None)
    # A quotient of whole numbers is a float, to which each of them is cast by itself.
    exact = packet is aten.div and kwargs.get("rounding_mode") is None
    if packet not in COMMON or exact:
        return args, kwargs
    kept = 1 if packet is aten.where else 0  # its condition is no operand
    limits = {name: value for name, value in kwargs.items() if name in ("min", "max")}
    operands = [v for v in (*args[kept:], *limits.values()) if v is not None]
    kinds = {value.dtype for value in operands if isinstance(value, torch.Tensor)}
    if len(kinds) < 2 or not any(is_whole(kind) for kind in kinds):
        return args, kwargs
    with plainly():
        stand_ins = [_stand_in(value, "meta") for value in operands]
        dtype = prims.elementwise_dtypes(*stand_ins, type_promotion_kind=_DEFAULT)[1]
    held = dtype_on_device(dtype)

    def cast(value: object) -> Any:
        if not isinstance(value, torch.Tensor) or not is_whole(value.dtype):
            return value
        return value if dtype_on_device(value.dtype) == held else to(value, dtype)

    return (*args[:kept], *map(cast, args[kept:])), {
        **kwargs,
        **{name: cast(value) for name, value in limits.items()},
    }


_DEFAULT = prims.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT


def is_whole(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are whole, or booleans."""
    return not dtype.is_floating_point and not dtype.is_complex


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _stand_in(value: object, device: str) -> Any:
    """A tensor of one entry for one of any shape: promotion asks only whether it has dimensions."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones((1,) * value.dim(), dtype=as_wide(value.dtype), device=device)


# -- what PyTorch refuses -------------------------------------------------------------------------


_OF_FLOATS = (
    "_log_softmax _softmax argmax argmin linalg_vector_norm mean median std std_mean var var_mean"
)

OF_FLOATS = frozenset(getattr(aten, name) for name in _OF_FLOATS.split())
"""Functions of several entries that PyTorch has not for all dtypes: a deviation of booleans is none."""


def refuse_as_pytorch(func: Callable[..., Any], args: Tree, kwargs: Tree) -> None:
    """Raise PyTorch's own error for an operation that it has not for these dtypes, such as `-mask`, or
    for a number that does not fit, such as 300 next to bytes."""
    if not is_pointwise(func) and getattr(func, "overloadpacket", None) not in OF_FLOATS:
        return
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return
    leaves = [leaf for _, leaf in flatten((args, kwargs))]
    kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
    # Floats of one dtype: the usual case, in which nothing is refused.
    if len(kinds) < 2 and not any(map(is_whole, kinds)) and not any(map(_is_flag, leaves)):
        return
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "out")}
    with plainly(), warnings.catch_warnings(action="ignore"):  # of one entry there is no deviation
        few, named = rebuild((args, rest), lambda value: _stand_in(value, "cpu"))
        try:
            func(*few, **named)
        except (RuntimeError, TypeError, ValueError) as error:
            if not any(text in str(error) for text in _NOT_OF_DTYPES):
                raise type(error)(str(error).splitlines()[0]) from None


_NOT_OF_DTYPES = ("'Half'", "'BFloat16'", "broadcast shape")
"""Kernels of the host may lack 16-bit floats, which those of accelerators have; shapes are not the
user's here."""
