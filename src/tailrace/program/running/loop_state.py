"""The state of a compiled loop between dispatches: arrays on the devices, and the next numbers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

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
from tailrace.taps.frame import Scalar


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The seed and the counters of one dispatch.

    On a GPU, transferring these few numbers takes as long as launching a short program. So each
    dispatch also computes the numbers of the next one; they are transferred only if they turn out
    different.
    """

    seed: int
    first_step: int
    offset: int = 0
    count: int = 0

    def as_array(self) -> np.ndarray:
        """As one argument of the compiled program: separate arguments would be separate transfers."""
        # All in one dtype, so that it is one array: the seed's bits are reinterpreted, not converted.
        seed = np.uint32(self.seed % 2**32).view(np.int32)
        return np.array([seed, self.first_step, self.offset, self.count], np.int32)

    def after(self, steps: int) -> Numbers:
        """The numbers of a dispatch that continues after `steps` steps."""
        return Numbers(self.seed, self.first_step + steps, self.offset, self.count)

    @staticmethod
    def advanced(array: jax.Array, steps: Scalar) -> jax.Array:
        """The same inside the program, on that argument."""
        # Index 1 is the first step; seed, offset and count stay.
        return array.at[1].add(steps)

    @staticmethod
    def read(array: jax.Array) -> tuple[Any, Any, Any, Any]:
        """The numbers in that argument, inside the program: seed, first step, offset, count."""
        return jax.lax.bitcast_convert_type(array[0], jnp.uint32), *array[1:]


class Buffer(NamedTuple):
    """The key of an array without a variable in the program: a buffer of a pipeline.

    Attributes:
        kind: "held" for a buffer that differs per device, "all" for one that is replicated.
        number: its index.
    """

    kind: str
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The inputs of a dispatch, kept so that it can be run again.

    Attributes:
        values: arrays on the devices, as in `LoopState`; the dispatch did not overwrite them.
        elements: the elements it read, by feed.
        numbers: its seed and counters.
        period: the period of its taps.
    """

    values: Mapping[Var | Buffer, Any]
    elements: Mapping[Feed, Staged]
    numbers: Numbers
    period: int


@dataclasses.dataclass(eq=False)
class LoopState:
    """The arrays that dispatches read and overwrite.

    Attributes:
        values: arrays on the devices, by variable of the traced program (or buffer of a pipeline).
        foreseen: the numbers that the latest dispatch computed for the next one, and their array.
    """

    values: dict[Var | Buffer, Any] = dataclasses.field(default_factory=dict)
    foreseen: tuple[Numbers, Any] | None = None

    def copied(self) -> LoopState:
        """An independent copy that other dispatches may overwrite."""
        return LoopState({key: _copy(value) for key, value in self.values.items()})

    def numbers(self, wanted: Numbers) -> jax.Array | np.ndarray:
        """The argument for these numbers: the array on the device, if it has them already."""
        # The host compares its own copies of the numbers; reading the array would wait for the device.
        if self.foreseen is not None and self.foreseen[0] == wanted:
            return self.foreseen[1]
        return wanted.as_array()


def _copy(value: jax.Array) -> jax.Array:
    if value.sharding.memory_kind == HOST_MEMORY:  # no operation can run there
        return jax.device_put(np.asarray(value), value.sharding)
    return jnp.copy(value)
