"""Buffers and parameters for which forward has put another tensor: `self.total = self.total + x`.

Dynamo makes such assignments at the end of a call. While a forward pass is captured they show what a
buffer is afterwards, and are undone: the tensors assigned have no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tailrace.errors import ProgramError


class Rebinding:
    """The tensors of a module before its forward pass is captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(t): name for name, t in module.named_buffers()}
        self._before: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (kind, places, dict(places))
            for inner in module.modules()
            for kind, places in (("Parameter", inner._parameters), ("Buffer", inner._buffers))
        ]

    def undo(self, made: Mapping[int, int]) -> dict[str, int]:
        """Put all tensors back; returns which results of the graph took the place of buffers.

        Args:
            made: the number of each result, by the id of its stand-in.
        """
        found: dict[str, int] = {}
        wrong = ""
        for kind, places, before in self._before:
            after = dict(places)
            if after.keys() == before.keys() and all(after[n] is before[n] for n in before):
                continue
            places.clear()
            places.update(before)
            for name, tensor in before.items():
                now = after.get(name)
                if now is tensor:
                    continue
                known = self._names.get(id(tensor))
                if kind == "Buffer" and now is not None and id(now) in made and known is not None:
                    if now.shape != tensor.shape:
                        wrong = (
                            f"A buffer keeps its shape from step to step. {known!r} was "
                            f"{list(tensor.shape)} and is {list(now.shape)} after forward."
                        )
                    found[known] = made[id(now)]
                elif tensor is not None:
                    what = "removed" if now is None else "reassigned"
                    wrong = (
                        f"{kind} {known or name} is {what} within the model. The new tensor would be "
                        f"lost after the call. Update it in place: use {known or name}.copy_(...) or "
                        f"{known or name}.add_(...)."
                    )
        if wrong:
            raise ProgramError(wrong)
        return found
