"""A pipeline as it ran: every unit has a span, none overlap on a device, and idle time has a reason."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from waiting_stages import elements, waiting_trainer

import tailrace as tr
from tailrace.profiling.profile.pipeline_times import (
    EXCHANGE,
    NEIGHBOUR,
    SLOWEST,
    UPDATE,
    WORK,
)
from tailrace.profiling.profile.profile import Profile
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


@pytest.fixture(scope="module")
def waited():
    # Long enough that a busy machine, which wakes a thread late, does not count.
    times = np.array([[0.010, 0.030], [0.040, 0.015]], np.float32)
    return times, waiting_trainer(2, 4, "grouped", steps=3).profile(elements(times))


def test_what_cells_took(waited):
    times, profile = waited
    pipeline = profile.pipeline
    assert len(pipeline.cells) == 16
    assert pipeline.forward == pytest.approx(times[0], abs=0.003)
    assert pipeline.backward == pytest.approx(times[1], abs=0.003)
    assert all(found >= known for found, known in zip(pipeline.forward, times[0], strict=True))
    for cell in pipeline.cells:
        assert (
            cell.planned
            == (pipeline.forward if cell.kind == "F" else pipeline.backward)[cell.stage]
        )
        assert cell.measured >= times["FB".index(cell.kind)][cell.stage]


def test_every_idle_second_has_a_reason(waited):
    _, profile = waited
    pipeline = profile.pipeline
    first, second = pipeline.devices[0], pipeline.devices[1]
    (f0, f1), (b0, b1) = pipeline.forward, pipeline.backward
    assert first[WORK] == pytest.approx(4 * (f0 + b0), rel=0.2)
    assert second[WORK] == pytest.approx(4 * (f1 + b1), rel=0.2)
    # Stage 1 has nothing in the first tick, where stage 0 has F, and in the last, where it has B.
    assert second[NEIGHBOUR] == pytest.approx(f0 + b0, rel=0.3)
    assert first[NEIGHBOUR] == 0.0
    # It waits in ticks 1, 2 and 4, where stage 1 has F, B and F, and B and F, and it has F, F and B.
    expected = (f1 - f0) + (b1 + f1 - f0) + (b1 + f1 - b0)
    assert first[SLOWEST] == pytest.approx(expected, rel=0.3)
    for each in pipeline.devices.values():
        parts = (WORK, SLOWEST, NEIGHBOUR, EXCHANGE, UPDATE)
        assert sum(each[part] for part in parts) == pytest.approx(pipeline.step, rel=1e-6)
    assert 0 < pipeline.bubble < 1


def test_the_simulator_with_measured_costs_is_within_5_percent(waited):
    _, profile = waited
    assert profile.pipeline.step == pytest.approx(profile.pipeline.predicted, rel=0.05)


def test_it_prints_and_is_kept(waited):
    _, profile = waited
    assert "waits for the slowest stage" in str(profile)
    assert "F0.0x" in profile.pipeline.grid()
    assert Profile.from_json(profile.to_json()) == profile
    assert "F0.0x" in profile._repr_html_()


def test_a_device_does_one_thing_at_a_time():
    """XLA records a copy that nothing waits for until a thread has time for it, ticks later."""

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
    times = trainer.profile(data, executions=2).pipeline
    for each in times.devices.values():
        assert each[WORK] <= times.step


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
