"""Where the inputs of a captured graph come from: parameters, buffers, arguments, and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tailrace.errors import ProgramError
from tailrace.torch.calls.containers import flatten


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor comes from.

    Attributes:
        kind: "parameter", "buffer", "argument" or "constant".
        name: its name in the module; of a tensor in several places, that of the first.
        number: of an argument, which of the call's tensors it is.
        tensor: the tensor; a number of Python is itself.
    """

    kind: str
    name: str = ""
    number: int = 0
    tensor: Any = None


def sources_of(module: torch.nn.Module, call: Any, inputs: Sequence[Any]) -> list[Source]:
    """Where each input comes from, by the identity of its tensor."""
    arguments = [leaf for _, leaf in flatten(call) if isinstance(leaf, torch.Tensor)]
    known = {id(t): Source("argument", "", number, t) for number, t in enumerate(arguments)}
    # Tied weights are one tensor, which has the name that it has first.
    known |= {id(t): Source("parameter", name, 0, t) for name, t in module.named_parameters()}
    known |= {id(t): Source("buffer", name, 0, t) for name, t in module.named_buffers()}
    found = []
    for value in inputs:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise ProgramError(
                f"{type(module).__name__} computes with the number {value} as if it could change from "
                f"call to call. Make it a tensor."
            )
        found.append(known.get(id(value)) or Source("constant", "", 0, value))
    return found
