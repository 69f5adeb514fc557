"""Functions that PyTorch composes with looks at values, written without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

aten = torch.ops.aten


def _cov(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of rows; PyTorch checks the sum of the weights, which would branch on values."""
    x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
    rows = x[None] if x.ndim < 2 else x
    weights = jnp.ones(rows.shape[1], x.real.dtype)
    for part in (fweights, aweights):
        weights = weights if part is None else weights * part
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdims=True) / total
    if aweights is None:
        freedom = total - correction
    else:
        freedom = total - correction * (weights * aweights).sum() / total
    away = rows - mean
    found = (away * weights) @ away.conj().T / jnp.maximum(freedom, 0)
    return (found[0, 0] if x.ndim < 2 else found).astype(x.dtype)


def _corrcoef(x: Any) -> Any:
    """Correlations of rows."""
    found = _cov(x)
    if found.ndim == 0:
        return found / found
    spread = jnp.sqrt(jnp.diagonal(found).real)
    found = found / spread[:, None] / spread[None]
    return found if jnp.iscomplexobj(found) else jnp.clip(found, -1, 1)


def _combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """All choices of r entries, in order."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = list(choose(range(x.shape[0]), r))
    return x[np.array(chosen, int).reshape(len(chosen), r)] if r else x[:0]


def _lu_unpack(
    factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Any, Any, Any]:
    """The permutation and the two factors."""
    *_, rows, columns = factors.shape
    least = min(rows, columns)
    empty = jnp.zeros((0,), factors.dtype)
    lower = upper = permutation = empty
    if unpack_data:
        lower = jnp.tril(factors[..., :, :least], -1) + jnp.eye(rows, least, dtype=factors.dtype)
        upper = jnp.triu(factors[..., :least, :])
    if unpack_pivots:
        order = jax.lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)
        permutation = jnp.swapaxes(jnp.eye(rows, dtype=factors.dtype)[order], -1, -2)
    return permutation, lower, upper


COMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.lu_unpack.default: _lu_unpack,
    torch.combinations: _combinations,
    torch.corrcoef: _corrcoef,
    torch.cov: _cov,
    torch.Tensor.corrcoef: _corrcoef,
    torch.Tensor.cov: _cov,
}
"""By function or operation."""
