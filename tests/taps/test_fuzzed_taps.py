"""A short run of `python -m benchmarks.fuzz_taps`: random programs are the same with taps."""

import importlib
import sys
from pathlib import Path

import jax
import pytest

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def fuzz():
    sys.path.insert(0, ROOT)  # the benchmark imports its programs from the package `benchmarks`
    try:
        yield importlib.import_module("benchmarks.fuzz_taps")
    finally:
        sys.path.remove(ROOT)


def faults(fuzz, first, count):
    found = []
    with jax.numpy_dtype_promotion("standard"):  # the programs mix dtypes, as users' do
        for seed in range(first, first + count, fuzz.TOGETHER):
            found += fuzz.check(range(seed, seed + fuzz.TOGETHER))
    jax.clear_caches()
    assert sum(outcome == "equal" for _, outcome, _ in found) >= count // 2
    return [each for each in found if fuzz.is_fault(each[1])]


def test_random_programs_are_the_same_with_taps(fuzz):
    assert not faults(fuzz, 0, 4)


def test_more_random_programs(fuzz):
    assert not faults(fuzz, 28, 12)


@pytest.mark.exhaustive
def test_two_thousand_random_programs(fuzz):
    assert not faults(fuzz, 40, 2000)


def test_the_fuzzer_can_fail(fuzz, monkeypatch):
    runs = iter([[1.0], [2.0]])
    monkeypatch.setattr(fuzz.Case, "run", lambda case: next(runs))
    ((_, outcome, about),) = fuzz.check([0])
    assert outcome == "differs"
    assert "leaf 0: array(2.), not array(1.)" in about
