"""Selection of records by name, with the selections of taps."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailrace.errors import SelectionError
from tailrace.records.records import Records
from tailrace.taps.catalogue import Catalogue, Entry, Select, matches


def chosen_keys(
    records: Records,
    select: Select,
    kinds: tuple[str, ...] = (),
    catalogue: Catalogue = Catalogue(()),  # noqa: B008 - it does not change
) -> list[Any]:
    """The (name, kind) of the records that a selection matches, from the model's input to its output.

    Args:
        records: the records.
        select: a glob, `re.compile(...)`, a function of an entry, or a list of these.
        kinds: only records of these kinds; empty for all.
        catalogue: the tensors of the step, whose order is that of the keys; without one they are in the
            order of the records.

    Raises:
        SelectionError: none match.
    """
    named = [
        key
        for key in records
        # Records have only their names: shape and dtype of the entry are placeholders.
        if matches(select, Entry(key[0], key[0].split("/")[0], (), np.dtype("float32")))
    ]
    if not named:
        there = ", ".join(map(repr, records.names[:5])) or "none at all"
        raise SelectionError(f"No records match {select!r}. There are records of: {there}.")
    found = [key for key in named if not kinds or key[1] in kinds]
    if not found:
        wanted = " or ".join(f"reduce={kind!r}" for kind in kinds)
        there = ", ".join(sorted({repr(key[1]) for key in named}))
        raise SelectionError(
            f"This needs taps with {wanted}. The records that match {select!r} are of the kind "
            f"{there}."
        )
    order = catalogue.model_order()
    return sorted(found, key=lambda key: order.get(key[0], len(order)))
