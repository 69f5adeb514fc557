"""The stash, where forwards keep residuals for backwards: slots, one microbatch each.

A large value has a separate buffer. The small ones of a unit (statistics of normalisations, masks,
keys) are concatenated into a row per dtype, which is written and read as one: a model of many layers
has hundreds of them, and on a GPU each operation takes as long as moving megabytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tailrace.pipeline.lowering.buffers import Form, Layout, unwrapped, wrapped
from tailrace.taps.frame import Scalar

SMALL = 1 << 18
"""Values of at most this many bytes share a row: copying costs less than a separate operation."""

Whose = tuple[int, int]
"""A stage, and a member of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """Values that are written and read as one.

    Attributes:
        key: the key of the row in the layout.
        variables: its variables, in order.
        forms: their forms.
    """

    key: tuple[Whose, Any]
    variables: tuple[Any, ...]
    forms: tuple[Form, ...]


class StashLayout(Layout):
    """The places of the stashes of all units.

    Args:
        puts: for each device, the values that each unit stashes.
        depths: the number of slots of each unit.
        hosted: whether the stash is in host memory.
    """

    def __init__(
        self,
        puts: Sequence[Mapping[Whose, Sequence[Any]]],
        depths: Mapping[Whose, int],
        hosted: bool = False,
    ) -> None:
        self.rows: dict[Whose, list[Row]] = {}
        values: list[dict[Any, Form]] = [{} for _ in puts]
        for device, units in enumerate(puts):
            for whose, variables in units.items():
                depth = depths[whose]
                self.rows[whose] = _rows(whose, variables, depth)
                for row in self.rows[whose]:
                    values[device][row.key] = _form(row, depth, hosted)
        super().__init__(values)

    def put(
        self, device: int, buffers: list[Any], whose: Whose, known: Mapping[Any, Any], slot: Scalar
    ) -> None:
        """Stash the residuals of a unit, from values by variable."""
        for row in self.rows.get(whose, ()):
            values = [known[var] for var in row.variables]
            if len(values) > 1:  # concatenated, as one operation
                kept = [
                    jnp.ravel(jnp.asarray(unwrapped(value, form), form.stored.dtype))
                    for value, form in zip(values, row.forms, strict=True)
                ]
                values = [jnp.concatenate(kept)]
            self.write(device, buffers, row.key, values[0], slot)

    def take(
        self, device: int, buffers: Sequence[Any], whose: Whose, slot: Scalar
    ) -> dict[Any, Any]:
        """The stashed residuals of a unit, by variable."""
        found = {}
        for row in self.rows.get(whose, ()):
            value = self.read(device, buffers, row.key, slot)
            if len(row.variables) == 1:
                found[row.variables[0]] = value
                continue
            place = 0
            for var, form in zip(row.variables, row.forms, strict=True):
                # Slices at constant offsets, which XLA fuses into the operations that read them.
                part = lax.slice_in_dim(value, place, place + form.size)
                found[var] = wrapped(part.reshape(form.stored.shape), form)
                place += form.size
        return found


def _rows(whose: Whose, variables: Sequence[Any], depth: int) -> list[Row]:
    # A large value alone: put into a row, it would be copied once more.
    found: list[Row] = []
    small: dict[Any, list[tuple[Any, Form]]] = {}
    for var in variables:
        form = Form.of(var.aval, depth)
        # By the size of one microbatch: that is what is copied when the row is written.
        if form.nbytes // depth > SMALL:
            found.append(Row((whose, var), (var,), (form,)))
        else:
            # By the dtype as stored: keys and 16-bit floats are kept as integers.
            small.setdefault(jnp.dtype(form.stored.dtype), []).append((var, form))
    for members in small.values():
        names, forms = zip(*members, strict=True)
        found.append(Row((whose, names[0]), names, forms))
    return found


def _form(row: Row, depth: int, hosted: bool) -> Form:
    """The form of a row: that of its only member, or flat."""
    if len(row.forms) == 1:
        return dataclasses.replace(row.forms[0], hosted=hosted)
    total = sum(form.size for form in row.forms)
    return Form((total,), row.forms[0].stored.dtype, depth, hosted=hosted)
