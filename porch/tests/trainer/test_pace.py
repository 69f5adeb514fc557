"""How many steps an execution has: pure arithmetic, no clock."""

import re

import pytest

from tailrace.errors import OptionError
from tailrace.program.running.dispatch_lengths import LONGEST
from tailrace.trainer.fitting.pace import TARGET_S, TRIAL, TRIALS, Pace, parse_steps

FAST = 1e-5  # seconds a step
SLOW = 20 * TARGET_S


def run(pace, total, per_step):
    """The lengths of all executions of a fit, each step taking so long."""
    lengths, remaining = [], total
    while remaining:
        length = pace.next(remaining)
        assert 1 <= length <= remaining
        remaining -= length
        pace.measured(length, length * per_step)
        lengths.append(length)
    return lengths


def test_a_given_number_is_kept():
    pace = Pace(7, bytes_per_step=1 << 40)
    assert run(pace, 23, FAST) == [7, 7, 7, 2]
    assert pace.reason == "7 steps an execution, as asked"


def test_fast_steps_make_long_executions():
    pace = Pace(None, bytes_per_step=100)
    lengths = run(pace, 1_000_000, 1e-4)
    assert lengths[:TRIALS] == [1, TRIAL, TRIAL]
    assert pace.chosen == int(TARGET_S / 1e-4)
    assert sum(lengths) == 1_000_000
    assert re.search(r"takes 100 microseconds .* 0.00 MB \(limit: time\)", pace.reason)


def test_an_executable_has_room_for_so_many_steps():
    pace = Pace(None, bytes_per_step=100)
    run(pace, 1_000_000, FAST)
    assert pace.chosen == pace.most == LONGEST


def test_bytes_set_the_other_limit():
    pace = Pace(None, bytes_per_step=1000, most_bytes=64_000)
    lengths = run(pace, 100_000, FAST)
    assert max(lengths) <= 64
    assert pace.reason.endswith("(limit: memory)")


def test_elements_larger_than_the_budget_go_one_by_one():
    assert run(Pace(None, bytes_per_step=100, most_bytes=10), 4, FAST) == [1, 1, 1, 1]


def test_slow_steps_go_one_by_one():
    pace = Pace(None, bytes_per_step=100)
    assert set(run(pace, 200, SLOW)) == {1}
    assert (pace.chosen, len(pace.trials)) == (1, TRIALS)


def test_a_slow_first_step_decides_nothing():
    """After a compilation it takes long whatever the model."""
    pace = Pace(None, bytes_per_step=100)
    assert run(pace, 1, SLOW) == [1]
    assert run(pace, 30, TARGET_S / 5) == [1, 5, 5, 5, 5, 5, 4]


def test_steps_of_some_time_are_as_many_as_fit():
    pace = Pace(None, bytes_per_step=100)
    assert run(pace, 30, TARGET_S / 4) == [1, 4, 4, 4, 4, 4, 4, 4, 1]


def test_trials_go_on_in_the_next_fit():
    pace = Pace(None, bytes_per_step=100)
    assert [run(pace, 3, FAST) for _ in range(3)] == [[1, 2], [3], [3]]
    assert pace.chosen > 1000


def test_something_else_may_limit_the_steps():
    pace = Pace(None, bytes_per_step=100, most_steps=40)
    assert max(run(pace, 10_000, FAST)) <= 40


def test_a_dataset_of_unknown_length():
    pace = Pace(None, bytes_per_step=100)
    for length in (1, TRIAL, TRIAL):
        assert pace.next(None) == length
        pace.measured(length, length * FAST)
    assert pace.next(None) == pace.chosen > 1000


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "many", None])
def test_bad_values(value):
    with pytest.raises(OptionError, match=rf"at least 1. Received: {value!r}"):
        parse_steps(value)


def test_good_values():
    assert parse_steps("auto") is None
    assert parse_steps(5) == 5
