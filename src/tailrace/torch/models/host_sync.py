"""Detects changes on the host since the last call of a training model, and applies them.

before a call          updates by other models with the same weights are applied
  other parameters       the module was changed: everything is rebuilt from the host
  other flags or state   the optimizer was changed: the program is rebuilt, the weights stay
  other numbers          are transferred to the device, at no cost
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.messages import note_once
from tailrace.devices.shardings import without_mesh
from tailrace.errors import ProgramError
from tailrace.program.step.training_step import TrainState
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.errors import UsageError
from tailrace.torch.models.base import Model
from tailrace.torch.models.host_gradients import put_back_gradients, watch_gradients
from tailrace.torch.models.random_layers import note_what_is_lacking
from tailrace.torch.models.shared_parameters import Sharing
from tailrace.torch.models.weights import link, trainer_of, unlink
from tailrace.torch.optim.binding import DeviceOptimizer, has_stepped
from tailrace.torch.optim.schedule import Schedule
from tailrace.torch.resuming.keeping import Keeping
from tailrace.torch.tracing.forward import Forward
from tailrace.torch.tracing.module_function import training_modes
from tailrace.torch.tracing.watch import current_watch

_version_of = operator.attrgetter("_version")


class FollowingModel(Model):
    """The part of a training model that synchronizes with the host between calls.

    Attributes:
        optimizer: the PyTorch object.
        version: the number of changes of the weights on the device.
        lent: names of methods that the module has as well while it is wrapped.
    """

    lent: frozenset[str] = frozenset()

    _schedule: Schedule | None = None
    _max_grad_norm: float | None = None
    _keeping: Keeping | None = None

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._dirty, self.version, self._step = False, 0, 0
        self._follows, self._restructured, self._reloaded = True, False, False
        self._held: TrainState | None = None
        self._host_writes = 0
        self._counted: list[torch.nn.Parameter] = []
        self._unused: frozenset[str] = frozenset()
        module, self._sharing = self.module, Sharing(self)
        self._sharing.tensors = dict((*module.named_parameters(), *module.named_buffers()))
        self.optimizer = optimizer
        self._device_optimizer = self._bind(optimizer)
        self._note_form()
        self._hypers: Any = None
        link(module, self)
        self._sharing.join(module)
        watch_gradients()
        weakref.finalize(self, put_back_gradients).atexit = False
        self._hook(optimizer)
        if has_stepped(optimizer):  # perhaps in another process
            note_what_is_lacking(module)

    def copy_weights_to_host_if_needed(self) -> bool:
        """Copy weights to the host if training has changed them; returns whether it had."""
        raise NotImplementedError

    @property
    def trained_tensors(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates."""
        return list(self._device_optimizer.tensors.values())

    # -- called by the module and by models with the same weights -------------------------------

    def _refresh(self) -> None:
        """Update the host's tensors; the module calls this when weights are read."""
        self.copy_weights_to_host_if_needed()
        for other, _ in self._sharing.others:
            other.copy_weights_to_host_if_needed()

    def _note_restructuring(self) -> None:
        """Record that a parameter or submodule was replaced: the next call starts over."""
        if current_watch() is None:  # changes by forward itself are part of the program
            self._restructured = True

    def _holders(self) -> list[Any]:
        """This model and those that share some of its weights."""
        return [self, *(other for other, _ in self._sharing.others)]

    def _latest(self) -> TrainState:
        """Weights, optimizer state and buffers, with the updates of other models."""
        self._take_shared()
        return self._state()

    # -- changes between calls ------------------------------------------------------------------

    def _before_call(self) -> None:
        if not torch.is_grad_enabled():
            raise UsageError(
                "A call of a training model trains, and under torch.no_grad() or "
                "torch.inference_mode() nothing does. Call the model outside of it; to evaluate, make "
                "a model that does not train: tt.inference_model(module)."
            )
        if self._keeping is not None and not self._keeping.is_open:
            self._keeping.open()  # refused before anything is compiled, or a run is begun
        # A destroyed model may be called again: it takes the module back.
        if trainer_of(self.module) is not self:  # destroyed before
            link(self.module, self)
            self._sharing.join(self.module)
            watch_gradients()
        self._take_shared()
        self._take_host_writes()
        if self._outdated():
            self._start_over(self.optimizer)
        bound = self._device_optimizer
        chosen = self._follows and bound.choices() != self._choices
        if self._reloaded or chosen or bound.forms() != self._forms:
            self._take_optimizer(self.optimizer)

    def _outdated(self) -> bool:
        """Whether the module has other parameters than the program, or other dtypes."""
        forms = self._device_optimizer.forms()
        if self._restructured or forms == self._forms:
            return self._restructured
        pairs = zip(forms, self._forms, strict=True)
        return any(now != before for (_, now), (_, before) in pairs)

    def _before_making(self, forward: Forward) -> None:
        self._unused = forward.unused
        self._take_optimizer(self.optimizer, again=True)
        self._count_host_writes()

    def _before_run(self) -> None:
        # Of a schedule, the numbers of all steps are sent at once, when it advances.
        if self._follows and self._schedule is None:
            self._apply_hypers()
        if self._keeping is not None:
            self._keeping.calling(self._program.engine.step)

    def _apply_hypers(self, values: np.ndarray | None = None) -> None:
        values = self._device_optimizer.hypers() if values is None else values
        # Without a program the state waits in `_held`, and the numbers with it.
        if self._held is not None:
            after = {**self._held.optimizer_state, "hyper": jnp.asarray(values)}
            self._held = self._held._replace(optimizer_state=after)
        # Compared on the host: numbers that are the same need no transfer. By their bytes: comparing
        # arrays takes ten times as long.
        elif self._program is not None and values.tobytes() != self._hypers.tobytes():
            self._program.set_hypers(values)
            self._hypers = values

    def _count_host_writes(self) -> None:
        """Record how often the parameters on the host were written, to detect further writes."""
        # Not buffers: an inference model with the same module writes them too. Tensors of
        # `inference_mode` have no count.
        params = (p for p in self._sharing.tensors.values() if isinstance(p, torch.nn.Parameter))
        self._counted = [param for param in params if not param.is_inference()]
        self._host_writes = self._writes()

    def _writes(self) -> int:
        # PyTorch counts the writes to each tensor. Asked before every call, so kept short.
        return sum(map(_version_of, self._counted))

    def _take_host_writes(self) -> None:
        """Train on from weights that were changed on the host, as PyTorch would.

        The module's `load_state_dict` and writes in place first read the weights, so that the host has
        those of the device. A tensor that was kept from before is written without reading.
        """
        exists = self._program is not None or self._held is not None
        if not exists or self._restructured or self._writes() == self._host_writes:
            return
        if not self._dirty:
            self.copy_weights_to_device()
            return
        note_once(
            "Weights were changed on the host through tensors that were read before the last call, but "
            "this call trains those on the device, which are newer: the change is lost. Read the "
            "parameter from the module before you write to it."
        )
        self._count_host_writes()

    def _note_form(self) -> None:
        """Record what the program depends on, to detect changes."""
        bound = self._device_optimizer
        self._choices, self._forms = bound.choices(), bound.forms()

    def _take_optimizer(self, optimizer: torch.optim.Optimizer, again: bool = False) -> None:
        """Continue with the current flags, parameters and state of an optimizer."""
        same, before = optimizer is self.optimizer, self._device_optimizer
        changed = before.forms() != self._forms or before.choices() != self._choices
        if same and not (again or changed or self._reloaded):
            return
        exists = self._program is not None or self._held is not None
        if exists and not self._reloaded:
            # The state that the old program trained goes to the PyTorch object, from which the new
            # one begins.
            before.take_over(self._state().optimizer_state)
        bound = self._bind(optimizer)
        if not same:
            for hook in self._hooks:
                hook.remove()
            self._hook(optimizer)
        # A new optimizer without steps takes over the momentum of the old one; one that has made
        # steps has its own.
        goes_on = same or not has_stepped(optimizer)
        goes_on = goes_on and bound.key == before.key and not self._reloaded
        if exists and not goes_on:
            if bound.key != before.key:
                self._drop_program()
            state = self._state()
            state = state._replace(optimizer_state=bound.init(state.params))
            if self._program is None:
                self._held = state
            else:
                self._program.put(state)
                self._hypers = bound.hypers()
        self.optimizer, self._device_optimizer, self._reloaded = optimizer, bound, False
        self._note_form()

    def _take_shared(self) -> None:
        """Apply updates by models with the same weights."""
        names: set[str] = set()
        for other, shared in self._sharing.newer():
            other.copy_weights_to_host_if_needed()
            names |= shared
            self._reloaded |= other.optimizer is self.optimizer
        # A module with other parameters is read from the host as a whole, by `_start_over`.
        if not names or self._restructured:
            return
        self._count_host_writes()  # by the other models
        values = {name: array_of(self._sharing.tensors[name]) for name in names}
        if self._program is not None:
            self._program.put_weights(values)
        elif self._held is not None:
            parts = (self._held.params, self._held.model_state)
            taken = [{n: jnp.array(values.get(n, v)) for n, v in p.items()} for p in parts]
            self._held = self._held._replace(params=taken[0], model_state=taken[1])

    def _start_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Rebuild everything from the host, for a module with other parameters."""
        self.copy_weights_to_host_if_needed()
        self._forget_program()
        self._restructured = self._dirty = False
        # Modules that were added have no owner yet, and those that were removed still have one.
        unlink(self.module, self)
        self._sharing.join(self.module)
        link(self.module, self)
        modes = training_modes(self.module)
        self._training = {name: self._training.get(name, mode) for name, mode in modes.items()}
        self.version += 1
        self._take_optimizer(optimizer, again=True)

    # -- inside ---------------------------------------------------------------------------------

    def _bind(
        self, optimizer: torch.optim.Optimizer, unused: frozenset[str] | None = None
    ) -> DeviceOptimizer:
        # By identity: PyTorch's optimizers hold tensors, not names.
        names = {id(value): name for name, value in self._sharing.tensors.items()}
        # The engine takes the mean over replicas; a sum over microbatches is meant over replicas
        # too.
        summed = str(self._options.accumulation.reduction) == "sum"  # type: ignore[union-attr]
        scale = self._options.replicas if summed else 1
        before = self.__dict__.get("_device_optimizer")
        unused = self._unused if unused is None else unused
        steps = 0 if self._schedule is None else self._options.device_iterations
        norm = self._max_grad_norm
        return DeviceOptimizer(
            optimizer,
            names,
            scale,
            unused=unused,
            before=before,
            steps=steps,
            max_grad_norm=norm,
        )

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
            optimizer.register_step_pre_hook(_note_step),
        )

    def _before_state_dict(self, _: object) -> None:
        self.copy_weights_to_host_if_needed()

    def _after_load_state_dict(self, _: object) -> None:
        self._reloaded = True
        note_what_is_lacking(self.module)

    def _state(self) -> TrainState:
        if self._program is not None:
            return self._program.state
        if self._held is None:
            raise ProgramError(
                "Model has not been compiled or has been destroyed. Call it, or compile(...) it."
            )
        return self._held

    def _check_alive(self) -> None:
        self._state()

    def _drop_program(self) -> None:
        if self._program is not None:
            # Copies: the arrays of the state are buffers of the program.
            with without_mesh():
                self._held = jax.tree.map(jnp.copy, self._program.state)
            self._step = self._program.engine.step
        super()._drop_program()

    def _forget_program(self) -> None:
        if self._program is not None:
            self._step = self._program.engine.step
            self._program.close()
        self._program, self._held = None, None


def note_hooks_of_steps(optimizer: torch.optim.Optimizer, own: Collection[int]) -> None:
    """Log that hooks of an optimizer's step are not called; `own` are the ids of those of a model."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(number not in own for held in hooks for number in held):
        note_once(
            f"Hooks of the step of {type(optimizer).__name__} (register_step_pre_hook, "
            f"register_step_post_hook) are not called: updates run on the device, many in a call. Call "
            f"the function after the model.",
            key=f"hooks of steps {type(optimizer).__name__}",
        )


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before PyTorch's own step, which leaves parameters without a gradient as they are."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    if all(param.grad is None for param in params):
        note_once(
            "optimizer.step() does nothing here: a call of the training model has updated the weights "
            "on the device already. Remove it, and optimizer.zero_grad() with it."
        )
