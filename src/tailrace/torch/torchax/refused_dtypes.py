"""Dtypes that PyTorch refuses next to each other, and JAX would promote.

A product of float32 and bfloat16, or a float stored at an index of an integer tensor, is an error in
PyTorch. Here it would run in a dtype that the user has not chosen. Integers of 32 and 64 bits are not
distinguished, nor are floats: both have 32 bits on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from tailrace.base.array_like import Index, TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.calls.containers import flatten
from tailrace.torch.torchax.results import plainly


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = _names(
    "addbmm addmm addmv baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d cross dot inner linalg_cross linalg_multi_dot "
    "linalg_vecdot linear matmul mm mv tensordot vdot"
)
"""Products of tensors of one dtype, which is not bool."""

_OF_FLOATS = _names(
    "batch_norm binary_cross_entropy cdist complex cross_entropy grid_sample group_norm instance_norm "
    "layer_norm linalg_solve linalg_solve_triangular nll_loss polar renorm "
    "scaled_dot_product_attention"
)
"""Functions that PyTorch has only for floats, as their first argument."""

_OF_ONE = _PRODUCTS | _names(
    "allclose binary_cross_entropy cdist complex grid_sample isclose linalg_solve "
    "linalg_solve_triangular polar"
)
"""Functions of tensors of one dtype."""

_COMPLEX = frozenset(("complex", "polar"))
"""Functions of two floats that make a complex number; there are none of bfloat16."""

_NORMS = _names("batch_norm group_norm instance_norm layer_norm")
"""Layers whose parameters have the dtype of what they normalise, or are float32 next to 16 bits."""

_STORED = {
    "index_add": (3, "source"),
    "index_copy": (3, "source"),
    "index_reduce": (3, "source"),
    "masked_scatter": (2, "source"),
    "scatter": (3, "src"),
    "scatter_add": (3, "src"),
    "scatter_reduce": (3, "src"),
}
"""Functions that store entries of one tensor in another, and where they take them."""

_INDEX = {
    **dict.fromkeys((name for name in _STORED if name != "masked_scatter"), (2, "index")),
    "gather": (2, "index"),
    "index_fill": (2, "index"),
    "index_select": (2, "index"),
    "take": (1, "index"),
    "take_along_dim": (1, "indices"),
}
"""Functions that take positions, and where."""

_INDEX_FIRST = frozenset((functional.embedding, functional.embedding_bag))
"""Those that take positions first; `torch.embedding` takes them second."""

_FLOAT_TOGETHER = _names(
    "binary_cross_entropy_with_logits multilabel_soft_margin_loss smooth_l1_loss"
)
"""Losses for which at least one of the two must be of floats."""

_WHOLE_32 = (torch.int32, torch.int64)


def refuse_mixed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for dtypes that PyTorch refuses: RuntimeError, or IndexError for a key."""
    # Functions that users call, and not the operations of which PyTorch composes them: those promote
    # by themselves.
    if isinstance(func, torch._ops.OpOverload):
        return
    name = getattr(func, "__name__", "")
    name = _SPELLED.get(name, name if name.endswith("__") else name.rstrip("_"))
    if name in _OF_ONE or name in _OF_FLOATS:
        _check_one_dtype(name, args, kwargs)
    if name in _STORED or name in _INDEX:
        _check_stored(name, args, kwargs)
    if name in _NORMS:
        _check_parameters(name, args, kwargs)
    elif name in ("index_put", "__getitem__"):
        key = _given(args, kwargs, 1, "indices")
        check_key(key)
        if name == "index_put":
            check_value(
                _given(args, kwargs, 0, "input"), tuple(key), _given(args, kwargs, 2, "values")
            )
    elif func in _INDEX_FIRST or func is torch.embedding:
        place = (1, "indices") if func is torch.embedding else (0, "input")
        _check_index(name, _given(args, kwargs, *place))
    elif name in ("cross_entropy", "nll_loss"):
        _check_classes(name, args, kwargs)
    elif name in _FLOAT_TOGETHER:
        if not any(t.is_floating_point() for t in _tensors((args, kwargs))):
            raise RuntimeError(f"{name} needs floats. Received: {_listed((args, kwargs))}.")
    elif name == "einsum":
        _check_sum(args, kwargs)
    elif name == "scaled_dot_product_attention":
        _check_attention(name, args, kwargs)
    elif name == "isin" and any(t.dtype == torch.bool for t in _tensors((args, kwargs))):
        raise RuntimeError(_of_booleans(name))


_SPELLED = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "multi_dot": "linalg_multi_dot",
    "solve": "linalg_solve",
    "solve_triangular": "linalg_solve_triangular",
    "vecdot": "linalg_vecdot",
}
"""Other spellings of the same functions."""


# -- rules ----------------------------------------------------------------------------------------


def _check_one_dtype(name: str, args: Tree, kwargs: Tree) -> None:
    tensors = _tensors((args, kwargs))
    if name in _OF_ONE and len({t.dtype for t in tensors}) > 1:
        raise RuntimeError(_not_one(name, (args, kwargs)))
    if name in _PRODUCTS and any(t.dtype == torch.bool for t in tensors):
        raise RuntimeError(_of_booleans(name))
    if name in _OF_FLOATS and tensors:
        lacks = name in _COMPLEX and tensors[0].dtype == torch.bfloat16
        if lacks or not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            raise RuntimeError(
                f"{name} is a function of floats. Received: {_listed((args, kwargs))}. Cast the "
                f"tensor: x.float()."
            )


