"""A pipelined step equals the plain accumulated step, whatever the schedule.

The full product of six choices runs under `-m exhaustive`; a covering array of it, in which every
pair of choices occurs, runs always.
"""

import functools
import itertools

import jax
import optax
import pytest
from pipelined import (
    SCHEDULES,
    assert_same_bits,
    assert_same_training,
    composed,
    dense_stages,
    elements,
    trained,
)

import tailrace as tr

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}
CHOICES = (
    SCHEDULES,
    (2, 3, 4),
    tuple(OPTIMIZERS),
    ("sum", "mean", "running_mean"),
    (False, True, "interleaved"),
    (1, 2),
)
COVERING = (
    ("grouped", 2, "momentum", "sum", False, 1),
    ("grouped", 3, "adam", "sum", True, 1),
    ("grouped", 4, "momentum", "running_mean", True, 2),
    ("grouped", 4, "sgd", "mean", "interleaved", 1),
    ("interleaved", 2, "adam", "running_mean", False, 1),
    ("interleaved", 2, "momentum", "mean", "interleaved", 2),
    ("interleaved", 2, "sgd", "running_mean", True, 1),
    ("interleaved", 3, "sgd", "mean", False, 2),
    ("interleaved", 4, "adam", "sum", "interleaved", 2),
    ("sequential", 2, "adam", "mean", True, 2),
    ("sequential", 3, "momentum", "running_mean", "interleaved", 1),
    ("sequential", 4, "sgd", "sum", False, 2),
)
STEPS = 3


@pytest.fixture(autouse=True)
def _optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


def problem(stages):
    return dense_stages([3, 6, 5, 4, 2][: stages + 1])


@functools.cache
def plain(stages, optimizer, reduction, replicas):
    functions, params, loss = problem(stages)
    return trained(
        composed(functions, loss),
        OPTIMIZERS[optimizer](),
        params,
        elements(2 * stages * replicas * STEPS, 3),
        STEPS,
        accumulation=tr.Accumulation(2 * stages, reduction=reduction),
        replicas=replicas,
        steps_per_execution=STEPS,
    )


def difference(schedule, stages, optimizer, reduction, recompute, replicas):
    functions, params, loss = problem(stages)
    pipeline = tr.Pipeline(
        functions,
        loss,
        accumulation=tr.Accumulation(2 * stages, reduction=reduction),
        schedule=schedule,
        recompute=recompute,
    )
    found = trained(
        pipeline,
        OPTIMIZERS[optimizer](),
        params,
        elements(2 * stages * replicas * STEPS, 3),
        STEPS,
        replicas=replicas,
        steps_per_execution=STEPS,
    )
    return assert_same_training(found, plain(stages, optimizer, reduction, replicas))


def test_every_pair_of_choices_is_covered():
    for i, j in itertools.combinations(range(len(CHOICES)), 2):
        covered = {(row[i], row[j]) for row in COVERING}
        assert covered == set(itertools.product(CHOICES[i], CHOICES[j]))


@pytest.mark.parametrize("case", COVERING, ids=lambda case: "-".join(map(str, case)))
def test_covering_array(case):
    difference(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", list(itertools.product(*CHOICES)), ids=lambda case: "-".join(map(str, case))
)
def test_full_product(case, record_property):
    record_property("difference", difference(*case))


def test_schedules_agree_in_every_bit():
    functions, params, loss = problem(3)
    runs = [
        trained(
            tr.Pipeline(functions, loss, accumulation=6, schedule=schedule),
            optax.adam(0.01),
            params,
            elements(18, 3),
            STEPS,
            steps_per_execution=STEPS,
        )
        for schedule in SCHEDULES
    ]
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_more_microbatches_than_are_in_flight():
    functions, params, loss = problem(2)
    data = elements(2 * 20, 3)
    found = trained(tr.Pipeline(functions, loss, accumulation=20), optax.sgd(0.1), params, data, 2)
    expected = trained(composed(functions, loss), optax.sgd(0.1), params, data, 2, accumulation=20)
    assert_same_training(found, expected)
