"""Findings about spikes of the loss: every spike, and nothing in an ordinary curve."""

import inspect

import numpy as np
import pytest
from made_runs import MadeRun

import tailrace as tr
from tailrace.cli.command_line import main
from tailrace.page.findings.findings import findings
from tailrace.page.findings.spikes import SpikeSearch
from tailrace.page.followed import FollowedRun
from tailrace.records.scores import SPIKE_LEAST, SPIKE_SCORE, SPIKE_WINDOW
from tailrace.trainer.callbacks.callback import Execution

STEPS = 1000
T = np.arange(STEPS)
NO_STARTS = np.zeros(0, np.int64)

CURVES = {
    "falling": 2 * np.exp(-T / 200) + 0.3,
    "slowly falling": 3 / np.sqrt(1 + T),
    "constant": np.ones(STEPS),
    "in stairs": 2.0 ** -(T // 400),
    "steeply falling": 100 * np.exp(-T / 20) + 0.01,
    "rising at the end": 1 + np.exp((T - STEPS) / 60),
}
NOISES = {
    "none": lambda rng: np.ones(STEPS),
    "tiny": lambda rng: 1 + 1e-5 * rng.normal(size=STEPS),
    "normal": lambda rng: 1 + 0.2 * rng.normal(size=STEPS),
    "uniform": lambda rng: rng.uniform(0.2, 1.8, STEPS),
    "lognormal": lambda rng: np.exp(rng.normal(size=STEPS)),
    "exponential": lambda rng: rng.exponential(size=STEPS),
    "squares": lambda rng: rng.normal(size=STEPS) ** 2,
    "mostly zero": lambda rng: rng.exponential(size=STEPS) * (rng.random(STEPS) < 0.4),
    "rarely not zero": lambda rng: rng.exponential(size=STEPS) * (rng.random(STEPS) < 0.03),
}
SPIKES = [230, 231, 400, 401, 402, 777, 999]
FIRST = [230, 400, 777, 999]


def rows_of(loss, starts=NO_STARTS, pieces=1):
    search, loss = SpikeSearch(), loss.astype(np.float32).astype(np.float64)
    for piece in range(1, pieces + 1):
        search.look(loss[: len(loss) * piece // pieces], starts)
    return search.rows


@pytest.mark.parametrize("noise", NOISES)
def test_nothing_is_found_in_ordinary_curves(noise):
    for seed in range(3):
        for name, curve in CURVES.items():
            values = curve * NOISES[noise](np.random.default_rng(seed))
            assert rows_of(values) == [], (name, seed)


@pytest.mark.parametrize("noise", ["none", "tiny", "normal"])
def test_every_spike_is_found(noise):
    for seed, (name, curve) in enumerate(CURVES.items()):
        values = curve * NOISES[noise](np.random.default_rng(seed))
        values[SPIKES] = 40 * (values[SPIKES] + curve[0])
        assert rows_of(values) == FIRST, name
        assert rows_of(values, pieces=13) == FIRST, name


def test_they_are_those_of_on_spike():
    for name, value in (("score", SPIKE_SCORE), ("window", SPIKE_WINDOW), ("least", SPIKE_LEAST)):
        assert inspect.signature(tr.on_spike).parameters[name].default == value
    loss = CURVES["falling"] * NOISES["normal"](np.random.default_rng(1))
    loss[FIRST] = 60.0
    watch = tr.on_spike()
    watch.on_execution_end(None, Execution(0, STEPS, {"loss": loss}))
    assert [spike.step for spike in watch.spikes] == rows_of(loss) == FIRST


def test_a_fit_is_compared_with_itself():
    loss = np.concatenate([np.full(200, 0.1), np.full(200, 5.0)])
    assert rows_of(loss, np.array([0, 200])) == []
    assert rows_of(loss, np.array([0])) == [200]
    for pieces in (2, 3, 8):
        assert rows_of(loss, np.array([0, 200]), pieces) == []


def grown(tmp_path, loss, pieces=4):
    run = MadeRun(tmp_path / "run")
    for part in np.array_split(loss, pieces):
        run.grow({"loss": part})
    return run


def test_the_finding_names_the_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    loss = 3 * CURVES["falling"] * NOISES["normal"](np.random.default_rng(0))
    loss[[100, 200, 300, 400, 500, 600]] = 98.0
    run = grown(tmp_path, loss)
    followed = FollowedRun(run.directory)
    (one,) = findings(followed)
    assert (one.severity, one.topic, one.step) == ("warning", "loss spikes", 100)
    assert one.text.startswith(
        "The loss spikes 6 times, in steps 100, 200, 300, 400, 500 and 1 more: 98 in step 100, "
    )
    assert "trainer.explain_step(100, dataset, checkpoint=...)" in one.text
    run.grow({"loss": np.append(np.full(30, 0.9), 98.0)})
    followed.look()
    assert "7 times" in {one.topic: one.text for one in findings(followed)}["loss spikes"]
    assert main(["show", str(run.directory)]) == 0
    assert "The loss spikes 7 times" in capsys.readouterr().out


def test_one_spike_and_values_that_are_not_finite(tmp_path):
    loss = np.array(CURVES["falling"])
    loss[[50, 60]] = np.nan, np.inf
    loss[70] = 98.0
    found = {one.topic: one for one in findings(FollowedRun(grown(tmp_path, loss).directory))}
    assert set(found) == {"not finite", "loss spikes"}
    assert found["loss spikes"].step == 70
    assert found["loss spikes"].text.startswith("The loss spikes once, in step 70: 98 in step 70")
