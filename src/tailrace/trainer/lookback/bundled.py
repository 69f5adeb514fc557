"""`trainer.replay_bundle`: a bad step of another machine, run here."""

from __future__ import annotations

import os

import jax

from tailrace.base.trees import Tree
from tailrace.errors import CheckpointError
from tailrace.taps.tap import Observe, parse_taps
from tailrace.trainer.checkpoints.snapshot import BUILD, put_state
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.outcome import Replay
from tailrace.trainer.lookback.rerun import twin_of
from tailrace.trainer.observation.bundles import elements_in, read_bundle


def replay_bundle(
    engine: Engine, bundle: str | os.PathLike[str], example: Tree, observe: Observe
) -> Replay:
    """Run the step of a bundle; see `tr.Trainer.replay_bundle`."""
    arrays, note = read_bundle(bundle)
    here = engine.accumulation.microbatches * engine.placement.replicas
    if note["elements_per_step"] != here:
        raise CheckpointError(
            f"The step in {str(bundle)!r} has {note['elements_per_step']} elements, and this trainer "
            f"takes {here} (accumulation x replicas). Make the trainer with the same."
        )
    twin = twin_of(engine, parse_taps(observe))
    structure, elements = jax.tree.structure(example), elements_in(arrays)
    if structure.num_leaves != len(elements):
        raise CheckpointError(
            f"example has the structure of an element, and an element in {str(bundle)!r} has "
            f"{len(elements)} arrays. Received: an example with {structure.num_leaves}. Give an "
            f"element of the dataset that was trained on."
        )
    # Before it is traced: a state of another model is refused by name.
    put_state(twin, arrays, note)
    twin.build_as_recorded(note.get(BUILD))
    feed = twin.use([jax.tree.unflatten(structure, row) for row in zip(*elements, strict=True)])
    try:
        twin.step = int(note["step"])
        results = twin.collect(twin.dispatch(1, following=0))
    finally:
        feed.rest()
    if results.failure is not None:
        raise results.failure
    loss, step = float(results.losses[0]), int(note["step"])
    return Replay(step, loss, results.records, [], [], step, source="bundle")
