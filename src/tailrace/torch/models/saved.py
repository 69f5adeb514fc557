"""The state of a training model in files and in checkpoints, and how it goes on from there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import note_once
from tailrace.devices.shardings import without_mesh
from tailrace.devices.surroundings import SURROUNDINGS, surroundings
from tailrace.errors import CheckpointError, RunError
from tailrace.program.step.training_step import TrainState
from tailrace.torch.calls.loader import DataLoader
from tailrace.torch.calls.passes import Passes
from tailrace.torch.errors import UsageError
from tailrace.torch.models.host_sync import FollowingModel
from tailrace.torch.models.past_calls import CallLog
from tailrace.torch.models.saving import (
    check_same_form,
    flat,
    nested,
    read_state,
    write_state,
)
from tailrace.torch.optim.schedule import Schedule, numbers_of, put_numbers
from tailrace.torch.resuming.keeping import Keeping, model_arrays, no_checkpoint
from tailrace.torch.resuming.plain_states import decoded, encoded
from tailrace.torch.resuming.start import Start
from tailrace.torch.tracing.forward import weights_of
from tailrace.trainer.checkpoints.snapshot import BUILD


class SavedModel(FollowingModel):
    """A model that writes its state, and goes on from what it has written."""

    _schedule: Schedule | None
    _max_grad_norm: float | None
    _keeping: Keeping | None
    _passes: Passes | None
    _log: CallLog | None
    _loaded: Mapping[str, Any] | None
    _programs: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, buffers, optimizer state, step count and seed to a file of arrays.

        Raises:
            RunError: the file cannot be written.
        """
        self._check_alive()
        trees, note = self._all_of_it()
        if self._schedule is not None:
            arrays: dict[str, Any] = {}
            held = [self._schedule.states(), list(numbers_of(self.optimizer))]
            note["schedule"] = encoded(held, arrays, "schedule")
            trees["host"] = arrays
        if self._log is not None:
            note[SURROUNDINGS] = surroundings()
        write_state(path, trees, note)

    def _all_of_it(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, as trees of arrays, and a note of the rest."""
        self._before_call()
        state = self._state()
        trees = {
            "param": state.params,
            "buffer": state.model_state,
            "optimizer": state.optimizer_state,
        }
        step = self._step if self._program is None else self._program.engine.step
        kind = type(self.optimizer).__name__
        note = {"step": step, "seed": self._seed, "optimizer": kind}
        build = self._options.build.recorded({})
        note[BUILD] = build if self._program is None else self._program.engine.built
        note |= {"unused": sorted(self._unused), "late": self._device_optimizer.late}
        if self._log is not None:
            trees["past"] = self._log.arrays()
        return trees, note

    def load(self, path: str | os.PathLike[str]) -> None:
        """Resume from a file of `save`: training continues as if it had never stopped.

        Raises:
            RunError: it is not such a file, or one of another model or optimizer.
        """
        kinds = {"step": int, "seed": int, "optimizer": str, "unused": list, "late": dict}
        trees, note = read_state(path, kinds)
        with without_mesh():
            self._go_on_from(trees, note)
        if self._schedule is not None and "schedule" not in note:
            note_once(
                f"{str(path)!r} was saved by a model without scheduler=. The schedulers of this one go "
                f"on from where they are, and not from step {self._step}.",
                key=f"no schedule in {path}",
            )
        elif self._schedule is not None:
            states, numbers = decoded(note["schedule"], flat(trees.get("host", {})))
            put_numbers(self.optimizer, numbers)
            self._schedule.load(states)

    def _go_on_from(self, trees: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """Train on from a saved state; refused if it does not fit."""
        self._take_shared()
        params, buffers = weights_of(self.module)
        unused = frozenset(note.get("unused", ()))
        bound = self._bind(self.optimizer, unused)
        # From the file, not from the optimizer: that one has not made the steps.
        bound.late = note.get("late", {})
        fresh = bound.init({n: jnp.asarray(v) for n, v in params.items()})
        kept = dict(trees.get("optimizer", {}))
        # The rates of a call's steps are no state: the next call sends its own.
        if 3 in (np.ndim(kept.get("hyper", 0)), np.ndim(fresh["hyper"])):
            kept["hyper"] = fresh["hyper"]
        saved = TrainState(trees.get("param", {}), kept, trees.get("buffer", {}))
        # All checks before anything is dropped: a file that does not fit leaves the model as it
        # was.
        check_same_form(saved.params, params, "parameters")
        check_same_form(saved.model_state, buffers, "buffers")
        check_same_form(saved.optimizer_state, fresh, f"optimizer ({note['optimizer']} saved)")
        # The next call builds a program from this state; its form may not be known yet.
        self._drop_program()
        self._held = jax.tree.map(jnp.asarray, saved)
        self._step, self._seed, self._loaded = note["step"], note["seed"], note
        self._log = CallLog.of(trees["past"], self._options) if "past" in trees else None
        self._device_optimizer, self._unused = bound, unused
        self._restructured = self._reloaded = False
        self._note_form()
        self._count_host_writes()  # what was written before is replaced on purpose
        # The module gets these weights when it is read next.
        self._dirty = True
        self.version += 1

    # -- checkpoints ----------------------------------------------------------------------------

    def resume(self, *objects: Any) -> Start:
        """Restore the newest checkpoint of `checkpoint=`; called before the first call of the model.

        Restored are weights, buffers, the optimizer, its numbers and schedulers, the step, random
        numbers of PyTorch, NumPy and Python, and the position of the loader, whose next pass goes on
        after the batches that were used.

        Args:
            *objects: further objects of your loop whose state belongs to the training; each has
                `state_dict()` and `load_state_dict()`. The same ones in each start.

        Returns:
            Where your loop goes on: `.epoch`, `.step`, the batches `.done` in that epoch, and whether
            anything was `.restored`; all 0 if the directory is empty.

        Raises:
            UsageError: the model has no `checkpoint=`, or was called already.
            CheckpointError: the directory is of another training, or in use.

        Example:
            >>> import tempfile, torch
            >>> import tailrace.torch as tt
            >>> module = torch.nn.Linear(2, 1)
            >>> model = tt.training_model(module, checkpoint=tempfile.mkdtemp())
            >>> start = model.resume()
            >>> start.epoch, start.step, start.restored
            (0, 0, False)
            >>> model.destroy()
        """
        keeping = self._keeping
        if keeping is None:
            raise no_checkpoint()
        if self._program is not None or self._step:
            raise UsageError(
                "model.resume() comes before the first call of a model, and before compile(...). Call "
                "it once, at the start of the script."
            )
        try:
            with without_mesh():
                return self._resumed_from(keeping, objects)
        except BaseException:
            keeping.close()
            raise

    def _resumed_from(self, keeping: Keeping, objects: tuple[Any, ...]) -> Start:
        found = keeping.read(objects)
        if found is None:
            return Start()
        arrays, note = found
        kind = type(self.optimizer).__name__
        here = {
            "seed": (self._seed, note["seed"]),
            "optimizer": (kind, note["optimizer"]),
            "microbatches of a step": (self._options.microbatches, note["microbatches"]),
            "replicas": (self._options.replicas, note["replicas"]),
        }
        if "max_grad_norm" in note:  # older checkpoints do not say
            here["max_grad_norm="] = (self._max_grad_norm, note["max_grad_norm"])
        keeping.check_same(here)
        try:
            self._go_on_from(nested(model_arrays(arrays)), note)
        except RunError as error:
            raise CheckpointError(
                f"The checkpoint directory {keeping.directory!r} belongs to another training: {error}"
            ) from None
        self._programs = max(0, note["programs"] - 1)
        return keeping.put_host(arrays, note)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of any loader, for a loop that resumes: with the position in checkpoints.

        A `tt.DataLoader` that was made with the model needs none of this. Each batch is one call's.

        Example:
            >>> import tempfile, torch
            >>> import tailrace.torch as tt
            >>> model = tt.training_model(torch.nn.Linear(2, 1), checkpoint=tempfile.mkdtemp())
            >>> list(model.batches([1, 2]))
            [1, 2]
            >>> model.destroy()
        """
        passes = self._passes
        if passes is None or (isinstance(loader, DataLoader) and loader.options is self):
            return iter(loader)
        settle = loader.settle if isinstance(loader, DataLoader) else lambda: None
        return passes.follow(loader, lambda: loader, settle)

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What a checkpoint has of the model: its state by name, its calls, and a note."""
        trees, note = self._all_of_it()
        past = flat(trees.pop("past", {}))
        note |= {
            "programs": self._programs,
            "microbatches": self._options.microbatches,
            "replicas": self._options.replicas,
            "max_grad_norm": self._max_grad_norm,
        }
        return flat(trees), past, note
