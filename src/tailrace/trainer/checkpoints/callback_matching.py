"""Which saved state belongs to which callback of a resumed fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.base.messages import note_once


def classes_of(callbacks: Sequence[object]) -> list[str]:
    """The names of the classes of callbacks, which a checkpoint has beside their states."""
    return [type(callback).__name__ for callback in callbacks]


def states_of(
    callbacks: Sequence[object], states: Sequence[dict[str, Any]], classes: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The saved state of each callback, that of the same class and number; empty if it has none.

    A script may have other callbacks when it is started again: by position alone, one would get the
    state of another.

    Args:
        callbacks: those of the resumed fit.
        states: the saved states.
        classes: the classes that they are of; None in a checkpoint of an earlier version.
    """
    if classes is None:
        return [*states, *({} for _ in callbacks)][: len(callbacks)]
    left = list(zip(classes, states, strict=True))
    found: list[dict[str, Any]] = []
    for name in classes_of(callbacks):
        place = next((n for n, (kind, _) in enumerate(left) if kind == name), None)
        found.append({} if place is None else left.pop(place)[1])
    if lost := [kind for kind, state in left if state]:
        note_once(
            f"The checkpoint has the state of callbacks that this fit does not have: "
            f"{', '.join(lost)}. The fit continues without them.",
            key=f"callbacks without {lost}",
        )
    return found
