"""The Keras examples run, at a small size, and print what they promise."""

import pathlib
import re

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "keras"


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    pytest.importorskip("tensorflow")
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"Dense_128/kernel:0_grad": (2, 256, 128), "Dense_10_acts": (8, 32, 10)}),
        (
            {"model_type": "Model", "no_pipelining": True, "use_gradient_accumulation": True},
            {"Dense_128/bias:0_grad": (2, 128), "Dense_128_acts": (8, 32, 128)},
        ),
        (
            {
                "model_type": "Model",
                "outfeed_pre_accumulated_gradients": True,
                "activations_filters": ["Dense_10"],
            },
            {"Dense_128/bias:0_grad": (8, 128), "Dense_10_acts": (8, 32, 10)},
        ),
        pytest.param(
            {"no_pipelining": True, "gradients_filters": ["none"]},
            {"Dense_10/bias:0_grad": (8, 10), "Dense_256/kernel:0_grad": (8, 784, 256)},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["pipelined", "model-accumulated", "pre-accumulated", "all-gradients"],
)
def test_inspecting_tensors(flags, expected, capsys):
    import inspecting_tensors

    inspecting_tensors.main(steps_per_epoch=8, epochs=1, verbose=0, **flags)
    printed = capsys.readouterr().out
    shapes = dict(re.findall(r"key: (\S+) shape: (\(.*\))", printed))
    for key, shape in expected.items():
        assert shapes[key] == str(shape)
    assert "Epoch 1 - Summary Stats" in printed
    assert ("Dense_128_acts" in shapes) == ("activations_filters" not in flags)


def test_infeed_outfeed(capsys):
    import infeed_outfeed

    losses = infeed_outfeed.main(step_count=60, steps_per_execution=10)
    assert losses.shape == (60,)
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert "Time taken using infeed/outfeed queues:" in capsys.readouterr().out


def test_pipelining():
    import pipelining

    data = pipelining.create_dataset()
    plain, staged = (
        pipelining.train(pipelining.create_functional_model, data, 12, 2, stages=stages)
        for stages in (False, True)
    )
    assert plain.history["loss"][-1] < plain.history["loss"][0]
    assert staged.history["loss"][-1] < staged.history["loss"][0]


@pytest.mark.exhaustive
def test_all_of_pipelining():
    import pipelining

    *_, interleaved = pipelining.main(steps_per_execution=12, epochs=2)
    assert len(interleaved.history["loss"]) == 2


def test_every_keras_example_is_run_by_a_test():
    here = pathlib.Path(__file__).read_text()
    assert all(f"import {path.stem}" in here for path in EXAMPLES.glob("*.py"))


def test_fit_digits(tmp_path, capsys):
    import fit_digits

    fit_digits.main(epochs=1, folder=tmp_path)
    first = capsys.readouterr().out
    assert re.search(r"test accuracy 0\.[4-9]", first)
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "checkpoints").iterdir())
    assert len((EXAMPLES / "fit_digits.py").read_text().splitlines()) <= 100
