"""Scores among the values before: those of a loop over all values, bit for bit."""

from collections import deque

import numpy as np
import pytest

from tailrace.records.scores import moving_scores, robust_scores


@pytest.mark.parametrize(("window", "least"), [(100, 20), (7, 3), (5, 9), (20, 20)])
def test_moving_scores_are_those_of_a_loop(window, least):
    rng = np.random.default_rng(window)
    for trial in range(20):
        values = rng.normal(size=rng.integers(1, 60))
        before = rng.normal(size=rng.integers(0, window + 1))
        if trial % 4 == 0:
            values[rng.integers(len(values))] = np.nan
        seen, expected = deque(before, maxlen=window), []
        for value in values:
            enough = len(seen) >= least
            expected.append(robust_scores([value], among=list(seen))[0] if enough else 0.0)
            seen.append(value)
        found = moving_scores(values, before, window, least)
        np.testing.assert_array_equal(found, expected)
