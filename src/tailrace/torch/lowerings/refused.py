"""Operations that no program of the device can have, and why."""

from __future__ import annotations

import torch

aten = torch.ops.aten

_COUNTED = "how many entries it returns would depend on values"
_READ = "Python would look at a value that only the device knows"
_PLACED = "values have no place in memory here"
_WRITTEN = "it writes into its argument, which a functional graph does not"

REFUSED: dict[torch._ops.OpOverload, str] = {
    aten._local_scalar_dense.default: _READ,
    aten._unique2.default: _COUNTED,
    aten.atan2.out: _WRITTEN,
    aten.equal.default: _READ,
    aten.masked_select.default: _COUNTED,
    aten.nonzero.default: _COUNTED,
    aten.resize_.default: _WRITTEN,
    aten.sym_is_contiguous.default: _PLACED,
    aten.sym_storage_offset.default: _PLACED,
    aten.sym_stride.int: _PLACED,
    aten.unique_consecutive.default: _COUNTED,
    aten.unique_dim.default: _COUNTED,
}
"""By overload; whatever else has no lowering is refused too, without a reason of its own."""
