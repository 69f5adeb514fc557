"""Looking up the value of a variable of a step: known to all, in a buffer, or without operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.devices.devices import STAGE
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Atom, JaxprEqn, Literal, Var
from tailrace.pipeline.lowering.buffers import Layout
from tailrace.taps.frame import Frame


@dataclasses.dataclass
class Values:
    """The values of a step while it is emitted.

    Attributes:
        me: the index of the running device.
        known: values that all devices have.
        constants: equations of large values without operands, by variable.
        frame: the environment.
        same: aliases of variables.
        stores: buffers, their layout, and the key in it of each variable.
        device: the device whose values are looked up in buffers; None for none.
        own: values that this device has computed in the current block.
    """

    me: Any
    known: dict[Any, Any]
    constants: Mapping[Any, JaxprEqn]
    frame: Frame
    same: dict[Any, Any] = dataclasses.field(default_factory=dict)
    stores: list[tuple[Layout, Sequence[Any], Mapping[Any, Any]]] = dataclasses.field(
        default_factory=list
    )
    device: int | None = None
    own: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def on(self, device: int) -> Values:
        """The values as one device sees them, for one of its blocks."""
        return dataclasses.replace(self, device=device, own={}, frame=self.frame.inner())

    def reading(self, layout: Layout, buffers: Sequence[Any]) -> Values:
        """The same, with the values of a layout read from other buffers."""
        stores = [
            (each, buffers if each is layout else held, keys) for each, held, keys in self.stores
        ]
        return dataclasses.replace(self, stores=stores)

    def add_store(self, layout: Layout, buffers: Sequence[Any], keys: Mapping[Any, Any]) -> None:
        """Variables that are in buffers from now on."""
        self.stores.append((layout, buffers, keys))

    def root(self, var: Var) -> Var:
        """The variable that this is an alias of."""
        while var in self.same:
            var = self.same[var]
        return var

    def fetch(self, var: Atom, device: int | None = None) -> Any:
        """The value of a variable, on the current device or on another."""
        if isinstance(var, Literal):
            return var.val
        var = self.root(var)
        # Nearest first: computed in this block, known to all, without operands, in a buffer.
        if var in self.own:
            return self.own[var]
        if var in self.known:
            return self.known[var]
        if var in self.constants:
            return self._make(var)
        whose = self.device if device is None else device
        assert whose is not None, f"{var} is on one device only"
        # The latest store first: after the loop, a carried value is no longer its initial value.
        for layout, buffers, keys in reversed(self.stores):
            if var in keys and keys[var] in layout.slots[whose]:
                return layout.read(whose, buffers, keys[var])
        raise KeyError(f"{var} is nowhere on device {whose}")

    def operands(self, eqn: JaxprEqn) -> dict[Any, Any]:
        """The operands of an equation, by variable; its results can be added."""
        return {v: self.fetch(v) for v in internals.variables(eqn.invars)}

    def keep(self, eqn: JaxprEqn, made: Mapping[Any, Any]) -> None:
        """The results of an equation that was run."""
        place = self.known if self.device is None else self.own
        for var in eqn.outvars:
            place[var] = made[var]

    def send(self, var: Var, source: int) -> None:
        """Send the values of one device to all."""
        self.known[var] = from_device(source, self.fetch(var, source))

    def _make(self, var: Var) -> Any:
        eqn = self.constants[var]
        with internals.equation_context(eqn):
            # Emitted again for each use, so that it is in no buffer and in no carry.
            outputs = internals.bind_again(eqn, [self.fetch(v) for v in eqn.invars])
        return outputs[eqn.outvars.index(var)]


def from_device(source: int, value: jax.Array) -> jax.Array:
    """The value of one device of the stages, on all of them."""
    # A sum to which all other devices add zeros: one exchange, whichever the source is.
    # JAX sums booleans as int32, four times the bytes.
    is_bool = value.dtype == jnp.bool_
    number = value.astype(jnp.int8) if is_bool else value
    mine = lax.axis_index(STAGE) == source
    # Selected, not multiplied by zero: garbage on the other devices may be NaN.
    number = lax.psum(jnp.where(mine, number, jnp.zeros_like(number)), STAGE)
    return number.astype(jnp.bool_) if is_bool else number
