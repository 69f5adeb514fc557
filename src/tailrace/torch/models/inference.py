"""A module that runs on the device, without training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.torch.calls.arrays import tensor_of
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.models.base import Model
from tailrace.torch.models.saving import check_same_form, read_state, write_state
from tailrace.torch.models.weights import owners_of, trainer_of
from tailrace.torch.programs.infer import InferenceProgram
from tailrace.torch.programs.infer_pipelined import StagedInferenceProgram, can_be_staged
from tailrace.torch.tracing.forward import Forward, weights_of


class InferenceModel(Model):
    """A module that runs on the device; made by `tt.inference_model`.

    Raises:
        OptionError: `accumulation` is not 1.
        ProgramError: weights are copied before the first call; or an operation of `forward` cannot run
            on the device, at the first call.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> model = tt.inference_model(torch.nn.Linear(2, 3).eval())
    >>> type(model).__name__, model(torch.ones(4, 2)).shape
    ('InferenceModel', torch.Size([4, 3]))
    """

    def __init__(self, module: torch.nn.Module, options: ModelOptions) -> None:
        if options.microbatches != 1:
            raise OptionError(
                f"There is no accumulation in inference: accumulation must be 1. Received: "
                f"{options.microbatches}. Use device_iterations for more batches to a call."
            )
        super().__init__(module, options)
        self._seen: tuple[Any, ...] = ()

    def copy_weights_to_device(self) -> None:
        """Use the current weights of the module."""
        if self._program is None:
            raise ProgramError(
                "Model has not been compiled or has been destroyed. Call it, or compile(...) it."
            )
        self._program.put(*weights_of(self.module))

    def copy_weights_to_host(self) -> None:
        """Copy the buffers that forward has changed on the device into the module."""
        if self._program is None:
            raise ProgramError(
                "Model has not been compiled or has been destroyed. Call it, or compile(...) it."
            )
        named, found = dict(self.module.named_buffers()), self._program.buffers
        assert self._forward is not None
        with torch.no_grad():
            for name in self._forward.changed & set(named):
                named[name].copy_(tensor_of(found[name]))

    def _after_run(self) -> None:
        """As in PyTorch, write buffers that forward changes back to the module; a module that also
        trains has those of its training."""
        if self._forward is not None and self._forward.changed and not owners_of(self.module):
            self.copy_weights_to_host()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the module, and copy them to the device."""
        found = self.module.load_state_dict(state_dict, strict=strict)
        if self._program is not None:
            self.copy_weights_to_device()
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights and buffers to a file of arrays."""
        self._before_run()
        params, buffers = self._weights()
        write_state(path, {"param": params, "buffer": buffers}, {"seed": self._seed})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Use the weights and buffers of a file that `save` wrote, here and in the module."""
        trees, _ = read_state(path)
        own = weights_of(self.module)
        saved = (trees.get("param", {}), trees.get("buffer", {}))
        # Both before the first copy: a file that does not fit changes nothing.
        check_same_form(saved[0], own[0], "parameters")
        check_same_form(saved[1], own[1], "buffers")
        values = {name: tensor_of(array) for part in saved for name, array in part.items()}
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                tensor.copy_(values[name])
        if self._program is not None:
            self.copy_weights_to_device()

    def destroy(self) -> None:
        """Free the device. The next call compiles again."""
        self._drop_program()

    def _weights(self) -> tuple[Any, Any]:
        if self._program is None:
            return weights_of(self.module)
        return self._program.params, self._program.buffers

    def _make_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        self._seen = self._version()
        return super()._make_program(forward, params, buffers, taps)

    def _new_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        staged = can_be_staged(forward, self._options)
        kind = StagedInferenceProgram if staged else InferenceProgram
        return kind(forward, self._options, params, buffers, taps, self._seed)

    def _version(self) -> tuple[Any, ...]:
        """The version of each training model that shares some of the weights."""
        # A dict for its order: the tuple is compared with that of the last call.
        holding = {other: None for one in owners_of(self.module) for other in one._holders()}
        return tuple((one, one.version) for one in holding)

    def _before_run(self) -> None:
        """Apply updates by a training model of the same module."""
        version = self._version()
        if self._program is None or not version or version == self._seen:
            return
        self._seen = version
        training = trainer_of(self.module)
        # Through the host: on the device there is only the state of the modules around it.
        if training is None:  # a submodule of modules that train
            self._program.put(*weights_of(self.module))
            return
        state = training._latest()
        self._program.put(state.params, state.model_state)
