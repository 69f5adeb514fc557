"""Examples run: each as the script it is, in a process of its own, at a small size."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import tailrace as tr

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

CASES = {
    "mnist_demo.py": (
        ["--steps", "100"],
        r"with feeds +\S+ s +1 executions.*losses equal to the last bit: True",
    ),
    "mnist_with_feeds.py": (
        ["--steps", "60", "--steps-per-execution", "20"],
        r"3 executions, 60 losses",
    ),
    "mnist_without_feeds.py": (["--steps", "60"], r"60 executions, 60 losses"),
    "trivial_loop.py": ([], r"d1: shape \(10, 2, 2\), first entries \[2.0, 3.0, 4.0"),
    "results_during_execution.py": (["--steps", "200"], r"200 losses, .*4,096 predictions"),
    "dataset_benchmark.py": (
        ["--epochs", "2", "--elements", "20"],
        r"elements_per_second.*bottleneck",
    ),
    "gpt.py": (["--steps", "20"], r"last fit: 20 steps.*test loss \d\.\d+ after 20 steps"),
    "gan.py": (
        ["--steps", "20"],
        r"generator \d\.\d+, discriminator \d\.\d+.*pass for real: [01]\.\d+.*grad/d/dense0/b",
    ),
    "ppo.py": (["--steps", "10"], r"reward -\d\.\d+ at first.*greedy -\d.*grad/body, grad/heads"),
    "dp_sgd.py": (
        ["--steps", "20"],
        r"loss 2\.\d+ at first, [01]\.\d+ at last.*clipped [01]\.\d+.*test accuracy 0\.[4-9]",
    ),
    "convnet.py": (["--epochs", "1"], r"last fit: 80 steps.*test accuracy 0\.[4-9]"),
    "execution_traces.py": (
        ["--steps", "40", "--steps-per-execution", "20"],
        r"with feeds +: +2 runs of 20 steps.*without feeds: +40 runs of 1 steps",
    ),
    "accumulation_and_replicas.py": (
        ["--steps", "20", "--devices", "2"],
        r"by hand, 2 replicas: losses of shape \(20, 2\)",
    ),
}


def run(name: str, *arguments: str) -> str:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TAILRACE_DEVICES", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_by_a_test():
    tests = "".join(path.read_text() for path in pathlib.Path(__file__).parent.rglob("test_*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []


@pytest.mark.parametrize("name", CASES)
def test_example_runs(name, tmp_path):
    arguments, expected = CASES[name]
    if "--folder" not in (EXAMPLES / name).read_text():
        assert re.search(expected, run(name, *arguments), re.DOTALL)
        return
    printed = run(name, *arguments, "--folder", str(tmp_path))
    assert re.search(expected, printed, re.DOTALL), printed
    assert f"see {tmp_path}" in printed
    assert_kept(tmp_path)


def assert_kept(folder):
    """Validation, checkpoints and a picture: what the comparison says of examples."""
    assert len(tr.open_run(folder / "run").history.validated)
    assert list((folder / "checkpoints").iterdir())
    (picture,) = folder.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_says_how_to_look_at_what_it_made(tmp_path):
    printed = run("mnist_demo.py", "--steps", "20", "--run-dir", str(tmp_path / "run"))
    assert printed.splitlines()[-1] == f"Look at the run: tailrace view {tmp_path / 'run'}"
    assert (tmp_path / "run" / "run.json").exists()


def test_the_pair_computes_the_same(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import mnist_with_feeds
    import mnist_without_feeds

    fed = mnist_with_feeds.main(steps=40, steps_per_execution=20)
    np.testing.assert_array_equal(fed, mnist_without_feeds.main(steps=40))


@pytest.mark.parametrize("name", CASES)
def test_examples_stay_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    ("name", "arguments", "picture"),
    [("convnet.py", ["--epochs", "1"], "layers.png")],
)
def test_examples_keep_what_they_trained(name, arguments, picture, tmp_path):
    first = run(name, *arguments, "--folder", str(tmp_path))
    assert (tmp_path / picture).exists()
    assert_kept(tmp_path)
    again = run(name, *arguments, "--folder", str(tmp_path))  # finished: nothing is trained
    assert first.splitlines()[1:] == again.splitlines()[1:]