def _check_stored(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if name in _INDEX:
        _check_index(name, _given(args, kwargs, *_INDEX[name]))
    if name in _STORED:
        x, value = _given(args, kwargs, 0, "input"), _given(args, kwargs, *_STORED[name])
        if isinstance(value, torch.Tensor) and value.dtype != x.dtype:
            raise RuntimeError(_not_one(name, (x, value)))


def _check_index(name: str, index: object) -> None:
    if isinstance(index, torch.Tensor) and index.dtype not in _WHOLE_32:
        raise RuntimeError(
            f"The index of {name} is of int64 or int32. Received: {_shown(index.dtype)}. Cast it: "
            f"index.long()."
        )


def check_key(key: Index) -> None:
    """Refuse a key, as in `x[key]`, of tensors that PyTorch does not take, or takes for a mask."""
    for tensor in _tensors(key):
        if tensor.dtype == torch.uint8:
            raise IndexError(
                "A tensor of uint8 as an index is a mask in PyTorch, no longer recommended. Cast it: "
                "mask.bool() for a mask, index.long() for positions."
            )
        if tensor.dtype not in (*_WHOLE_32, torch.bool):
            raise IndexError(
                f"Tensors used as indices are of int64, int32 or bool. Received: "
                f"{_shown(tensor.dtype)}. Cast it: index.long()."
            )


def check_value(x: TensorLike, key: Index, value: TensorLike) -> None:
    """Refuse a value of another dtype where PyTorch does: at positions, not at slices."""
    parts = key if isinstance(key, tuple) else (key,)
    places = [part for part in parts if isinstance(part, list) or getattr(part, "ndim", 0)]
    if not places or not isinstance(value, torch.Tensor) or value.dtype == x.dtype:
        return
    masks = [part for part in places if str(getattr(part, "dtype", "")).endswith("bool")]
    # One number at a mask is `masked_fill`, which casts.
    if value.numel() > 1 or len(masks) != 1 or len(places) != 1:
        raise RuntimeError(_not_one("x[index] = value", (x, value)))


def _check_parameters(name: str, args: Tree, kwargs: Tree) -> None:
    tensors = _tensors((args, kwargs))
    kinds = {t.dtype for t in tensors[1:] if t.dim()}  # not the momentum
    narrow = tensors[0].dtype.itemsize == 2
    if kinds and kinds != {tensors[0].dtype} and not (narrow and kinds == {torch.float32}):
        raise RuntimeError(
            f"The parameters of {name} have the dtype of its input, or float32 next to 16 bits. "
            f"Received: {_listed((args, kwargs))}. Cast the module or its input."
        )


def _check_classes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    x, target = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "target")
    weight = _given(args, kwargs, 2, "weight")
    classes = (*_WHOLE_32, torch.uint8)
    shares = name == "cross_entropy" and target.is_floating_point()
    if target.dtype not in classes and not shares:
        raise RuntimeError(
            f"Classes of {name} are of dtype int64 or uint8. Received: {_shown(target.dtype)}. Cast "
            f"them: target.long()."
        )
    if isinstance(weight, torch.Tensor) and weight.dtype != x.dtype:
        raise RuntimeError(_not_one(f"{name} with weight=", (x, weight)))


def _check_attention(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [_given(args, kwargs, n, part) for n, part in enumerate(("query", "key", "value"))]
    if len({t.dtype for t in given}) > 1:
        raise RuntimeError(_not_one(name, given))
    mask = _given(args, kwargs, 3, "attn_mask")
    known = (torch.bool, torch.float32, given[0].dtype)
    if isinstance(mask, torch.Tensor) and mask.dtype not in known:
        raise RuntimeError(
            f"attn_mask of {name} is of bool, float32 or the dtype of the query. Received: "
            f"{_shown(mask.dtype)}. Cast it."
        )


def _check_sum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Of an einsum: what is summed over is a product of matrices, of one dtype; the rest promotes."""
    tensors = _tensors((args, kwargs))
    kinds = {t.dtype for t in tensors}
    if (len(kinds) < 2 and torch.bool not in kinds) or not isinstance(args[0], str):
        return
    with plainly():
        few = [torch.ones((2,) * t.dim(), dtype=t.dtype, device="cpu") for t in tensors]
        try:
            torch.einsum(args[0], *few)
        except NotImplementedError:
            raise RuntimeError(_of_booleans("einsum")) from None
        except RuntimeError as error:
            if "dtype" in str(error) or "scalar type" in str(error):
                raise RuntimeError(_not_one("einsum", tensors)) from None


# -- inside ---------------------------------------------------------------------------------------


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _tensors(values: Tree) -> list[torch.Tensor]:
    return [leaf for _, leaf in flatten(values) if isinstance(leaf, torch.Tensor)]


def _not_one(name: str, values: Tree) -> str:
    return (
        f"{name} takes tensors of one dtype. Received: {_listed(values)}. Cast one of them, such as "
        f"y.to(x.dtype)."
    )


def _of_booleans(name: str) -> str:
    return f"{name} has no booleans. Cast them to the dtype to compute in, such as x.long()."


def _listed(values: Tree) -> str:
    return " and ".join(dict.fromkeys(_shown(t.dtype) for t in _tensors(values)))


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
