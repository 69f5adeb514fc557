"""Cuts and the table of what-ifs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import PlanError
from tailrace.pipeline import PipelineSchedule, balanced_cut, plan, what_if
from tailrace.pipeline.balance_cuts import stage_sums


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_balanced_cut_is_the_best_cut(case):
    costs, stages = case
    cut = balanced_cut(costs, stages)
    assert len(cut) == stages - 1
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert max(stage_sums(costs, cut)) == min(max(stage_sums(costs, each)) for each in every)


def test_cuts_that_are_none():
    with pytest.raises(PlanError, match="3 layers cannot make 4 stages"):
        balanced_cut([1, 1, 1], 4)
    with pytest.raises(PlanError, match=r"received \[2, 2\]"):
        stage_sums([1, 1, 1], [2, 2])
    with pytest.raises(PlanError, match=r"between 1 and 2; received \[3\]"):
        what_if([1, 1, 1], cuts=[[3]])


def test_a_case_is_the_plan_simulated():
    table = what_if([1.0, 2.0, 3.0, 4.0], microbatches=16, schedules=["interleaved"])
    (case,) = table
    assert case.plan == plan(4, 16, "interleaved")
    assert case.simulation == case.plan.simulate([1.0, 2.0, 3.0, 4.0])
    assert case.speedup == pytest.approx(16 * 30 / case.simulation.total)


def test_every_combination_is_answered():
    table = what_if(
        [1.0] * 8,
        [2.0] * 8,
        microbatches=[8, 20],
        stages=[2, 4],
        devices=[2],
        modes=["gated", "free"],
    )
    assert len(table) == 2 * 2 * 3 * 2
    fastest = [case.per_microbatch for case in table]
    assert fastest == sorted(fastest)
    refused = [case for case in table if case.problem]
    # Grouped with four stages needs a multiple of 8; Interleaved cannot share devices.
    assert {(case.schedule, case.stages) for case in refused} == {
        (PipelineSchedule.GROUPED, 4),
        (PipelineSchedule.INTERLEAVED, 4),
    }
    text = str(table)
    assert "no: The number of iterations of the pipeline must be a multiple of 8" in text
    assert "no: The interleaved schedule does not support" in text
    assert "colspan" in table._repr_html_()


def test_best_is_the_fastest_case_that_can_run():
    table = what_if([1.0] * 8, microbatches=[16], stages=[2, 4, 8], schedules=["grouped"])
    assert table.best.stages == 8
    assert table.best.cut == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(PlanError, match="None of the cases can run"):
        _ = what_if([1.0] * 4, microbatches=3, schedules=["grouped"]).best


def test_cuts_and_bytes_and_updates():
    table = what_if(
        [4.0, 1.0, 1.0],
        microbatches=8,
        cuts=[[1], [2]],
        schedules=["grouped"],
        stash_bytes=[10, 20, 30],
        update=[0.5, 0.5, 0.5],
    )
    assert table.best.cut == (1,)
    assert table.best.stash_bytes == max(3 * 10, 1 * 50)
    assert "50 B peak" in str(table)
    assert table.best.simulation.update == 1.0


def test_what_if_without_a_backward():
    table = what_if([1.0] * 4, microbatches=8, schedules=["grouped"], training=False)
    assert table.best.simulation.total == 11
    assert table.best.plan.training is False


def test_lengths_are_checked():
    with pytest.raises(PlanError, match=r"`backward` has one value .* received 1 for 2"):
        what_if([1.0, 1.0], [1.0])
    with pytest.raises(PlanError, match="`forward` has the time of each layer"):
        what_if([])
    with pytest.raises(PlanError, match="`stash_bytes` has one value for each layer"):
        what_if([1.0, 1.0], stash_bytes=[1])
    refused = what_if([1.0, 1.0], devices=[3], schedules=["grouped"])
    assert "3 devices cannot be shared out to 2 stages" in str(refused)
