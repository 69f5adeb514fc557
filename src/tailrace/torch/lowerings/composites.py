"""Operations of our own, which stay whole in a captured graph, and the functions that are routed to
them.

PyTorch would make several operations of each, of which XLA has no better form again: attention would be
products and a softmax, a cross-entropy would look up and scatter. A route takes the arguments of
PyTorch's function, casts them as `torch.autocast` would, and calls the operation; what it has no form
for goes to PyTorch's function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.nn.functional as functional
from torch._decomp import core_aten_decompositions

from tailrace.base.array_like import TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.lowerings.aten import losses
from tailrace.torch.lowerings.attention import attend
from tailrace.torch.lowerings.random_numbers import next_key
from tailrace.torch.lowerings.table import LOWERINGS, lowering
from tailrace.torch.tracing.autocast import cast_arguments

_REDUCTIONS = {"none": losses.NONE, "mean": losses.MEAN, "sum": losses.SUM}

# -- operations -----------------------------------------------------------------------------------


@torch.library.custom_op("tailrace::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`."""
    found = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found.clone()


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    # Of heads, the query's: keys may be shared among them.
    heads = query.shape[-3:-2]
    return query.new_empty((*batch, *heads, query.shape[-2], value.shape[-1]))


@lowering(torch.ops.tailrace.attention.default)
def _attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    mask: TensorLike,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    return attend(
        query,
        key,
        value,
        mask,
        dropout,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        next_key=next_key,
    )


@torch.library.custom_op("tailrace::cross_entropy", mutates_args=())
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """`F.cross_entropy` of class indices."""
    how = next(name for name, number in _REDUCTIONS.items() if number == reduction)
    return functional.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=how,
        label_smoothing=label_smoothing,
    ).clone()


@cross_entropy.register_fake
def _(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    *_: Any,
) -> torch.Tensor:
    return input.new_empty(target.shape if reduction == losses.NONE else ())


@lowering(torch.ops.tailrace.cross_entropy.default)
def _cross_entropy(
    x: TensorLike,
    target: TensorLike,
    weight: TensorLike,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> Any:
    return losses.cross_entropy(x, target, weight, reduction, ignore_index, smoothing)


# Not `custom_op`, which would ask for a derivative where the result has none on purpose.
torch.library.define("tailrace::stop_gradient", "(Tensor x) -> Tensor")


@torch.library.impl("tailrace::stop_gradient", "CompositeExplicitAutograd")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.register_fake("tailrace::stop_gradient")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@lowering(torch.ops.tailrace.stop_gradient.default)
def _stop_gradient(x: TensorLike) -> Any:
    return jax.lax.stop_gradient(x)


# -- routes ---------------------------------------------------------------------------------------


def _route_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    function = functional.scaled_dot_product_attention
    given, _ = cast_arguments(function, (query, key, value, attn_mask), {})
    query, key, value, mask = given
    fits = query.dtype == key.dtype == value.dtype and query.dim() == key.dim() == value.dim() > 2
    if not fits or (is_causal and mask is not None):
        return function(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return torch.ops.tailrace.attention(
        query, key, value, mask, float(dropout_p), bool(is_causal), scale, bool(enable_gqa)
    )


def _route_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    function = functional.cross_entropy
    is_known = size_average is None and reduce is None and reduction in _REDUCTIONS
    if not is_known or not _are_classes(input, target, weight):
        return function(
            input,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
    given, _ = cast_arguments(function, (input, target, weight), {})
    return torch.ops.tailrace.cross_entropy(
        *given, _REDUCTIONS[reduction], ignore_index, float(label_smoothing)
    )


def _are_classes(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether there is a class index for each row, and a weight for each class."""
    if target.dtype not in (torch.int64, torch.uint8) or input.dim() == 0:
        return False
    axis = min(1, input.dim() - 1)
    rows = (*input.shape[:axis], *input.shape[axis + 1 :])
    weighed = weight is None or tuple(weight.shape) == (input.shape[axis],)
    return tuple(target.shape) == rows and weighed


def _route_cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = losses.MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The form of PyTorch's bindings, with a number for the reduction."""
    how = next(name for name, number in _REDUCTIONS.items() if number == int(reduction))
    return _route_cross_entropy(
        input,
        target,
        weight,
        ignore_index=int(ignore_index),
        reduction=how,
        label_smoothing=label_smoothing,
    )


def _route_embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """An embedding is one operation of ATen, and stays it; this only refuses what would write
    weights."""
    if max_norm is not None:
        raise ProgramError(
            f"embedding has no max_norm here: it would change the weights during the forward pass. "
            f"Received: max_norm={max_norm}. Normalise the rows that are looked up instead, such as "
            f"by F.normalize, or the weights between steps."
        )
    return functional.embedding(
        input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse
    )


def _route_detach(input: torch.Tensor) -> torch.Tensor:
    return torch.ops.tailrace.stop_gradient(input)


_bindings: Any = getattr(torch._C, "_nn")  # noqa: B009
"""Functions of PyTorch below those that it documents; Dynamo has either in its graph."""

ROUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _route_attention,
    _bindings.scaled_dot_product_attention: _route_attention,
    functional.cross_entropy: _route_cross_entropy,
    _bindings.cross_entropy_loss: _route_cross_entropy_loss,
    functional.embedding: _route_embedding,
    torch.detach: _route_detach,
    torch.Tensor.detach: _route_detach,
}
"""Functions of PyTorch in a graph of Dynamo's, and what is called in their place."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd decomposes: PyTorch's table to core ATen, without what has a lowering.

    A lowering has PyTorch's gradient; that of a decomposition, differentiated by JAX, may be NaN (a
    softplus by `where` and `exp`).
    """
    table = core_aten_decompositions()
    return {operation: rule for operation, rule in table.items() if operation not in LOWERINGS}
