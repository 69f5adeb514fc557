"""Anchors: tensors of the program by name, returned after each call in the form of an output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Tap
from tailrace.torch.calls.output_modes import Returned

OUTPUT = "returned"
"""The kind of record that outputs are."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A tensor that is copied to the host in every call.

    Attributes:
        name: what the user calls it.
        tensor: its name in the program.
        returned: which of its values are kept.
        pick: what is taken of each value; None: all of it.
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
        """What the program is asked for."""
        return self.returned.tap(self.tensor, self.kind, microbatches, self.pick)


def output_tap(name: str, returned: Returned, microbatches: int) -> Tap:
    """The tap that returns one output of the module."""
    full = f"output/{name}"

    def is_output(entry: Entry) -> bool:
        return entry.name == full

    return returned.tap(is_output, OUTPUT, microbatches)


def output_part(parts: dict[tuple[str, str], Any], name: str) -> Any:
    """What that tap emitted."""
    return parts[f"output/{name}", OUTPUT]
