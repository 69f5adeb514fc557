"""The content of a checkpoint: the state leaf by leaf, and a note with everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import listed
from tailrace.base.trees import Tree
from tailrace.devices.shardings import without_mesh
from tailrace.devices.surroundings import SURROUNDINGS, surroundings
from tailrace.errors import CheckpointError
from tailrace.jaxprs.marks import path_name
from tailrace.records.history import History
from tailrace.trainer.checkpoints.device_copies import DeviceCopy, copied
from tailrace.trainer.checkpoints.long_arrays import HISTORY
from tailrace.trainer.engine import Engine
from tailrace.trainer.random_keys import as_keys, as_numbers, generator_of, is_key

BUILD = "build"
"""The entry of a checkpoint's note that says how programs were built; earlier versions had none."""

STATE, CALLBACK = "state/", "callback/"
"""The prefixes of the names of arrays, beside that of a history."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint at one moment.

    Attributes:
        arrays: arrays by name, on the device or the host.
        note: everything else, ready for JSON.
        run_end: waits until the run directory has everything up to here; returns its end.
    """

    arrays: Mapping[str, Any]
    note: Mapping[str, Any]
    run_end: Callable[[], Any] = lambda: None

    def whole_note(self) -> dict[str, Any]:
        """The note, with the end of the run, and what the bits of the state depend on."""
        # `run_end` waits for the run directory before the checkpoint is written: a checkpoint ahead
        # of its run could not be resumed.
        return {**self.note, "run": self.run_end(), SURROUNDINGS: surroundings()}

    def on_host(self) -> dict[str, np.ndarray]:
        """The arrays on the host; waits for their copies."""
        return {
            name: array.on_host() if isinstance(array, DeviceCopy) else np.asarray(array)
            for name, array in self.arrays.items()
        }


def state_arrays(engine: Engine) -> tuple[dict[str, Any], dict[str, str]]:
    """Copies of all leaves of the state by name, on the device; and the kinds of random keys.

    The next execution may overwrite the originals. The writer thread transfers the copies to the host,
    which takes 0.7 s for 1.5 GB.
    """
    arrays: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name, leaf in named_leaves(engine.state).items():
        value = engine.placement.readable(leaf)
        # The generator is not in the numbers: it goes into the note.
        if is_key(value):
            keys[name] = generator_of(value)
        arrays[STATE + name] = as_numbers(value)
    with without_mesh():
        return dict(copied(arrays)), keys


def put_state(engine: Engine, arrays: Mapping[str, np.ndarray], note: Mapping[str, Any]) -> None:
    """Restore an engine's state, step and seed from a checkpoint; refuses other shapes."""
    if "keys" not in note:
        raise CheckpointError(
            f"The checkpoint was saved by {saved_by(note)}: only that model can resume from it."
        )
    now = named_leaves(engine.state)
    keys: Mapping[str, str] = note["keys"]
    found = {name.removeprefix(STATE): a for name, a in arrays.items() if name.startswith(STATE)}
    check_forms(now, found, keys, engine.own_of_replicas())
    # Of a sharded model each device gets its part, and none a whole leaf.
    put = jnp.asarray if engine.placement.sharding is None else np.asarray
    leaves = [
        as_keys(found[name], keys[name]) if name in keys else put(found[name]) for name in now
    ]
    _set_fixed_scale(engine, now, leaves)
    # All leaves at once, after all were checked: a refused checkpoint changes nothing.
    engine.replace(dict(enumerate(leaves)))
    engine.step, engine.seed = int(note["step"]), int(note["seed"])


def saved_by(note: Mapping[str, Any]) -> str:
    """Whose checkpoint it is, if it is not a trainer's."""
    return "a PyTorch model" if "torch" in note else "fit of a Keras model"


def _set_fixed_scale(engine: Engine, now: Mapping[str, Any], leaves: list[Any]) -> None:
    """A fixed scale is an option, not something that training has found: that of the trainer counts."""
    rule, name = engine.step_function.loss_scale, "loss_scale/scale"
    if rule is not None and rule.is_fixed and name in now:
        leaves[list(now).index(name)] = rule.init().scale


def trainer_note(engine: Engine, keys: Mapping[str, str], epochs: int) -> dict[str, Any]:
    """The note of every checkpoint, with or without a fit."""
    said = {"step": engine.step, "seed": engine.seed, "epochs": epochs, "keys": dict(keys)}
    return {**said, BUILD: engine.built}


def check_forms(
    now: Mapping[str, Any],
    found: Mapping[str, np.ndarray],
    keys: Mapping[str, str],
    own: Mapping[str, Sequence[tuple[int, ...]]],
) -> None:
    """Check that the checkpoint has each leaf of the trainer, with the same name, shape and dtype.

    Leaves that differ per replica may have a leading replica dim: a trainer that has not run yet has
    one value for all.
    """
    # All differences in one message: found one by one, each would take another start of the script.
    wrong: list[str] = []
    for name, leaf in now.items():
        if name not in found:
            wrong.append(f"{name}: {_form(leaf)} here, missing in the checkpoint")
            continue
        stored = found[name]
        if name in keys:
            same = _is_key_like(leaf, stored, keys[name])
        else:
            shapes = own.get(name, (tuple(leaf.shape),))
            # A number of Python takes the dtype that the first step has given it.
            fits = leaf.dtype == stored.dtype or getattr(leaf, "weak_type", False)
            same = stored.shape in shapes and fits
        if not same:
            there = f"a random key ({keys[name]})" if name in keys else _form(stored)
            wrong.append(f"{name}: {_form(leaf)} here, {there} in the checkpoint")
    wrong += [
        f"{name}: missing here, {_form(found[name])} in the checkpoint"
        for name in found
        if name not in now
    ]
    if wrong:
        raise CheckpointError(
            f"The state in the checkpoint does not have the form of the trainer's: "
            f"{listed(wrong, 8, '; ')}. Make the trainer with the model, optimizer and options "
            f"that the checkpoint was saved with."
        )


def named_leaves(state: Tree) -> dict[str, Any]:
    """The leaves of a training state by name: `params/dense/kernel`, `optimizer_state/0/mu/...`."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = path_name(path)
        while name in found:  # {"a": {"b": ...}, "a/b": ...}
            name += "~"
        found[name] = leaf
    return found


def history_arrays(history: History) -> dict[str, np.ndarray]:
    """A history as arrays by name."""
    return {HISTORY + name: array for name, array in history.to_arrays().items()}


def history_of(
    arrays: Mapping[str, np.ndarray], first_step: int, microbatches: int, replicas: int
) -> History:
    """The history, possibly with another split into microbatches and replicas."""
    own = {n.removeprefix(HISTORY): a for n, a in arrays.items() if n.startswith(HISTORY)}
    return History.from_arrays(own, first_step, microbatches, replicas)


def _is_key_like(leaf: jax.Array, stored: np.ndarray, kind: str) -> bool:
    """Whether a leaf is a random key of the stored kind and shape."""
    # By shapes alone: JAX knows which generators there are, and how many numbers a key has.
    try:
        form = jax.eval_shape(lambda numbers: as_keys(numbers, kind), stored)
    except (TypeError, ValueError):  # not a key, or one of an unknown kind
        return False
    return form.shape == leaf.shape and form.dtype == leaf.dtype


def _form(leaf: jax.Array | np.ndarray) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
