"""The programs that the seeds include, rewritten from their prose, run."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "compat"


def main(name, **arguments):
    """Run an example in this process, at a small size."""
    spec = importlib.util.spec_from_file_location(f"compat_{name[:-3]}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(**arguments)


def test_every_example_is_run():
    text = pathlib.Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []


def test_the_training_loop():
    result = main("training_loop.py")
    np.testing.assert_array_equal(result["d1"], np.full((10, 4, 4), 3, np.float32))
    np.testing.assert_array_equal(result["d2"], np.full((10, 4, 4), 1, np.float32))


def test_results_during_execution():
    counters = main("results_during_execution.py", iterations=300)
    np.testing.assert_array_equal(counters, np.arange(300))


def test_replicated_training():
    losses = main("replicated_training.py", iterations=80)
    assert losses.shape == (80, 2)
    assert losses[-1].mean() < losses[0].mean() / 100


def test_pipelined_training():
    means = main("pipelined_training.py", calls=3, repeat_count=10)
    assert means[-1] < means[0]


def test_gradient_accumulation():
    pytest.importorskip("keras")
    assert main("gradient_accumulation.py") == {None: 0.5, np.float32: 0.0}


def test_the_dataset_benchmark():
    found = main("dataset_benchmark.py", epochs=2, elements=20)
    assert [sorted(epoch) for epoch in found["epochs"]] == 2 * [
        [
            "bandwidth",
            "elements_per_second",
            "elements_processed",
            "time_elapsed",
            "total_bytes_processed",
        ]
    ]
    assert all(value > 0 for epoch in found["epochs"] for value in epoch.values())


def test_devices_are_there_to_choose_from():
    """In a process of its own: importing the package is enough for two replicas."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TAILRACE_DEVICES", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "replicated_training.py"), "--iterations", "8"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "losses of shape (8, 2)" in done.stdout


def test_importing_loads_no_framework():
    code = (
        "import sys; from tailrace.compat import ipu; ipu.pipelining_ops.pipeline; "
        "print([m for m in ('keras', 'tensorflow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"
