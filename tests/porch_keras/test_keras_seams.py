"""What is relied on of Keras beyond its public interface: as known, or refused in one sentence."""

import keras
import pytest

from tailrace.base.seams import Package
from tailrace.errors import VersionError
from tailrace.keras import keras_seams


@pytest.fixture
def newer(monkeypatch):
    package = Package("Keras", "keras", "3.99.0", newest="3.15.1")
    monkeypatch.setattr(keras_seams, "PACKAGE", package)


@pytest.mark.parametrize("seam", keras_seams.SEAMS, ids=lambda seam: seam.name)
def test_every_seam_is_as_known(seam):
    assert seam.probe()


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (keras.Model, "jax_state_sync", "the functions of a trainer have changed"),
        (keras.Model, "compute_loss_and_updates", "compute_loss_and_updates' parameters have"),
        (
            keras.optimizers.LossScaleOptimizer,
            "build",
            "LossScaleOptimizer's variables have changed",
        ),
        (keras.StatelessScope, "get_current_value", "StatelessScope's interface has changed"),
    ],
)
def test_a_change_of_keras_is_one_sentence(newer, monkeypatch, owner, name, text):
    while name not in vars(owner):  # where it is defined
        owner = next(base for base in owner.__mro__ if name in vars(base))
    monkeypatch.delattr(owner, name)
    with pytest.raises(VersionError, match=f"does not know Keras 3.99.0: {text}.* use keras<3.99"):
        keras_seams.check()


def test_the_next_major_version_is_refused(monkeypatch):
    package = Package("Keras", "keras", "4.0.1", newest="3.15.1")
    monkeypatch.setattr(keras_seams, "PACKAGE", package)
    with pytest.raises(VersionError, match="its major version has changed; use keras<4.0 or"):
        keras_seams.check()


def test_graphs_are_probed_before_one_is_read(newer, monkeypatch):
    keras_seams.check_graphs.cache_clear()
    monkeypatch.setattr(keras.Model, "get_config", lambda self: {}, raising=False)
    monkeypatch.setattr(type(keras.Model(i := keras.Input((2,)), i)), "get_config", lambda _: {})
    with pytest.raises(VersionError, match="the description of functional models has changed"):
        keras_seams.check_graphs()
