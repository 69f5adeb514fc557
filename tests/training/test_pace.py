"""How many steps an execution has: pure arithmetic, no clock."""

import re

import pytest

from tailrace.errors import OptionError
from tailrace.training.pace import FIRST, TARGET_S, TRIALS, Pace, parse_steps

FAST = 1e-5  # seconds a step
SLOW = TARGET_S


def run(pace, total, per_step):
    """The lengths of all executions of a fit, each step taking so long."""
    lengths, remaining = [], total
    while remaining:
        length = pace.next(remaining)
        assert 1 <= length <= remaining
        remaining -= length
        pace.measured(length, length * per_step, remaining)
        lengths.append(length)
    return lengths


def test_a_given_number_is_kept():
    pace = Pace(7, bytes_per_step=1 << 40)
    assert run(pace, 23, FAST) == [7, 7, 7, 2]
    assert pace.reason == "7 steps an execution, as asked"


def test_fast_steps_make_long_executions():
    pace = Pace(None, bytes_per_step=100)
    lengths = run(pace, 1_000_000, FAST)
    assert lengths[:TRIALS] == [FIRST] * TRIALS
    assert TARGET_S / FAST / 2 <= pace.chosen <= TARGET_S / FAST
    assert len(set(lengths)) <= 3  # each length is compiled once
    assert sum(lengths) == 1_000_000
    assert re.search(r"takes 10 microseconds .* 0.00 MB \(limit: time\)", pace.reason)


def test_bytes_set_the_other_limit():
    pace = Pace(None, bytes_per_step=1000, most_bytes=64_000)
    lengths = run(pace, 100_000, FAST)
    assert max(lengths) <= 64
    assert pace.reason.endswith("(limit: memory)")


def test_elements_larger_than_the_budget_go_one_by_one():
    assert run(Pace(None, bytes_per_step=100, most_bytes=10), 4, FAST) == [1, 1, 1, 1]


def test_slow_steps_stay_short_and_need_one_trial():
    pace = Pace(None, bytes_per_step=100)
    lengths = run(pace, 200, SLOW)
    assert set(lengths) == {FIRST}
    assert pace.chosen == FIRST


def test_a_short_fit_does_not_decide_for_a_long_one():
    pace = Pace(None, bytes_per_step=100)
    for _ in range(5):
        assert run(pace, 3, FAST) == [3]
    run(pace, 1_000_000, FAST)
    assert pace.chosen > 1000


def test_executions_are_multiples_where_taps_ask_for_it():
    pace = Pace(None, bytes_per_step=100, multiple_of=7)
    lengths = run(pace, 700_000, FAST)
    assert all(length % 7 == 0 for length in lengths)


def test_something_else_may_limit_the_steps():
    pace = Pace(None, bytes_per_step=100, most_steps=40)
    assert max(run(pace, 10_000, FAST)) <= 40


def test_a_dataset_of_unknown_length():
    pace = Pace(None, bytes_per_step=100)
    for _ in range(TRIALS):
        assert pace.next(None) == FIRST
        pace.measured(FIRST, FIRST * FAST, None)
    assert pace.next(None) == pace.chosen > 1000


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "many", None])
def test_bad_values(value):
    with pytest.raises(OptionError, match=rf"at least 1. Received: {value!r}"):
        parse_steps(value)


def test_good_values():
    assert parse_steps("auto") is None
    assert parse_steps(5) == 5
