"""`trainer.replay`: a past step again, with any tap, and whether it is the step that happened."""

from __future__ import annotations

import os

from tailrace.taps.tap import Observe
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.comparison import Comparison, replay_of
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.recorded import Recorded, known_of
from tailrace.trainer.lookback.start import Start, nearest


def replay(
    engine: Engine,
    step: int,
    dataset: object,
    observe: Observe,
    checkpoint: Checkpoint | str | os.PathLike[str],
    recorded: Recorded,
    fits: int | None = None,
) -> Replay:
    """Run a past step again; see `tr.Trainer.replay`."""
    start = nearest(checkpoint, step, fits)
    recorded = known_of(start, step, recorded, engine)
    seen, comparison = _run(start, engine, step, dataset, observe, recorded)
    if comparison.in_doubt and not comparison.differences:
        # Once more without taps, to say whether it was they.
        _, comparison = _run(start, engine, step, dataset, (), recorded)
    return replay_of(seen, comparison, start.note)


def _run(
    start: Start, engine: Engine, step: int, dataset: object, observe: Observe, recorded: Recorded
) -> tuple[Results, Comparison]:
    """Run steps again, up to this one and the end of its execution; its results."""
    rerun = start.rerun(engine, observe, dataset, recorded.has_fingerprints)
    # Before the first dispatch: a step beyond the end would be missed only there.
    rerun.check(step)
    first, form = rerun.step, rerun.spec.text
    around = recorded.around(step)
    comparison = Comparison(recorded)
    with rerun.closing():
        # Stop where executions ended: fingerprints were taken there, so they can be compared only
        # there.
        for end in recorded.ends(rerun.step, step):
            comparison.take_all(rerun.advance(end))
        comparison.take_all(rerun.advance(step))
        seen = rerun.look()
        comparison.take(seen, rerun.tapped)
        # On to the end of the execution that the step was in: its fingerprint is the only proof of
        # the state after the step. Without fingerprints, the next loss depends on that state.
        if around is not None:
            comparison.take_all(rerun.advance(sum(around)))
        elif start.continues(step + 1):
            comparison.take_all(rerun.advance(step + 2))
    comparison.take_form(first, start.note["fit"].get("element"), form)
    return seen, comparison
