"""What earlier code wrote is read by this one: checkpoints are resumed, runs opened, steps replayed.

Each archive of `first/` is what a killed training of that code left, and the end of the same training
that was not killed (`write_frozen.py`). Here the same script goes on.
"""

import json
import tarfile
from importlib.util import find_spec

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

import frozen_cases
from frozen_cases import CASES
from write_frozen import HERE, facts

import tailrace as tr
from oracles import assert_bits_equal, assert_close

FIRST = HERE / "first"
pytestmark = pytest.mark.usefixtures("same_devices")  # IPU programs choose theirs
LIBRARIES = {"keras": "keras", "ipu": "keras", "torch": "torch", "nnx": "flax"}


@pytest.fixture(autouse=True)
def _as_written():
    """With JAX's rules for mixed dtypes, as users have them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def unpacked(case, folder):
    """The directories that were left, and the end of the training that was not killed."""
    if (library := LIBRARIES.get(case.partition("_")[0])) and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")
    with tarfile.open(FIRST / f"{case}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    with np.load(folder / "end.npz") as end:
        return folder / "left", dict(end)


# A bias in front of a BatchNorm has no gradient but what rounding leaves of one, which Adam makes as
# large as any other; the mean that the norm keeps contains that bias.
OF_ROUNDING = {
    "nnx_module": {"state0", "state7", "state13", "state19"},
    "torch_saved": {"body.0.bias", "body.1.running_mean"},
}


def _comparable(case, tree):
    """What two machines agree on: Keras' logs are Python's floats, of values computed in 32 bits."""
    return {
        name: np.float32(leaf) if np.asarray(leaf).dtype == np.float64 else leaf
        for name, leaf in tree.items()
        if name not in OF_ROUNDING.get(case, ())
    }


def same_machine(folder):
    """Whether equal bits can be asked for."""
    return json.loads((folder / "facts.json").read_text()) == facts()


@pytest.mark.parametrize("case", CASES)
def test_a_killed_training_goes_on(case, tmp_path):
    left, expected = unpacked(case, tmp_path)
    kept = {path.name for path in left.rglob("step-*")}
    end = CASES[case][0](left, None)
    if same_machine(tmp_path):
        assert_bits_equal(end, expected)
    else:
        assert_close(*(_comparable(case, tree) for tree in (end, expected)))
    damaged = {path.name for path in left.rglob("*.damaged*")}
    assert not damaged, f"of {kept}"


def test_a_run_is_opened(tmp_path):
    left, expected = unpacked("steps", tmp_path)
    run = tr.open_run(left / "run")
    assert run.state in ("interrupted", "running")
    frozen_cases.steps(left, None)
    run = tr.open_run(left / "run")
    assert run.state == "ended"
    assert_close(np.asarray(run.history.loss), expected["loss"])
    steps = run.records["grad/out"].steps
    np.testing.assert_array_equal(steps, np.arange(12))
    assert len(run.history.fingerprints)


def test_a_step_is_replayed(tmp_path):
    left, _ = unpacked("steps", tmp_path)
    replay = frozen_cases.steps_trainer(None).replay(
        3, frozen_cases.data(), observe=["activation/*"], checkpoint=left / "kept"
    )
    assert replay["activation/hidden"].values.shape[0] == 1
    if same_machine(tmp_path):
        assert replay.proved is True, replay.differences


def test_a_step_of_a_keras_fit_is_replayed(tmp_path):
    left, _ = unpacked("keras_epochs", tmp_path)
    model = frozen_cases.keras_model(fingerprint=True)
    x, y = frozen_cases.X, frozen_cases.Y
    replay = model.replay(
        3, x, y, batch_size=4, epochs=2, observe=["grad/*"], checkpoint=left / "kept"
    )
    if same_machine(tmp_path):
        assert replay.proved is True, replay.differences


def test_a_training_that_says_nothing_of_its_build_keeps_its_program(tmp_path):
    left, _ = unpacked("steps", tmp_path)
    trainer = frozen_cases.steps_trainer(None)
    trainer.fit(frozen_cases.data(), steps=12, checkpoint=tr.Checkpoint(left / "kept", every=2))
    explanation = trainer.explain((frozen_cases.X[:4], frozen_cases.Y[:4]))
    assert "boundaries" not in explanation.rewrites
    assert explanation.compiler_options == {}


def test_every_case_has_an_archive():
    assert {path.name.removesuffix(".tar.xz") for path in FIRST.iterdir()} == set(CASES)
    assert sum(path.stat().st_size for path in FIRST.iterdir()) < 2 << 20
