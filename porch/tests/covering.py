"""Products of choices: a covering part of each in every run, all of it with `-m exhaustive`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """All combinations; those beyond a set that has every pair of choices are `exhaustive`.

    For `@pytest.mark.parametrize(("mode", "replicas", "steps"), covering(MODES, [1, 2], [1, 3]))`.
    """
    chosen = _pairwise(axes)
    return [
        pytest.param(*row, marks=() if row in chosen else pytest.mark.exhaustive)
        for row in itertools.product(*axes)
    ]


def _pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Row by row the combination that has most pairs which no row before it has."""
    rows = list(itertools.product(*axes))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))
