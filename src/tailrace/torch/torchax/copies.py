"""`copy.copy`, `copy.deepcopy` and `pickle` of tensors of the program.

PyTorch copies storage, which these tensors have none of: its own protocol ends in an error about
pickling torchax's environment. What it would return is made here from values instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax

from tailrace.base.array_like import TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.tracing.watch import current_watch


def deep_copied(tensor: TensorLike, memo: dict[int, Any]) -> TensorLike:
    """`copy.deepcopy`: the same values in a tensor without history."""
    # By id, as the protocol wants it: a tensor that a container holds twice is copied once.
    if id(tensor) in memo:
        return memo[id(tensor)]
    if tensor.requires_grad and not _is_parameter(tensor):
        # PyTorch refuses as well. Without the refusal its gradient would be cut silently.
        raise ProgramError(
            "copy.deepcopy copies inputs, buffers, parameters and what has no gradient, as in "
            "PyTorch; here it is given a tensor that was computed from parameters. Use x.clone() to "
            "let the gradient through, or x.detach().clone()."
        )
    # A new leaf, as PyTorch's: no gradient goes through a copy.
    return memo.setdefault(id(tensor), _like(tensor, jax.lax.stop_gradient(tensor.jax())))


def reduced(tensor: TensorLike, protocol: object) -> tuple[Callable[[_Held], Any], tuple[_Held]]:
    """`copy.copy`, which asks a tensor how it is pickled and builds another by the answer."""
    return _shared, (_Held(tensor),)


class _Held:
    """Carries a tensor from `reduced` to `_shared`; `pickle` would write it to a file."""

    def __init__(self, tensor: TensorLike) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ProgramError(
            "A tensor of the program cannot be pickled or saved (pickle, torch.save) in forward: it "
            "has a value only while the program runs on the device. Return the tensor and save what "
            "the call gives, or save the module's state_dict() between calls."
        )


def _shared(held: _Held) -> TensorLike:
    # In PyTorch a shallow copy has the same storage and no history: like `detach`, of which later
    # writes are seen in both, and unlike it in that it may require a gradient.
    tensor, watch = held.tensor, current_watch()
    if watch is None:
        return _like(tensor, jax.lax.stop_gradient(tensor.jax()))
    return _marked(watch.aliases.detached(tensor), tensor)


def _like(tensor: TensorLike, values: jax.Array) -> TensorLike:
    return _marked(tensor._env.j2t_iso(values), tensor)


def _marked(made: TensorLike, original: TensorLike) -> TensorLike:
    made.requires_grad = original.requires_grad
    if _is_parameter(original):  # so that isinstance(..., nn.Parameter) stays true
        made._is_param = True
    return made


def _is_parameter(tensor: TensorLike) -> bool:
    return getattr(tensor, "_is_param", False)
