"""How many steps an execution has: pure arithmetic, no clock."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.errors import OptionError
from tailrace.feeds.dispatch_table import LONGEST, LONGEST_S, TARGET_S, TRIAL, TRIALS
from tailrace.trainer.fitting.pace import Pace, parse_steps

FAST = 1e-5  # seconds a step
SLOW = 20 * TARGET_S


def run(pace, total, per_step, each=0.0):
    """The lengths of all executions of a fit: seconds of a step, and of an execution besides them."""
    lengths, remaining = [], total
    while remaining:
        length = pace.next(remaining)
        assert 1 <= length <= remaining
        remaining -= length
        pace.measured(length, each + length * per_step)
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
    assert re.search(
        r"takes 100 microseconds .* 0.00 MB \(limit: the target time, 0.25 s\)", pace.reason
    )


def test_the_capacity_of_an_executable():
    pace = Pace(None, bytes_per_step=100)
    run(pace, 1_000_000, FAST)
    assert pace.chosen == pace.most == LONGEST
    assert pace.reason.endswith("(limit: the longest execution, 4,096 steps)")


def test_bytes_set_the_other_limit():
    pace = Pace(None, bytes_per_step=1000, most_bytes=64_000)
    lengths = run(pace, 100_000, FAST)
    assert max(lengths) <= 64
    assert pace.reason.endswith("(limit: memory of elements, 64.0 kB)")


@pytest.mark.parametrize("per_step", [0.01, 0.05, 0.1])
def test_what_an_execution_costs_besides_its_steps_makes_it_longer(per_step):
    """Buffers for the records of many taps, cleared each time; one step alone pays for all of them."""
    pace = Pace(None, bytes_per_step=100)
    lengths = run(pace, 10_000, per_step, each=0.3)
    assert lengths[0] == 1
    assert pace.chosen >= 0.8 * LONGEST_S / (per_step + 0.3 / TRIAL)
    assert pace.chosen * per_step <= LONGEST_S
    assert pace.reason.endswith("(limit: the longest execution, 2 s)")
    # A resumed fit goes on with the same lengths.
    first, second = Pace(None, bytes_per_step=100), Pace(None, bytes_per_step=100)
    before = run(first, 3, per_step, each=0.3)
    second.choose_as(first.chosen_state())
    assert [*before, *run(second, 9_997, per_step, each=0.3)] == lengths


def test_long_steps_are_tried_alone():
    assert set(run(Pace(None, bytes_per_step=100), 20, 5.0, each=0.3)) == {1}


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
    assert pace.reason.endswith("(limit: memory of records)")


def test_the_overhead_of_an_execution_is_named():
    pace = Pace(None, bytes_per_step=100)
    run(pace, 10_000, 0.01, each=0.1)
    assert pace.reason.endswith("(limit: the overhead of an execution, 10 x 100.0 ms)")
    assert pace.chosen > TARGET_S / 0.01


def test_a_dataset_of_unknown_length():
    pace = Pace(None, bytes_per_step=100)
    for length in (1, TRIAL, TRIAL):
        assert pace.next(None) == length
        pace.measured(length, length * FAST)
    assert pace.next(None) == pace.chosen > 1000


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "many", None])
def test_bad_values(value):
    with pytest.raises(
        OptionError, match=rf">= 1, or 'auto'. Received: steps_per_execution={value!r}"
    ):
        parse_steps(value)


def test_good_values():
    assert parse_steps("auto") is None
    assert parse_steps(5) == 5


def test_records_of_short_executions_do_not_keep_room_for_long_ones():
    rows = np.ones((64, 4, 64), np.float32)

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    params = np.eye(64, dtype=np.float32)
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params, observe=tr.Tap("grad/*", reduce="tensor"))
    trainer.fit(list(rows), steps=1)
    values = trainer.records["grad/params", "tensor"].values
    assert len(values) == 1
    held = 0
    while isinstance(values, np.ndarray):
        held, values = max(held, values.nbytes), values.base
    assert held == params.nbytes
