"""What a compiled loop works on between dispatches: arrays on the devices, and what follows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.feeds.feed import Feed, Staged
from tailrace.jaxprs.internals import Var
from tailrace.program.memory.host_memory import HOST_MEMORY


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The seed and the counters of one dispatch.

    To a GPU, sending these few numbers takes as long as starting a short program. So each dispatch
    also makes the numbers of the one that continues it; others are sent only if they differ.
    """

    seed: int
    first_step: int
    offset: int = 0
    count: int = 0

    def as_array(self) -> np.ndarray:
        """As one argument of the compiled program: each would be a transfer of its own."""
        seed = np.uint32(self.seed % 2**32).view(np.int32)
        return np.array([seed, self.first_step, self.offset, self.count], np.int32)

    def after(self, steps: int) -> Numbers:
        """The numbers of a dispatch that continues after this many steps."""
        return dataclasses.replace(self, first_step=self.first_step + steps)

    @staticmethod
    def advanced(array: Any, steps: Any) -> Any:
        """The same inside the program, of that argument."""
        return array.at[1].add(steps)

    @staticmethod
    def read(array: Any) -> tuple[Any, Any, Any, Any]:
        """The numbers in that argument, inside the program: seed, first step, offset, count."""
        return jax.lax.bitcast_convert_type(array[0], jnp.uint32), *array[1:]


class Buffer(NamedTuple):
    """The key of an array that has no variable in the program: a buffer of a pipeline.

    Attributes:
        kind: "held" for what each device holds for itself, "all" for what all carry alike.
        number: which of them.
    """

    kind: str
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What a dispatch started from, so that it can be run again.

    Attributes:
        values: arrays on the devices, as in `LoopState`; that dispatch did not overwrite them.
        elements: what it read, by feed.
        numbers: its seed and counters.
        period: of its taps.
    """

    values: Mapping[Var | Buffer, Any]
    elements: Mapping[Feed, Staged]
    numbers: Numbers
    period: int


@dataclasses.dataclass(eq=False)
class LoopState:
    """What dispatches read and overwrite.

    Attributes:
        values: arrays on the devices, by variable of the traced program (or buffer of a pipeline).
        foreseen: the numbers that the latest dispatch expects of the next one, and their array.
    """

    values: dict[Var | Buffer, Any] = dataclasses.field(default_factory=dict)
    foreseen: tuple[Numbers, Any] | None = None

    def copied(self) -> LoopState:
        """A state of the same values, on its own, that other dispatches may overwrite."""
        return LoopState({key: _copy(value) for key, value in self.values.items()})

    def numbers(self, wanted: Numbers) -> Any:
        """The argument for these numbers: the array on the device if it holds them already."""
        if self.foreseen is not None and self.foreseen[0] == wanted:
            return self.foreseen[1]
        return wanted.as_array()


def _copy(value: Any) -> Any:
    if value.sharding.memory_kind == HOST_MEMORY:  # where no operation can be done with it
        return jax.device_put(np.asarray(value), value.sharding)
    return jnp.copy(value)
