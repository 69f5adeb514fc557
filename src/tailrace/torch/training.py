"""A module that trains on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.errors import ProgramError
from tailrace.program.step import TrainState
from tailrace.torch.arrays import tensor_of
from tailrace.torch.engines import TrainingEngine
from tailrace.torch.errors import UsageError
from tailrace.torch.forward import Forward, weights_of
from tailrace.torch.models import Model
from tailrace.torch.modes import OutputMode
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.options import ModelOptions
from tailrace.torch.saving import check_same_form, read_state, write_state
from tailrace.torch.weights import link, trainer_of, unlink
from tailrace.training.history import History


def _refresh(model: TrainingModel) -> None:
    model.copy_weights_to_host_if_needed()


class TrainingModel(Model):
    """A module that trains on the device; made by `tt.training_model`."""

    _default_mode = OutputMode.FINAL

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: ModelOptions,
    ) -> None:
        super().__init__(module, options)
        module = self.module
        if optimizer is None:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self._dirty, self.version, self._step = False, 0, 0
        self._follows = True
        self._held: TrainState | None = None
        self.optimizer = optimizer
        self._device_optimizer = self._bind(optimizer)
        self._hook = optimizer.register_state_dict_pre_hook(self._before_state_dict)
        self._hypers: Any = None
        link(module, self, _refresh)

    # -- weights --------------------------------------------------------------------------------

    def copy_weights_to_host(self) -> None:
        """Copy weights, buffers and optimizer state from the device into the PyTorch objects."""
        self._check_alive()
        state = self._state()
        self._dirty = False  # before anything is read, which would ask for this again
        with torch.no_grad():
            for name, tensor in self.module.named_parameters():
                source = state.params if name in state.params else state.model_state
                tensor.copy_(tensor_of(source[name]))
            for name, tensor in self.module.named_buffers():
                tensor.copy_(tensor_of(state.model_state[name]))
        self._device_optimizer.take_over(state.optimizer_state)

    def copy_weights_to_host_if_needed(self) -> bool:
        """The same, if training has changed them since; returns whether it had."""
        if not self._dirty:
            return False
        self.copy_weights_to_host()
        return True

    def copy_weights_to_device(self) -> None:
        """Copy the module's weights and buffers to the device, over what was trained there."""
        self._check_alive()
        self._dirty = False
        params, buffers = weights_of(self.module)
        state = self._state()._replace(params=params, model_state=buffers)
        if self._engine is None:
            self._held = state
        else:
            self._engine.put(state)
        self.version += 1

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load weights into the module, and copy them to the device."""
        found = self.module.load_state_dict(state_dict, strict=strict)
        if self._engine is not None:
            self.copy_weights_to_device()
        return found

    def save(self, path: Any) -> None:
        """Write weights, buffers, optimizer state, step count and seed to a file of arrays."""
        state = self._state()
        trees = {
            "param": state.params,
            "buffer": state.model_state,
            "optimizer": state.optimizer_state,
        }
        step = self._step if self._engine is None else self._engine.trainer.step
        kind = type(self.optimizer).__name__
        write_state(path, trees, {"step": step, "seed": self._seed, "optimizer": kind})

    def load(self, path: Any) -> None:
        """Go on from a file that `save` wrote: training continues as if it had never stopped."""
        trees, note = read_state(path)
        params, buffers = weights_of(self.module)
        fresh = self._device_optimizer.init({n: jnp.asarray(v) for n, v in params.items()})
        saved = TrainState(
            trees.get("param", {}), trees.get("optimizer", {}), trees.get("buffer", {})
        )
        check_same_form(saved.params, params, "parameters")
        check_same_form(saved.model_state, buffers, "buffers")
        check_same_form(saved.optimizer_state, fresh, f"optimizer ({note['optimizer']} saved)")
        self._drop_program()
        self._held = jax.tree.map(jnp.asarray, saved)
        self._step, self._seed = note["step"], note["seed"]
        self._dirty = True
        self.version += 1

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or other numbers of the same one, from the next call on.

        Numbers (learning rates, betas, decays) change without compiling anything. An optimizer that
        needs other state tensors gets another program, and starts with empty state.
        """
        bound = self._bind(optimizer)
        if self._engine is not None and bound.key != self._device_optimizer.key:
            self._drop_program()
            assert self._held is not None
            fresh = bound.init({n: jnp.asarray(v) for n, v in self._held.params.items()})
            self._held = self._held._replace(optimizer_state=fresh)
        if optimizer is not self.optimizer:
            self._hook.remove()
            self._hook = optimizer.register_state_dict_pre_hook(self._before_state_dict)
        self.optimizer, self._device_optimizer = optimizer, bound
        self._apply_hypers()

    @property
    def history(self) -> History:
        """The loss of each step of the latest call."""
        if self._engine is None:
            raise UsageError("There is a history after the first call. Call the model first.")
        return self._engine.trainer.history

    def destroy(self) -> None:
        """Copy everything back, free the device and unwrap the module.

        The next call compiles again, for arguments of whatever form it has.
        """
        if self._engine is None:
            self._unwrap()
            return
        self.copy_weights_to_host_if_needed()
        self._step = self._engine.trainer.step
        self._engine.close()
        self._engine, self._held = None, None
        self._unwrap()

    def _unwrap(self) -> None:
        if trainer_of(self.module) is self:
            unlink(self.module)

    # -- inside ---------------------------------------------------------------------------------

    def _bind(self, optimizer: torch.optim.Optimizer) -> DeviceOptimizer:
        names = {id(value): name for name, value in self.module.named_parameters()}
        summed = str(self._options.accumulation.reduction) == "sum"  # type: ignore[union-attr]
        return DeviceOptimizer(optimizer, names, self._options.replicas if summed else 1)

    def _make_engine(self, forward: Forward, params: Any, buffers: Any, taps: list[Any]) -> Any:
        if trainer_of(self.module) is None:
            link(self.module, self, _refresh)
        engine = self._new_engine(forward, params, buffers, taps)
        if self._held is not None:
            engine.put(self._held)
            self._held = None
        self._hypers = self._device_optimizer.hypers()
        return engine

    def _new_engine(self, forward: Forward, params: Any, buffers: Any, taps: list[Any]) -> Any:
        return TrainingEngine(
            forward,
            self._device_optimizer,
            self._options,
            params,
            buffers,
            frozenset(n for n, p in self.module.named_parameters() if not p.requires_grad),
            taps,
            self._seed,
            self._step,
        )

    def _before_state_dict(self, _: Any) -> None:
        self.copy_weights_to_host_if_needed()

    def _state(self) -> TrainState:
        if self._engine is not None:
            return self._engine.state
        if self._held is None:
            raise ProgramError(
                "Model has not been compiled or has been destroyed. Call it, or compile(...) it."
            )
        return self._held

    def _check_alive(self) -> None:
        if self._engine is None and self._held is None:
            raise ProgramError(
                "Model has not been compiled or has been destroyed. Call it, or compile(...) it."
            )

    def _before_run(self) -> None:
        if self._follows:
            self._apply_hypers()

    def _apply_hypers(self) -> None:
        values = self._device_optimizer.hypers()
        if self._engine is not None and (values != self._hypers).any():
            self._engine.set_hypers(values)
            self._hypers = values

    def _after_run(self) -> None:
        self._dirty = True
        self.version += 1
        # Schedulers ask whether the optimizer has made a step, and it has, elsewhere.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _drop_program(self) -> None:
        if self._engine is not None:
            self._held = jax.tree.map(jnp.copy, self._engine.state)
            self._step = self._engine.trainer.step
        super()._drop_program()
