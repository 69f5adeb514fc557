"""Deliberate faults: a rewrite of a training program that flips one bit of one tensor, once.

    Faults(engine).arm(Fault("activation/net", step=7, index=3, bit=30))

Every tensor of the step gets a port, which asks the host in each step whether to flip a bit of it. So
one compiled program serves all faults, and an execution that is run again, in the same program, runs
without. For tests and benchmarks of the sentinel, on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tailrace.taps.catalogue import Entry
from tailrace.taps.wanted import Wanted
from tailrace.trainer.engine import Engine

# By bytes per value. There is none for 8: such values exist only with `jax_enable_x64`.
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One flipped bit.

    Attributes:
        name: the name of the tensor.
        step: the step in which it is flipped.
        index: which value of the tensor, counted as if it were flat.
        bit: which bit of that value.
    """

    name: str
    step: int
    index: int
    bit: int


class Faults:
    """The ports in the program in use of an engine with a sentinel; made before it is compiled.

    Attributes:
        entries: the tensors that have one.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.sentinel is not None
        runner = engine.runner
        chosen = engine.sentinel.sights[runner].chosen
        self.entries: list[Entry] = [
            one.entry for one in chosen if np.dtype(one.entry.dtype).itemsize in _WORDS
        ]
        self._armed: Fault | None = None
        for entry in self.entries:
            change = functools.partial(self._port, entry.name)
            want = Wanted(("fault", entry.name), entry.output, change=change)
            runner.wanted.setdefault(entry.position, []).append(want)

    def arm(self, fault: Fault | None) -> None:
        """The next fault; None for none."""
        self._armed = fault

    @property
    def happened(self) -> bool:
        """Whether the fault that was armed has happened."""
        return self._armed is None

    def _port(self, name: str, value: jax.Array, step: jax.Array) -> jax.Array:
        word = _WORDS[value.dtype.itemsize]
        form = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.uint32))
        index, mask = jax.pure_callback(functools.partial(self._asked, name), form, step)
        bits = lax.bitcast_convert_type(value, word).reshape(-1)
        # Written in every step, mostly with a mask of 0: with and without a fault it is the same
        # program, which rounds the same.
        bits = bits.at[index].set(bits[index] ^ mask.astype(word))
        return lax.bitcast_convert_type(bits.reshape(value.shape), value.dtype)

    def _asked(self, name: str, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fault, mask, index = self._armed, 0, 0
        if fault is not None and (fault.name, fault.step) == (name, int(step)):
            # Disarmed by its first use: the second run of the same execution must be without it.
            mask, index, self._armed = 1 << fault.bit, fault.index, None
        return np.array(index, np.int32), np.array(mask, np.uint32)
