"""The base of training and inference models: calls, observation, anchors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.devices.shardings import without_mesh
from tailrace.errors import OptionError
from tailrace.records.records import Records
from tailrace.taps.catalogue import Catalogue, names_listed_by
from tailrace.taps.tap import Every
from tailrace.torch.calls.anchors import Anchor, output_part, output_tap
from tailrace.torch.calls.arrays import tensor_of
from tailrace.torch.calls.inputs import CallForm
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.calls.output_modes import OutputMode, Returned
from tailrace.torch.errors import UsageError
from tailrace.torch.models.ways_in import learned
from tailrace.torch.tracing.backward_hooks import hooks_of
from tailrace.torch.tracing.forward import Forward, weights_of, written_name
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes


class Model(ABC):
    """What training and inference models have in common.

    A call runs one execution: `device_iterations` steps, on tensors whose dim 0 has the rows of all of
    them. Other attributes are those of the module.
    """

    _default_mode = OutputMode.ALL
    _captures = True
    """Whether a module may be captured; PopTorch's rules, of losses and blocks, are of a trace."""

    def __init__(self, module: torch.nn.Module, options: ModelOptions) -> None:
        if isinstance(module, Model):
            module = module.module
        if not isinstance(module, torch.nn.Module):
            raise OptionError(
                f"A model wraps a torch.nn.Module. Received: {type(module).__name__}. Put the "
                f"function into the forward method of a module."
            )
        for name, parameter in module.named_parameters():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise OptionError(
                    f"A model wraps a module whose parameters have their shapes. {name!r} of "
                    f"{type(module).__name__} gets its shape when the module runs first. Call the "
                    f"module on a batch once, as PyTorch advises for lazy modules, then wrap it."
                )
        self.module, self._options = module, options
        self._returned = options.resolved_mode(self._default_mode)
        self._training = training_modes(module)
        self._anchors: dict[str, Anchor] = {}
        self._anchored: dict[str, np.ndarray] = {}
        self._forward: Forward | None = None
        self._loss: Any = None
        """Which value that the module returns is trained, where the user says so."""
        self._program: Any = None
        self._parts: dict[tuple[str, str], Any] = {}
        # `torch.manual_seed` then decides dropout here as well.
        self._seed = torch.initial_seed() % 2**31 if options.seed is None else options.seed

    @property
    def options(self) -> Any:
        """The options of the model."""
        return self._options

    # -- running --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one execution; arguments are those of the module's forward."""
        with without_mesh():
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Before the program is looked at: changes on the host may drop it.
        self._before_call()
        if self.is_compiled and self._hooks_now() != self._hooks_traced:
            self._drop_program()
        if not self.is_compiled:
            self._build(args, kwargs)
        form = self._form
        tensors = form.tensors_of(args, kwargs)
        self._before_run()
        options = self._options
        parts = self._run(form.blocks(tensors))
        self._after_run()
        counts = (options.device_iterations, options.microbatches, options.replicas)
        assert self._forward is not None
        arrays = {
            name: self._returned.arrange(output_part(parts, name), *counts)
            for name in self._forward.names
        }
        self._parts = parts
        # Arranged when they are read, from the parts of this call.
        self._anchored.clear()
        written = dict(zip(form.names, tensors, strict=False))
        for name in self._forward.written:
            found = Returned(OutputMode.ALL).arrange(
                output_part(parts, written_name(name)), *counts
            )
            # As PyTorch would leave it: forward has changed the argument in place, and the caller sees
            # that.
            with torch.no_grad():
                written[name].copy_(tensor_of(found).reshape(written[name].shape))
        return self._forward.outputs(arrays)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments like these, without running anything."""
        self._before_call()
        if self.is_compiled:
            note_once("Call to compile() ignored: the model is compiled already.")
            return
        with without_mesh():
            self._build(args, kwargs)
            self._program.compile()

    @property
    def is_compiled(self) -> bool:
        """Whether the model has its program."""
        return self._program is not None

    def train(self, mode: bool = True) -> Model:
        """Put the module in training mode; a compiled model is compiled again for it."""
        self.module.train(mode)
        modes = training_modes(self.module)
        # Of all modules inside: some may be frozen, and stay in evaluation mode.
        if modes != self._training:
            self._training = modes
            self._drop_program()
        return self

    def eval(self) -> Model:
        """Put the module in evaluation mode; a compiled model is compiled again for it."""
        return self.train(False)

    # -- observing ------------------------------------------------------------------------------

    def tensor_names(self) -> list[str]:
        """The names of all tensors of the program, sorted. The model must be compiled.

        Raises:
            UsageError: the model is not compiled yet.
        """
        return sorted(entry.name for entry in self.tensors())

    def tensors(self) -> Catalogue:
        """All tensors of the program, with shape, dtype and source. The model must be compiled.

        Raises:
            UsageError: the model is not compiled yet.
        """
        if self._program is None:
            raise UsageError(
                "Model must be compiled before calling tensor_names. Call the model, or "
                "compile(...) with tensors like those of a call."
            )
        return self._program.catalogue

    def anchor_tensor(
        self,
        name: str,
        tensor: str,
        output_mode: Returned | Every | str | None = None,
        output_return_period: int | None = None,
    ) -> None:
        """Return a tensor of the program after each call, through `anchored_tensor(name)`.

        Args:
            name: your name for it.
            tensor: its name in the program; see `tensor_names`.
            output_mode: the values to return; None: as for outputs.
            output_return_period: the period of "every_n".

        A compiled model is compiled again at its next call.

        Raises:
            OptionError: the mode does not exist, or its period does not divide a call.
        """
        returned = self._returned
        if output_mode is not None:
            returned = Returned.of(output_mode, output_return_period).resolved(self._returned)
        returned.check(self._options.device_iterations)
        # By name: the same name again replaces its anchor.
        self._anchors[name] = Anchor(name, tensor, returned)
        self._drop_program()

    def anchored_tensor(self, name: str) -> torch.Tensor:
        """A copy of an anchored tensor's values in the latest call.

        Raises:
            UsageError: there is no such anchor, or no call since.
        """
        anchor = self._anchors.get(name)
        parts = self._parts
        if anchor is None or not any(kind == anchor.kind for _, kind in parts):
            raise UsageError(
                f"No tensor with name {name} found. Anchors: {sorted(self._anchors) or 'none'}. They "
                f"have values after the first call."
            )
        if name not in self._anchored:
            # By kind: the tensor's name may be a pattern, and its record has the full name.
            part = next(part for (_, kind), part in parts.items() if kind == anchor.kind)
            options = self._options
            counts = (options.device_iterations, options.microbatches, options.replicas)
            shape = anchor.shape(part.one.entry)
            self._anchored[name] = anchor.returned.arrange(part, *counts, shape)
        return tensor_of(self._anchored[name])

    @property
    def records(self) -> Records:
        """The records of `observe=` in the latest call."""
        if self._program is None:
            raise UsageError("There are records after the first call. Call the model first.")
        return self._program.records

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _form(self) -> CallForm:
        assert self._forward is not None
        return self._forward.form

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = CallForm(self.module.forward, args, kwargs, self._options.pieces)
        options = self._options
        function = ModuleFunction(self.module, self._training, options.precision, options.staging)
        params, buffers = weights_of(self.module)
        self._hooks_now = hooks_of(self.module)
        self._hooks_traced = self._hooks_now()
        # A trace of its own comes first: outputs, losses and blocks decide what the program is made of.
        training = self._default_mode is OutputMode.FINAL
        forward = learned(function, form, params, buffers, training, self._loss, self._captures)
        self._forward = forward
        self._before_making(forward)
        taps = self._taps(forward)
        with names_listed_by("model.tensor_names(), after compiling without it"):
            self._program = self._make_program(forward, params, buffers, taps)

    def _taps(self, forward: Forward) -> list[Any]:
        count = self._options.microbatches
        return [
            *(output_tap(name, self._returned, count) for name in forward.names),
            *(
                output_tap(written_name(name), Returned(OutputMode.ALL), count)
                for name in forward.written
            ),
            *(anchor.tap(count) for anchor in self._anchors.values()),
        ]

    def _make_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        return self._new_program(forward, params, buffers, taps)

    @abstractmethod
    def _new_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        """The program of a call, for training or for inference."""

    def _run(self, blocks: list[Any]) -> Any:
        """Run an execution; returns the emissions of its taps."""
        return self._program.run(blocks)

    # Places to hook in, which most models leave empty.
    def _before_call(self) -> None:  # noqa: B027
        """Called before a call, which builds the program if there is none."""

    def _before_making(self, forward: Forward) -> None:  # noqa: B027
        """Called once the forward pass is known, before the program is built."""

    def _before_run(self) -> None:  # noqa: B027
        """Called before an execution."""

    def _after_run(self) -> None:  # noqa: B027
        """Called after an execution."""

    def _drop_program(self) -> None:
        """Drop the program; the next call compiles it again."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def __getattr__(self, name: str) -> Any:
        # While a model is copied or unpickled it has no attributes yet: asking the module would
        # recurse.
        if name in ("module", "_program", "_options") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"
