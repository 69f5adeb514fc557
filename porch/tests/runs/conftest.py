"""Run directories that several tests read."""

import shutil

import pytest

import tailrace as tr


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory):
    """Made once; tests get copies."""
    from small_runs import make_trainer, train

    directory = tmp_path_factory.mktemp("finished") / "run"
    taps = [tr.Tap("grad/*"), tr.Tap("grad/*", reduce="histogram", mode=tr.every(5))]
    train(make_trainer(directory, taps))
    return directory


@pytest.fixture
def finished(finished_once, tmp_path):
    """A run directory with 20 steps, statistics and histograms."""
    return shutil.copytree(finished_once, tmp_path / "run")
