"""`torch.autocast` in a forward pass that is traced: products in 16 bits, sensitive functions in 32.

PyTorch decides by the name of an operation, with a list for each kind of device, and so does this: the
dtypes of a program are those of PyTorch on that device. It decides where operations are lowered, too,
because functions that PyTorch composes of others (attention, recurrent layers) are not in its lists,
while their parts are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tailrace.base.trees import Tree
from tailrace.torch.calls.containers import flatten, rebuild

_PRODUCTS = (
    "addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution einsum gru linalg_multi_dot linear lstm matmul mm multi_dot prelu "
    "rnn_relu rnn_tanh scaled_dot_product_attention tensordot"
)
_LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy cross_entropy_loss "
    "hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss "
    "soft_margin_loss triplet_margin_loss"
)
_OF_ONE_DTYPE = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put scatter_add "
    "tensordot vdot"
)

NARROW = {
    "cpu": frozenset(f"{_PRODUCTS} linalg_vecdot vecdot".split()),
    "cuda": frozenset(
        f"{_PRODUCTS} addmv addr chain_matmul gru_cell lstm_cell mv rnn_relu_cell "
        "rnn_tanh_cell".split()
    ),
}
"""Products, by the kind of device: in the dtype of the autocast."""

WIDE = {
    "cpu": frozenset(
        f"{_LOSSES} adaptive_avg_pool3d avg_pool3d binary_cross_entropy cdist cholesky "
        "cholesky_inverse cholesky_solve ctc_loss grid_sample grid_sampler grid_sampler_2d "
        "grid_sampler_3d huber_loss inverse lu_solve max_pool3d max_unpool2d max_unpool3d "
        "nanquantile pinverse polar prod quantile reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d replication_pad3d stft trace view_as_complex".split()
    ),
    "cuda": frozenset(
        f"{_LOSSES} acos asin cdist cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 "
        "group_norm layer_norm log log10 log1p log2 log_softmax norm normalize pdist pow prod "
        "reciprocal renorm rsqrt sinh softmax softmin softplus sum tan".split()
    ),
}
"""What loses too much in 16 bits, by the kind of device: in float32."""

WIDEST = {
    "cpu": frozenset(("cat", "index_copy", "stack")),
    "cuda": frozenset(_OF_ONE_DTYPE.split()),
}
"""What takes tensors of one dtype, by the kind of device: in the widest of those given."""

# The lists have public names; what a mode sees of the same function may have another.
_SPELLED = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__rdiv__": "reciprocal",
    "__rtruediv__": "reciprocal",
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "linalg_inv": "inverse",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
}
"""Operators and parts of functions, and the name that the lists have for them."""


def current_device() -> str | None:
    """The kind of device whose autocast is in force; None without one."""
    return next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)


def _name_in_lists(func: Callable[..., Any], args: Tree, kwargs: Tree) -> str:
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    if name == "pad":  # one function for several operations
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        return {"reflect": "reflection_pad1d", "replicate": "replication_pad1d"}.get(mode, name)
    return _SPELLED.get(name, name)


def cast_arguments(func: Callable[..., Any], args: Tree, kwargs: Tree) -> tuple[Any, Any]:
    """The arguments of a function in the dtype that the autocast in force gives it."""
    device = current_device()
    # PyTorch does not cast functions with `out=`.
    if device is None or kwargs.get("out") is not None:
        return args, kwargs
    name = _name_in_lists(func, args, kwargs)
    if name in NARROW[device]:
        dtype = torch.get_autocast_dtype(device)
    elif name in WIDE[device]:
        dtype = torch.float32
    elif name in WIDEST[device]:
        given = [leaf for _, leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wide = any(leaf.dtype == torch.float32 for leaf in given)
        dtype = torch.float32 if wide else torch.get_autocast_dtype(device)
    else:
        return args, kwargs

    def cast(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    # What the casts are made of is not cast again.
    with torch.autocast(device, enabled=False):
        return rebuild(args, cast), rebuild(kwargs, cast)
