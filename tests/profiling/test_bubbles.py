"""A pipeline as it ran: every unit has a span, none overlap on a device, and idle time has a reason."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting_stages import elements, waiting_trainer

import tailrace as tr
from tailrace.profiling.profile import measured
from tailrace.profiling.profile.pipeline_times import (
    EXCHANGE,
    NEIGHBOUR,
    SLOWEST,
    UPDATE,
    WORK,
    pipeline_times,
)
from tailrace.profiling.profile.profile import Profile
from tailrace.profiling.programs.tick_times import MeasuredTicks, TimedUnit
from timelines import Timeline, no_overlap

pytestmark = pytest.mark.cpu

STEPS = 3


def model(params, x):
    for number in range(2):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ params[number])
        if number == 0:
            x = tr.stage_boundary(x)
    return (x**2).mean()


@pytest.fixture(scope="module", params=["grouped", "interleaved"])
def traced(request, tmp_path_factory):
    params = [np.full((16, 16), 0.1, np.float32)] * 2
    pipeline = tr.Pipeline(model, accumulation=4, schedule=request.param)
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), params, steps_per_execution=STEPS)
    data = tr.batches(np.ones((64, 16), np.float32), 8, repeat=True)
    directory = tmp_path_factory.mktemp("traced")
    trainer.fit(data, steps=2 * STEPS, progress=False, trace=directory)
    return trainer.plan, Timeline(next(directory.iterdir()))


@pytest.mark.parametrize("group", ["ticks, as planned", "ticks, as measured"])
def test_every_unit_of_the_plan_has_a_span_and_none_overlap(traced, group):
    plan, timeline = traced
    expected = Counter(
        (unit.device, f"{unit.kind}{unit.stage}.{unit.microbatch}", step, tick)
        for tick, units in enumerate(plan.ticks)
        for unit in units
        for step in range(STEPS)
    )
    found: Counter = Counter()
    for device in plan.devices:
        slices = timeline.slices[f"{group}/device {device}"]
        assert no_overlap(slices), device
        found.update((device, s.name, s.about["step"], s.about["tick"]) for s in slices)
    assert found == Counter({key: 2 for key in expected})  # in two executions


def test_units_run_in_the_order_of_the_plan(traced):
    plan, timeline = traced
    for device in plan.devices:
        slices = timeline.slices[f"ticks, as measured/device {device}"]
        first = [s for s in sorted(slices, key=lambda s: s.start)][: len(plan.ticks) * 2]
        ticks = [s.about["tick"] for s in first if s.about["step"] == 0]
        in_first = ticks[: sum(u.device == device for t in plan.ticks for u in t)]
        assert in_first == sorted(in_first)


TIMES = np.array([[0.010, 0.030], [0.040, 0.015]])
EXCHANGED, UPDATED = 0.001, 0.002


def ran(plan):
    """A pipeline as it runs where a unit takes exactly its time."""
    units, now = [], 0
    for step in range(STEPS):
        for tick, of_all in enumerate(plan.ticks):
            ends = []
            for device in plan.devices:
                at = now
                for unit in of_all:
                    if unit.device == device:
                        took = round(TIMES["FB".index(unit.kind), unit.stage] * 1e9)
                        units.append(TimedUnit(step, tick, unit, at, at + took, took))
                        at += took
                ends.append(at)
            now = max(ends) + round(EXCHANGED * 1e9)
        now += round((UPDATED - EXCHANGED) * 1e9)  # nothing is exchanged after the last tick
    return MeasuredTicks(plan, STEPS, units)


@pytest.fixture(scope="module")
def exact():
    return pipeline_times(ran(tr.plan(2, 4, "grouped")), per_execution=STEPS, wall_s=1.0)


def test_what_cells_took(exact):
    assert len(exact.cells) == 16
    assert exact.forward == pytest.approx(TIMES[0])
    assert exact.backward == pytest.approx(TIMES[1])
    for cell in exact.cells:
        took = pytest.approx(TIMES["FB".index(cell.kind)][cell.stage])
        assert (cell.planned, cell.measured) == (took, took)


def test_every_idle_second_has_a_reason(exact):
    first, second = exact.devices[0], exact.devices[1]
    (f0, f1), (b0, b1) = TIMES
    assert first[WORK] == pytest.approx(4 * (f0 + b0))
    assert second[WORK] == pytest.approx(4 * (f1 + b1))
    # Stage 1 has nothing in the first tick, where stage 0 has F, and in the last, where it has B.
    assert second[NEIGHBOUR] == pytest.approx(f0 + b0)
    assert first[NEIGHBOUR] == 0.0
    # It waits in ticks 1, 2 and 4, where stage 1 has F, B and F, and B and F, and it has F, F and B.
    expected = (f1 - f0) + (b1 + f1 - f0) + (b1 + f1 - b0)
    assert first[SLOWEST] == pytest.approx(expected)
    for each in exact.devices.values():
        assert each[UPDATE] == pytest.approx(UPDATED)
        parts = (WORK, SLOWEST, NEIGHBOUR, EXCHANGE, UPDATE)
        assert sum(each[part] for part in parts) == pytest.approx(exact.step, rel=1e-6)
    assert 0 < exact.bubble < 1


def test_the_simulator_with_measured_costs_has_the_time_of_a_step(exact):
    assert exact.step == pytest.approx(exact.predicted, rel=0.01)


@pytest.fixture(scope="module")
def waited():
    times = np.array([[0.010, 0.030], [0.040, 0.015]], np.float32)
    return times, waiting_trainer(2, 4, "grouped", steps=3).profile(elements(times))


def test_no_cell_takes_less_than_it_waits(waited):
    times, profile = waited
    pipeline = profile.pipeline
    assert len(pipeline.cells) == 16
    assert all(found >= known for found, known in zip(pipeline.forward, times[0], strict=True))
    for cell in pipeline.cells:
        assert (
            cell.planned
            == (pipeline.forward if cell.kind == "F" else pipeline.backward)[cell.stage]
        )
        assert cell.measured >= times["FB".index(cell.kind)][cell.stage]
    for each in pipeline.devices.values():
        parts = (WORK, SLOWEST, NEIGHBOUR, EXCHANGE, UPDATE)
        assert sum(each[part] for part in parts) == pytest.approx(pipeline.step, rel=1e-6)


def test_it_prints_and_is_kept(waited):
    _, profile = waited
    assert "waits for the slowest stage" in str(profile)
    assert "F0.0x" in profile.pipeline.grid()
    assert Profile.from_json(profile.to_json()) == profile
    assert "F0.0x" in profile._repr_html_()


def test_a_device_does_one_thing_at_a_time(monkeypatch):
    """XLA records a copy that nothing waits for until a thread has time for it, ticks later."""
    seen = []

    def noted(ticks, *args):
        seen.append(ticks)
        return pipeline_times(ticks, *args)

    monkeypatch.setattr(measured, "pipeline_times", noted)

    def two_and_one(params, x):
        for number, kernel in enumerate(params):
            x = jax.nn.relu(x @ kernel)
            if number == 1:
                x = tr.stage_boundary(x)
        return (x**2).mean()

    params = [np.full((768, 768), 0.01, np.float32)] * 3
    pipeline = tr.Pipeline(two_and_one, accumulation=8)
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), params, steps_per_execution=4)
    data = tr.batches(np.ones((1024, 768), np.float32), 128, repeat=True)
    trainer.profile(data, executions=2)
    (ticks,) = seen
    for device in ticks.plan.devices:
        mine = sorted(
            (one for one in ticks.units if one.unit.device == device),
            key=lambda one: (one.step, one.tick),
        )
        groups = [list(g) for _, g in itertools.groupby(mine, lambda one: (one.step, one.tick))]
        for group, following in itertools.pairwise(groups):
            room = min(one.start for one in following) - min(one.start for one in group)
            assert sum(one.busy for one in group) <= room


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stages", "count", "schedule"),
    [
        (2, 4, "grouped"),
        (2, 4, "interleaved"),
        (3, 6, "grouped"),
        (3, 6, "interleaved"),
        (4, 8, "grouped"),
    ],
)
def test_random_unequal_pipelines(stages, count, schedule):
    rng = np.random.default_rng(stages * 10 + len(schedule))
    trainer = waiting_trainer(stages, count, schedule)
    for _ in range(4):
        times = rng.uniform(0.003, 0.015, size=(2, stages)).astype(np.float32)
        pipeline = trainer.profile(elements(times)).pipeline
        assert pipeline.step == pytest.approx(pipeline.predicted, rel=0.05), times
