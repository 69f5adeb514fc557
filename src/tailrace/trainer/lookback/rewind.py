"""`trainer.rewind`: the state before a past step, exactly, as the state of the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import logger
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.saving import run_end_of
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.comparison import Comparison
from tailrace.trainer.lookback.recorded import Recorded, known_of
from tailrace.trainer.lookback.start import nearest


def rewind(
    engine: Engine,
    step: int,
    dataset: object,
    checkpoint: Checkpoint | str | os.PathLike[str],
    recorded: Recorded,
    fits: int | None,
    check: Callable[[Mapping[str, Any] | None], None],
) -> bool | None:
    """Give an engine the state before a past step; returns whether that is proved.

    `check` refuses checkpoints whose run is not that of the run directory, where rows would be cut off.
    """
    start = nearest(checkpoint, step, fits, before=True)
    check(run_end_of(start.note, start.directory.directory))
    recorded = known_of(start, max(0, step - 1), recorded, engine)
    rerun = start.rerun(engine, (), dataset, recorded.has_fingerprints)
    comparison, first = Comparison(recorded), rerun.step
    if first < step:
        rerun.check(step - 1)
    with rerun.closing():
        for end in (*recorded.ends(rerun.step, step), step):
            comparison.take_all(rerun.advance(end))
        # To the host first: the engine's own state stays as it was if anything fails up to here.
        leaves = jax.tree.leaves(jax.tree.map(np.asarray, rerun.engine.state))
    engine.replace(dict(enumerate(leaves)))
    engine.step, engine.seed = step, rerun.engine.seed
    if comparison.differences:
        logger.warning(
            "The state before step %s is not that of the training: %s. Rewind again with the same "
            "dataset, model and options.",
            step,
            comparison.differences[0],
        )
    # Every step on the way counts: the state is the result of all of them. At a checkpoint nothing
    # was computed again: it is the state that was saved.
    return True if first == step else comparison.proved(first, step)
