"""The examples run, each as the script it is."""

import pathlib
import re
import runpy
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "torch"

CASES = {
    "print_tensor.py": ([], r"linear: \(.*linear_gradient: \(.*returned: \(2, 2\)"),
    "anchor_tensors.py": (
        [],
        r"Gradient___fc2\.bias.*gradient of the bias: \(100,\).*the module's: True",
    ),
    "anchor_modes.py": (
        [],
        r"outputs \(400, 10\), losses \(20,\).*update_weight: \(200, 320\).*that of all: True"
        r".*final one: True",
    ),
    "gradient_histogram.py": (
        ["--batch-size", "500", "--picture", "picture.png"],
        r"Loss: 4\d\.\d.*Saved histogram of 284310 gradients to picture.png",
    ),
    "train_digits.py": (
        ["--epochs", "3"],
        r"epoch 0: val_loss .*epoch 2: val_loss 0\.\d+, accuracy (8|9)\d\.\d%.*after 300 steps",
    ),
    "pipeline_blocks.py": (["--epochs", "2"], r"steps 35-39: loss 0\.\d+, right [789]\d"),
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, "digits_model.py"}


@pytest.mark.parametrize("name", CASES)
def test_example_runs(name, tmp_path, monkeypatch, capfd, same_devices):
    arguments, expected = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with jax.numpy_dtype_promotion("standard"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    captured = capfd.readouterr()
    printed = captured.err + captured.out
    assert re.search(expected, printed, re.DOTALL), printed
    if name == "gradient_histogram.py":
        assert (tmp_path / "picture.png").stat().st_size > 5000
    if name == "train_digits.py":
        (folder,) = map(pathlib.Path, re.findall(r"^see (.+)$", printed, re.MULTILINE))
        assert (folder / "gradients.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "epoch2.npz").exists()


@pytest.mark.parametrize("name", CASES)
def test_examples_stay_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 100
