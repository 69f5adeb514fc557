"""Random plans: whatever the stages, mapping and schedule, the rules hold."""

import random
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tailrace.errors import PlanError
from tailrace.pipeline import PipelineSchedule, Plan, plan

# The machine may be busy: no limit on the time of one example.
drawn = settings(deadline=None, max_examples=80)


@st.composite
def plans(draw, max_stages=5):
    """Any plan that the rules allow, small enough to look at whole."""
    schedule = draw(st.sampled_from(PipelineSchedule))
    training = draw(st.booleans())
    stages = draw(st.integers(2, max_stages))
    sizes = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=stages, max_size=stages))
    total = sum(sizes)
    if training and schedule is PipelineSchedule.INTERLEAVED:
        devices = draw(st.permutations(range(total)))
    else:
        devices = draw(st.lists(st.integers(0, total - 1), min_size=total, max_size=total))
    mapping, used = [], 0
    for size in sizes:
        mapping.append(devices[used] if size == 1 else list(devices[used : used + size]))
        used += size
    rounds = draw(st.integers(1, 3))
    # The overlap depends on the mapping: one round of a plan that is sure to pass tells it.
    for overlap in range(1, 2 * stages + 1):
        try:
            made = plan(sizes, overlap, schedule, mapping, training)
        except PlanError:
            continue
        return plan(sizes, rounds * made.overlap, schedule, mapping, training)
    raise AssertionError("no count suits this plan")


@drawn
@given(plans())
def test_every_plan_passes_its_check(made):
    made.check()
    assert made.with_ticks(made.ticks).check()


@drawn
@given(plans())
def test_every_unit_runs_once_where_it_lives(made):
    units = Counter(unit for tick in made.ticks for unit in tick)
    assert set(units.values()) == {1}
    assert set(units) == {
        (device, kind, stage, microbatch)
        for stage, devices in enumerate(made.placement)
        for device in devices
        for kind in ("FB" if made.training else "F")
        for microbatch in range(made.microbatches)
    }


@drawn
@given(plans())
def test_time_follows_from_start(made):
    last = made.virtual_stages - 1
    for t, tick in enumerate(made.ticks):
        assert tick  # no tick is empty
        for _, kind, stage, microbatch in tick:
            virtual = stage if kind == "F" else last - stage
            assert t == made.start(microbatch) + virtual
    assert sum(map(len, made.phases)) == made.num_ticks


@drawn
@given(plans())
def test_slots_are_what_the_ticks_need(made):
    """Counted unit by unit: residuals held at once, never more than the slots."""
    held = Counter()
    most = Counter()
    for tick in made.ticks:
        for _, kind, stage, _ in dict.fromkeys((0, *unit[1:]) for unit in tick):
            held[stage] += (1 if kind == "F" else -1) if made.training else 0
            most[stage] = max(most[stage], held[stage])
    for stage in range(made.stages):
        assert most[stage] == made.slots(stage)
        assert held[stage] == 0


@drawn
@given(plans())
def test_round_trips(made):
    assert Plan.from_text(made.to_text()) == made
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json(ticks=False)) == made


@drawn
@given(plans(), st.data())
def test_simulators_agree(made, data):
    stage_times = st.lists(st.integers(0, 8).map(float), min_size=made.stages, max_size=made.stages)
    forward = data.draw(stage_times)
    backward = data.draw(stage_times) if made.training else None
    mode = data.draw(st.sampled_from(["gated", "masked", "ungated", "free"]))
    fast = made.simulate(forward, backward, 0.5, 0.25, mode)
    assert fast == made.with_ticks(made.ticks).simulate(forward, backward, 0.5, 0.25, mode)
    assert fast.total >= fast.ideal
    parts = fast.ramp_up + fast.steady + fast.ramp_down + fast.update
    assert parts == pytest.approx(fast.total) or mode == "free"


@drawn
@given(plans())
def test_modes_are_ordered(made):
    totals = [made.simulate(1.0, mode=m).total for m in ("free", "gated", "masked", "ungated")]
    assert totals == sorted(totals)
    assert 0 <= made.bubble < 1


@drawn
@given(plans(), st.randoms(use_true_random=False))
def test_any_missing_or_doubled_unit_is_found(made, chance: random.Random):
    ticks = [list(tick) for tick in made.ticks]
    tick = chance.choice(ticks)
    unit = chance.choice(tick)
    if chance.random() < 0.5:
        tick.remove(unit)
    else:
        chance.choice(ticks).append(unit)
    with pytest.raises(PlanError, match="-->"):
        made.with_ticks(ticks).check()


@drawn
@given(plans(), st.randoms(use_true_random=False))
def test_a_unit_moved_too_early_is_found(made, chance: random.Random):
    """What a unit needs is made one tick before it, so any earlier tick is too early."""
    t = chance.randrange(made.num_ticks)
    late = [unit for unit in made.ticks[t] if unit[1:3] != ("F", 0)]
    assume(late)
    unit = chance.choice(late)
    ticks = [list(tick) for tick in made.ticks]
    ticks[t].remove(unit)
    ticks[chance.randrange(t)].append(unit)
    with pytest.raises(PlanError, match="-->"):
        made.with_ticks(ticks).check()


@drawn
@given(plans())
def test_every_plan_can_be_drawn(made):
    assert made.draw().count("\n") >= len(made.devices)
    assert made.svg().startswith("<svg ")
