"""Run directories that several tests read."""

import pytest

import tailrace as tr

pytest.importorskip("zarr")


@pytest.fixture
def finished(tmp_path):
    """A run directory with 20 steps, statistics and histograms."""
    from small_runs import make_trainer, train

    taps = [tr.Tap("grad/*"), tr.Tap("grad/*", reduce="histogram", mode=tr.every(5))]
    train(make_trainer(tmp_path / "run", taps))
    return tmp_path / "run"
