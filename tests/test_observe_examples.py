"""The two programs about looking inside: they run, and show what the originals showed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name, *arguments, cwd):
    """What an example prints, run as the script it is."""
    pytest.importorskip("mlxtend")
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TAILRACE_DEVICES", "XLA_FLAGS")
    }
    environment["MPLCONFIGDIR"] = str(cwd)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gradient_histogram(tmp_path):
    out = run("observe_gradients.py", "--batch-size", "1000", cwd=tmp_path)
    names = "grad/fc1/bias, grad/fc1/weight, grad/fc2/bias, grad/fc2/weight, grad/fc3/bias"
    assert f"tensor names: {names}" in out
    assert re.search(r"Loss: \d\.\d{4}", out)
    assert "284,310 gradients of 6 tensors" in out
    assert out.count("float8_e4m3fn") == 2
    assert "Saved histogram to GradientHistogram.png" in out
    assert (tmp_path / "GradientHistogram.png").read_bytes()[:4] == b"\x89PNG"


def test_inspecting_tensors_with_the_filters_of_the_original(tmp_path):
    out = run("inspect_tensors.py", "--steps-per-epoch", "40", "--epochs", "2", cwd=tmp_path)
    lines = out.splitlines()
    start = lines.index("Gradients callback")
    assert lines[start - 1] == ""
    assert lines[start + 1 : start + 5] == [
        "key: Dense_128/bias:0_grad shape: (10, 128)",
        "key: Dense_128/kernel:0_grad shape: (10, 256, 128)",
        "Epoch 1 - Summary Stats",
        f"{'Index':<5} {'Name':<28} {'Mean':<12} {'Std':<12} {'Minimum':<12} {'Maximum':<12} "
        f"{'NaNs':<7} {'infs':<7}",
    ]
    row = r"0     Dense_128/bias:0_grad {8}(-?\d\.\d{6} +){4}False   False  "
    assert re.fullmatch(row, lines[start + 5])
    assert lines[start + 8] == "Multi-layer activations callback"
    assert lines[start + 9 : start + 11] == [
        "key: Dense_128_acts shape: (40, 32, 128)",
        "key: Dense_10_acts shape: (40, 32, 10)",
    ]
    assert out.count("Epoch 2 - Summary Stats") == 2


def test_inspecting_tensors_before_accumulation_and_without_activations(tmp_path):
    flags = ["--steps-per-epoch", "8", "--epochs", "1", "--outfeed-pre-accumulated-gradients"]
    flags += ["--gradients-filters", "none", "--activations-filters"]
    out = run("inspect_tensors.py", *flags, cwd=tmp_path)
    keys = re.findall(r"key: (\S+) shape: (.*)", out)
    assert keys[0] == ("Dense_10/bias:0_grad", "(8, 10)")
    assert [key for key, _ in keys] == [
        f"{layer}/{kind}:0_grad"
        for layer in ("Dense_10", "Dense_128", "Dense_256")
        for kind in ("bias", "kernel")
    ]
    assert out.endswith("Multi-layer activations callback\nNo data enqueued\n")
