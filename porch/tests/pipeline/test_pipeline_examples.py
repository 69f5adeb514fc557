"""The pipelined programs run: each as the script it is, in a process of its own, at a small size."""

import re

import pytest

from test_examples import EXAMPLES, run

CASES = {
    "mnist_pipeline.py": (
        ["--steps", "20"],
        r"one device .*two stages, grouped .*two stages, interleaved .*two stages, sequential .*"
        r"one function, grouped .*largest difference between the losses: (\d\.\de-0[6-9]|0\.0e\+00).*"
        r"dev1  \.     F0    B0\+F1 B1\+F2",
    ),
    "concurrent_stages.py": (
        ["--steps", "5"],
        r"smoothing 0\.2.*smoothing 0\.0.*equal to the plain step: True.*"
        r"side by side: stash of \d+.*in a row: +stash of \d+",
    ),
}


def test_every_pipeline_example_is_run():
    assert sorted(CASES) == sorted(path.name for path in (EXAMPLES / "pipelines").glob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_pipeline_example_runs(name):
    arguments, expected = CASES[name]
    printed = run(f"pipelines/{name}", *arguments)
    assert re.search(expected, printed, re.DOTALL), printed


@pytest.mark.parametrize("name", CASES)
def test_pipeline_examples_stay_short(name):
    assert len((EXAMPLES / "pipelines" / name).read_text().splitlines()) <= 110
