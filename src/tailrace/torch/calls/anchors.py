"""Anchors: named tensors of the program that are returned after each call, like outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Tap
from tailrace.torch.calls.output_modes import Returned

OUTPUT = "returned"
"""The record kind of outputs."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A tensor that is copied to the host in every call.

    Attributes:
        name: the user's name for it.
        tensor: its name in the program.
        returned: the values to keep.
        pick: the part of each value to keep; None for all.
    """

    name: str
    tensor: str
    returned: Returned
    pick: Callable[[Any], Any] | None = None

    @property
    def kind(self) -> str:
        """The name that distinguishes its records from others of the same tensor."""
        return f"anchor {self.name}"

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape of one value."""
        if self.pick is None:
            return entry.shape
        return jax.eval_shape(self.pick, jax.ShapeDtypeStruct(entry.shape, entry.dtype)).shape

    def tap(self, microbatches: int) -> Tap:
        """The tap for the program."""
        return self.returned.tap(self.tensor, self.kind, microbatches, self.pick)


def output_tap(name: str, returned: Returned, microbatches: int) -> Tap:
    """The tap that returns one output of the module."""
    # A function, not the name as a pattern: keys of an output dict may contain `*`.
    full = f"output/{name}"

    def is_output(entry: Entry) -> bool:
        return entry.name == full

    return returned.tap(is_output, OUTPUT, microbatches)


def output_part(parts: dict[tuple[str, str], Any], name: str) -> Any:
    """The emission of that tap."""
    return parts[f"output/{name}", OUTPUT]
