"""`trainer.rewind`: the state before a past step, exactly, as the state of the trainer."""

from __future__ import annotations

import os

import jax
import numpy as np

from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.recorded import Recorded
from tailrace.trainer.lookback.replay import Comparison, nearest, recorded_in
from tailrace.trainer.lookback.rerun import Rerun


def rewind(
    engine: Engine,
    step: int,
    dataset: object,
    checkpoint: Checkpoint | str | os.PathLike[str],
    recorded: Recorded,
    fits: int | None,
) -> bool | None:
    """Give an engine the state before a past step; returns whether that is proved."""
    start = nearest(checkpoint, step, fits, before=True)
    directory = start.directory
    if step - 1 not in recorded.losses:
        recorded = recorded_in(directory, step, recorded, engine)
    rerun = Rerun(engine, (), dataset, *start.fit(), directory.directory)
    comparison = Comparison(recorded)
    with rerun.closing():
        for end in (*recorded.ends(rerun.step, step), step):
            comparison.take_all(rerun.advance(end))
        # To the host first: the engine's own state stays as it was if anything fails up to here.
        leaves = jax.tree.leaves(jax.tree.map(np.asarray, rerun.engine.state))
    engine.replace(dict(enumerate(leaves)))
    engine.step, engine.seed = step, rerun.engine.seed
    return not comparison.differences if comparison.compared else None
