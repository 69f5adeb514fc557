"""A module that trains on the device."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.devices.shardings import without_mesh
from tailrace.records.history import History
from tailrace.taps.tap import Observe
from tailrace.torch.calls.arrays import tensor_of
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.calls.output_modes import OutputMode
from tailrace.torch.errors import UsageError
from tailrace.torch.models.host_gradients import note_trained, put_back_gradients
from tailrace.torch.models.host_sync import note_hooks_of_steps
from tailrace.torch.models.past_calls import CallLog, PastCalls
from tailrace.torch.models.random_layers import note_what_is_lacking
from tailrace.torch.models.saved import SavedModel
from tailrace.torch.models.ways_in import LossChoice, check_choice
from tailrace.torch.models.weights import unlink
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.optim.classes import checked_norm
from tailrace.torch.optim.schedule import Schedule
from tailrace.torch.programs.train import RunEnd, TrainingProgram
from tailrace.torch.resuming.keeping import keeping_of
from tailrace.torch.tracing.forward import Forward, weights_of
from tailrace.trainer.checkpoints.snapshot import BUILD
from tailrace.trainer.executions import Results
from tailrace.trainer.lookback.outcome import Replay


class TrainingModel(SavedModel):
    """A module that trains on the device; made by `tt.training_model`, whose example runs one.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> type(tt.training_model(torch.nn.Linear(2, 1), accumulation=2)).__name__
    'TrainingModel'
    """

    _default_mode = OutputMode.FINAL

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: ModelOptions,
        *,
        loss: LossChoice = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        checkpoint: Any = None,
    ) -> None:
        super().__init__(module, options)
        check_choice(loss)
        self._loss = loss
        if optimizer is None:
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self._schedule = None if scheduler is None else Schedule(scheduler, optimizer)
        self._max_grad_norm = checked_norm(max_grad_norm, optimizer)
        self._programs = 0
        self._noted: DeviceOptimizer | None = None
        self._log: CallLog | None = None
        self._loaded: Mapping[str, Any] | None = None
        """The note of the file that the model was loaded from."""
        self._begin(optimizer)
        self._keeping = keeping_of(checkpoint, self)
        self._passes = None if self._keeping is None else self._keeping.passes

    # -- weights --------------------------------------------------------------------------------

    def copy_weights_to_host(self) -> None:
        """Copy weights, buffers and optimizer state from the device into the PyTorch objects."""
        self._check_alive()
        # The state on the device is that of parameters which the module no longer has.
        if self._restructured:
            return  # the host was updated then, and has newer weights since
        self._take_shared()
        state = self._state()
        self._dirty = False  # first, because reading weights would call this again
        with torch.no_grad():
            for name, tensor in self.module.named_parameters():
                source = state.params if name in state.params else state.model_state
                tensor.copy_(tensor_of(source[name]))
            for name, tensor in self.module.named_buffers():
                tensor.copy_(tensor_of(state.model_state[name]))
        self._count_host_writes()
        if not self._reloaded:
            self._device_optimizer.take_over(state.optimizer_state)

    def copy_weights_to_host_if_needed(self) -> bool:
        """The same, if training has changed them; returns whether it had."""
        if not self._dirty:
            return False
        self.copy_weights_to_host()
        return True

    def copy_weights_to_device(self) -> None:
        """Copy the module's weights and buffers to the device, replacing the trained ones."""
        self._check_alive()
        # First: reading weights would otherwise bring back those of the device.
        self._dirty = False
        with without_mesh():
            params, buffers = weights_of(self.module)
            state = self._state()._replace(params=params, model_state=buffers)
            if self._program is None:
                # Copies: host arrays may share the memory of the module's tensors.
                self._held = jax.tree.map(jnp.array, state)
            else:
                self._program.put(state)
        self._count_host_writes()
        self.version += 1

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the module, and copy them to the device."""
        found = self.module.load_state_dict(state_dict, strict=strict)
        note_what_is_lacking(self.module)
        if self._program is not None or self._held is not None:
            self.copy_weights_to_device()
        return found

    def replay(
        self,
        step: int,
        calls: Iterable[Any],
        *,
        observe: Observe = (),
        checkpoint: str | os.PathLike[str],
    ) -> Replay:
        """Run a past step again, observe it with any taps, and prove that it equals the original.

        The calls are made again from the nearest file before the step, on a separate state; learning
        rates are those of the original calls. Losses and, with `fingerprint=True`, the state after each
        call are compared with what was recorded. The model is unchanged afterwards.

        Args:
            step: the number of the step, counted from 0 over all calls.
            calls: the arguments of all calls of the training in order, such as a `tt.DataLoader` that
                yields the same again; those before the file are passed over.
            observe: taps.
            checkpoint: a file that `save` wrote, a directory of such files, or that of `checkpoint=`.

        Returns:
            The records of the step by name, with `proved` (None where nothing was recorded) and
            `differences`; see `tr.Trainer.replay`.

        Raises:
            CheckpointError: no file is from before the step.
            DataExhausted: the calls end before the step.
        """
        kind = type(self.optimizer).__name__
        past = PastCalls(self._options, checkpoint, step, self._log, kind)
        rest = past.skipped(calls)
        first = next(rest, None)
        if first is None:
            raise past.ended()
        with without_mesh():
            if self._program is None:
                self._before_call()
                self._build(first, {})
            assert self._program is not None
            return past.replay(self._program, self._form, itertools.chain([first], rest), observe)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or other hyperparameters, from the next call on.

        Numbers (learning rates, betas, decays) change without compiling. An optimizer with other state
        tensors needs another program. A new one starts from its loaded state; without any, one of the
        same class continues from the current state.

        Raises:
            UsageError: an optimizer of this class has no update on the device.
            OptionError: the optimizer holds a parameter of another module.
        """
        if self._schedule is not None and optimizer is not self.optimizer:
            raise UsageError(
                "The model's scheduler= sets the rates of the optimizer that the model was made with. "
                "To train on with another one, call destroy() and make a model with it and with a "
                "scheduler of its own."
            )
        if self._outdated():
            self._start_over(optimizer)
        self._take_optimizer(optimizer)
        self._apply_hypers()

    @property
    def history(self) -> History:
        """The loss of each step of the latest call."""
        if self._program is None:
            raise UsageError("There is a history after the first call. Call the model first.")
        return self._program.journal.history

    def destroy(self) -> None:
        """Copy everything back, free the device and unwrap the module.

        The next call compiles again, for arguments of any form. A checkpoint directory is given back.
        """
        if self._keeping is not None:
            self._keeping.close()
        self.copy_weights_to_host_if_needed()
        # Models with the same weights take the latest ones now: there is no later.
        for other, _ in self._sharing.others:
            other._take_shared()
        self._forget_program()
        self._sharing.leave()
        unlink(self.module, self)
        self._noted = None
        put_back_gradients()

    # -- inside ---------------------------------------------------------------------------------

    def _make_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        program = self._new_program(forward, params, buffers, taps)
        self._hypers = self._device_optimizer.hypers()
        if self._held is not None:
            program.put(self._held)
            # What the state holds: numbers that were changed since differ from it, and are sent
            # before the call.
            self._hypers = np.asarray(self._held.optimizer_state["hyper"])
            self._held = None
        return program

    def _new_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        program = TrainingProgram(
            forward,
            self._device_optimizer,
            self._options_of_run(),
            params,
            buffers,
            frozenset(n for n, p in self.module.named_parameters() if not p.requires_grad),
            taps,
            self._seed,
            self._step,
            self._run_to_go_on(),
        )
        if self._loaded is not None:
            program.engine.build_as_recorded(self._loaded.get(BUILD))
        return program

    def _run_to_go_on(self) -> RunEnd | None:
        """The run that a resumed model goes on with, in its first program."""
        if self._keeping is None:
            return None
        resumed, self._keeping.resumed = self._keeping.resumed, False
        return RunEnd(self._keeping.run_end if resumed else None, resumed, self._keeping.directory)

    def _options_of_run(self) -> ModelOptions:
        """The options; a program that replaces another one writes to a new run directory."""
        self._programs += 1
        if self._options.run_dir is None or self._programs == 1:
            return self._options
        directory = f"{os.fspath(self._options.run_dir)}-{self._programs}"
        if self._keeping is None or not self._keeping.resumed:
            note_once(
                f"The model has another program from step {self._step} on. Its run: {directory!r}."
            )
        return dataclasses.replace(self._options, run_dir=directory)

    def _run(self, blocks: list[Any]) -> Any:
        schedule, first = self._schedule, self._program.engine.step
        count = self._options.device_iterations
        if schedule is not None:
            bound = self._device_optimizer
            rows = schedule.rows(count, bound.numbers, bound.flags)
            self._apply_hypers(np.roll(rows, first % count, axis=0))
        try:
            return self._program.run(blocks, self._moved)
        finally:
            # Also of a call that failed: later calls go on from what it has trained.
            if schedule is not None:
                schedule.settle(self._program.engine.step - first, count)
            if self._keeping is not None and self._program.engine.step != first:
                self._keeping.called(self._program.engine.step)
            if self._program.latest is not None:
                self._log_call(self._program.latest)

    def _moved(self) -> None:
        """Take note that the device has other weights than the host, from now on."""
        if self._device_optimizer is not self._noted:
            self._noted = self._device_optimizer
            note_trained(self.trained_tensors)
        self._dirty = True
        self.version += 1
        # Schedulers check whether the optimizer has made a step; it has, on the device.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _log_call(self, results: Results) -> None:
        options = self._options
        if not options.fingerprint:
            return
        if self._log is None:
            first, counts = results.first_step, (options.microbatches, options.replicas)
            self._log = CallLog(History(first, *counts))
        self._log.add(results, self._hypers)

    def _after_run(self) -> None:
        note_hooks_of_steps(self.optimizer, [hook.id for hook in self._hooks])
