"""`poptorch.trainingModel`, `poptorch.inferenceModel`: native models with the original's names.

Long, and one thing: a class of many short methods, each described for the reference.
"""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.compat.poptorch import compile_hooks, enums
from tailrace.compat.poptorch.names import Names
from tailrace.compat.poptorch.options import Options, check_options
from tailrace.errors import NonFiniteError, OptionError, ProgramError, ReplicaError
from tailrace.taps.catalogue import Catalogue
from tailrace.torch.calls.anchors import Anchor, output_tap
from tailrace.torch.calls.containers import flatten
from tailrace.torch.calls.output_modes import Returned
from tailrace.torch.errors import UsageError
from tailrace.torch.models.base import Model
from tailrace.torch.models.inference import InferenceModel
from tailrace.torch.models.training import TrainingModel
from tailrace.torch.optim.binding import DeviceOptimizer
from tailrace.torch.tracing.forward import Forward, weights_of


class PoplarExecutor(Model):
    """A module that runs on the device; made by `trainingModel` or `inferenceModel`, run by calling it.

    It has the original's methods and those of `tt.TrainingModel` or `tt.InferenceModel`. Files contain
    arrays, not code: to load one, wrap the module again. Events and cycles of the chip are not counted.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> model = poptorch.inferenceModel(torch.nn.Identity())
    >>> isinstance(model, poptorch.PoplarExecutor), model.isCompiled()
    (True, False)
    """

    _captures = False
    _given: Options
    _detached = False
    _compile_s = 0.0

    # -- what it is -----------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The options, as they were when the model was made; they can no longer be changed."""
        return self._given

    @property
    def model(self) -> torch.nn.Module:
        """The module."""
        return self.module

    @property
    def rng_state(self) -> list[int]:
        """The seed, and how many steps random numbers were drawn for."""
        self._need_compiled()
        return [self._seed, self._steps()]

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._need_compiled()
        self._seed = int(state[0])
        # A seed alone starts its numbers over.
        self._set_steps(int(state[1]) if len(state) > 1 else 0)

    # -- running --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one execution.

        Args:
            *args: arguments of the module's forward, with the rows of all microbatches.
            **kwargs: the same by name.
        """
        # The original attaches again when it is called.
        self._detached = False
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments like these, without running anything.

        Args:
            *args: arguments as for a call.
            **kwargs: the same by name.
        """
        super().compile(*args, **kwargs)

    def isCompiled(self) -> bool:
        """Whether the model has its program."""
        return self.is_compiled

    def isAttachedToDevice(self) -> bool:
        """Whether a compiled model holds the device."""
        return self.is_compiled and not self._detached

    def detachFromDevice(self) -> None:
        """Copy everything to the host. The device itself is shared, so nothing is given up.

        Raises:
            ProgramError: it is not compiled, or is detached.
        """
        self._need_compiled()
        if self._detached:
            raise ProgramError("Device is not attached")
        # Inference changes no weights.
        if isinstance(self, TrainingModel):
            self.copy_weights_to_host_if_needed()
        self._detached = True

    def attachToDevice(self) -> None:
        """The reverse of `detachFromDevice`.

        Raises:
            ProgramError: it is not compiled, or is attached.
        """
        self._need_compiled()
        if not self._detached:
            raise ProgramError("Device is already attached")
        self._detached = False

    def compilationTime(self) -> datetime.timedelta:
        """How long compiling took.

        Raises:
            ProgramError: it is not compiled.
        """
        self._need_compiled()
        return datetime.timedelta(seconds=self._compile_s)

    def cycleCount(self) -> int:
        """Refused: there are no cycles of an IPU to count.

        Raises:
            ProgramError: always.
        """
        if not self._given.log_cycle_count:
            raise ProgramError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        raise ProgramError("Cycle count logging is only supported on actual IPU hardware.")

    def getPerfCounters(self) -> Any:
        """Refused: events of single tensors are not counted.

        Raises:
            ProgramError: always.
        """
        raise ProgramError(
            "Events of single tensors are not counted here. jax.profiler shows when what ran."
        )

    getLatency = getHostIpuLatency = getComputeLatency = getIpuHostLatency = getPerfCounters

    # -- observing ------------------------------------------------------------------------------

    def getTensorNames(self) -> list[str]:
        """The names of all tensors, sorted. The model must be compiled.

        Raises:
            UsageError: it is not compiled.
        """
        if not self.is_compiled:
            raise UsageError("Model must be compiled before calling getTensorNames")
        return self._names.all()

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """The values of an anchored tensor in the latest call.

        Args:
            short_name: the name given to `Options.anchorTensor`.

        Raises:
            SelectionError: there is no such anchor.
        """
        return self.anchored_tensor(short_name)

    # -- weights --------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or other numbers of the same one, from the next call on.

        Args:
            optimizer: the optimizer.

        Raises:
            UsageError: this is not a training model.
        """
        raise UsageError(
            f"setOptimizer is for models made by poptorch.trainingModel; this one was made by "
            f"poptorch.inferenceModel. Received: {type(optimizer).__name__}."
        )

    def copyWeightsToDevice(self) -> None:
        """Copy the module's weights to the device."""
        self.copy_weights_to_device()  # type: ignore[attr-defined]

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that `updatableNamedBuffers` lists to the device.

        Raises:
            ProgramError: the options list no buffers.
        """
        names = self._given.updatable_named_buffers
        if not names:
            raise ProgramError(
                "copyNamedBuffersToDevice copies the buffers listed in "
                "Options.updatableNamedBuffers([...]), and there are none."
            )
        self._copy_buffers(names)

    # -- files ----------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], export_model: bool = True, save_rng_state: bool = True
    ) -> None:
        """Write the state of the model to a file of arrays; the module's code is not in it.

        Args:
            path: the file.
            export_model: without effect beyond a note: wrap the module again and call `load(path)`.
            save_rng_state: without effect: the state of random numbers is always saved.
        """
        if export_model:
            note_once(
                "A saved file holds arrays: wrap the module again and call load(filename) on the "
                "result. The module itself is not in it."
            )
        super().save(path)  # type: ignore[misc]

    def compileAndExport(
        self, filename: str | os.PathLike[str], *args: Any, export_model: bool = True, **kw: Any
    ) -> None:
        """Compile, then save.

        Args:
            filename: the file.
            *args: arguments as for a call.
            export_model: as for `save`.
            **kw: arguments by name.
        """
        self.compile(*args, **kw)
        self.save(filename, export_model)

    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Load the state from a file; the program itself is compiled again, or cached by JAX.

        Args:
            filename: the file.
        """
        self.load(filename)  # type: ignore[attr-defined]

    # -- inside ---------------------------------------------------------------------------------

    def _need_compiled(self) -> None:
        if not self.is_compiled:
            raise ProgramError("Model has not been compiled or has been destroyed.")

    def _steps(self) -> int:
        raise NotImplementedError

    def _set_steps(self, steps: int) -> None:
        raise NotImplementedError

    def _copy_buffers(self, names: list[str]) -> None:
        raise NotImplementedError

    def _names_in(self, catalogue: Catalogue, forward: Forward) -> Names:
        raise NotImplementedError

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Here and not in `compile`: the first call compiles as well.
        compile_hooks.call("before")
        started = time.perf_counter()
        try:
            super()._build(args, kwargs)
        except BaseException:
            # A model that failed to compile is not compiled: the next call starts over.
            self._program = None
            raise
        self._compile_s = time.perf_counter() - started
        forward = self._forward
        assert forward is not None
        self._names = self._names_in(self._program.catalogue, forward)
        compile_hooks.call("after")

    def _taps(self, forward: Forward) -> list[Any]:
        wanted = self._given.anchored_tensors
        if wanted:
            # Without anchors first: what the names refer to is known once there is a program.
            count = self._options.microbatches
            plain = [output_tap(name, self._returned, count) for name in forward.names]
            program = self._new_program(forward, *weights_of(self.module), plain)
            names = self._names_in(program.catalogue, forward)
            program.close()
            self._anchors = {
                short: self._anchor(short, names, *entry) for short, entry in wanted.items()
            }
        return super()._taps(forward)

    def _anchor(
        self,
        short: str,
        names: Names,
        long: str,
        as_outputs: bool,
        mode: enums.OutputMode | None,
        period: int,
    ) -> Anchor:
        returned = self._returned
        if mode is not None and not as_outputs:
            # `Default` of an anchor is the mode of the outputs.
            returned = Returned.of(enums.MODES[mode], period).resolved(self._returned)
        returned.check(self._options.device_iterations)
        meaning = names.find(long)
        return Anchor(short, meaning.tensor, returned, meaning.pick)


class _TrainingExecutor(PoplarExecutor, TrainingModel):
    """Made by `trainingModel`."""

    lent = frozenset(["destroy", "copyWeightsToHostIfNeeded"])

    def __init__(
        self, module: torch.nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._given = options
        TrainingModel.__init__(self, module, optimizer, options.native())
        # The original gives parameters of a wrapped module this method.
        for name, parameter in module.named_parameters():
            parameter.replicaGrouping = functools.partial(_grouped, name)  # type: ignore[attr-defined]
        # Numbers of the optimizer change only when setOptimizer says so, as in the original.
        self._follows = False

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or other numbers of the same one, from the next call on."""
        self.set_optimizer(optimizer)

    def copyWeightsToHost(self) -> None:
        """Copy weights and optimizer state from the device into the PyTorch objects."""
        self.copy_weights_to_host()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """The same, if training has changed them since."""
        return self.copy_weights_to_host_if_needed()

    def _bind(
        self, optimizer: torch.optim.Optimizer, unused: frozenset[str] | None = None
    ) -> DeviceOptimizer:
        bound = super()._bind(optimizer, unused)
        # As the original shows them: gradients there are those of the scaled loss.
        bound.scaled_gradients = True
        if self._given.Training.automatic_loss_scaling:
            bound.scale_automatically()
        return bound

    def _steps(self) -> int:
        return self._program.engine.step

    def _set_steps(self, steps: int) -> None:
        self._program.engine.seed, self._program.engine.step = self._seed, steps

    def _copy_buffers(self, names: list[str]) -> None:
        _, buffers = weights_of(self.module)
        # Buffers that are not listed keep what training has made of them.
        state = self._state()
        self._program.put(
            state._replace(
                model_state={
                    name: buffers[name] if name in names else value
                    for name, value in state.model_state.items()
                }
            )
        )

    def _names_in(self, catalogue: Catalogue, forward: Forward) -> Names:
        trained = [name for rule in self._device_optimizer.groups for name in rule.params]
        return Names(
            catalogue,
            forward.form.names,
            trained,
            self._device_optimizer,
            self._options.microbatches > 1,
        )

    def destroy(self) -> None:
        """Copy everything back, free the device and unwrap the module."""
        super().destroy()


class _InferenceExecutor(PoplarExecutor, InferenceModel):
    """Made by `inferenceModel`."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self._given = options
        InferenceModel.__init__(self, module, options.native(training_model=False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one execution; arguments are those of the module's forward."""
        out = super().__call__(*args, **kwargs)
        # A training model has a tap for it; outputs of inference are on the host already.
        if self._given.Precision.floating_point_exceptions:
            for name, value in flatten(out):
                if isinstance(value, torch.Tensor) and not value.isfinite().all():
                    raise NonFiniteError(
                        f"Output {name or '0'} has NaN or Inf in it, and floating point exceptions are "
                        f"enabled (Precision.enableFloatingPointExceptions)."
                    )
        return out

    def copyWeightsToHost(self) -> None:
        """Copy buffers that forward has changed from the device into the module."""
        self.copy_weights_to_host()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Nothing to do: what a call changes is copied at its end."""
        return False

    def _steps(self) -> int:
        return self._program.calls

    def _set_steps(self, steps: int) -> None:
        self._program.seed, self._program.calls = self._seed, steps

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            super()._build(args, kwargs)
        except ReplicaError as error:
            raise ProgramError(
                f"PopTorch does not support broadcasting buffers: forward changes one on "
                f"{self._given.replication_factor} replicas, on each from other rows. Use one replica, "
                f"or return the value instead of keeping it in a buffer."
            ) from error

    def _copy_buffers(self, names: list[str]) -> None:
        _, buffers = weights_of(self.module)
        kept = {n: buffers[n] if n in names else v for n, v in self._program.buffers.items()}
        self._program.put(self._program.params, kept)

    def _names_in(self, catalogue: Catalogue, forward: Forward) -> Names:
        return Names(catalogue, forward.form.names)

    def _new_program(self, forward: Forward, params: Tree, buffers: Tree, taps: list[Any]) -> Any:
        stages = len(forward.devices)
        pipelined = self._given.execution_strategy.execution == "pipelined"
        # PopTorch's rule: a call of an inference model fills the pipeline, and each iteration is
        # one microbatch.
        if forward.spread and pipelined and self._options.device_iterations < stages:
            raise OptionError(
                f"poptorch.Options().deviceIterations must be greater than or equal to the number of "
                f"pipeline stages ({stages}) when running a poptorch.inferenceModel using "
                f"poptorch.PipelinedExecution."
            )
        return super()._new_program(forward, params, buffers, taps)


def trainingModel(
    model: torch.nn.Module,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a module for training on the device.

    Each call runs `deviceIterations` steps, in one program.

    Args:
        model: the module; its forward computes the loss.
        options: see `Options`.
        optimizer: None: `poptorch.optim.SGD` with a learning rate of 0.01.

    Raises:
        OptionError: options break a rule, or there are several processes.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> class Squares(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.tensor([2.0]))
    ...     def forward(self, x):
    ...         return poptorch.identity_loss((self.weight * x) ** 2, reduction="mean")
    >>> module = Squares()
    >>> optimizer = poptorch.optim.SGD(module.parameters(), lr=0.25)
    >>> model = poptorch.trainingModel(module, optimizer=optimizer)
    >>> model(torch.ones(4)).item()
    4.0
    >>> model.copyWeightsToHost()
    >>> module.weight.item()
    1.0
    """
    given = _options(options)
    if (processes := given.Distributed.numProcesses) > 1:
        raise OptionError(
            f"A training model runs in one process, because gradients are not exchanged between "
            f"several. Received: {processes} processes, from Distributed.configureProcessId or the "
            f"environment. Use replicas (replicationFactor) for the devices of this machine; "
            f"options.Distributed.disable() trains in each process by itself."
        )
    # A wrapped module may be wrapped again; it is unwrapped first.
    module = model.module if isinstance(model, Model) else model
    # A copy: the output mode is resolved for this model, and another may share the options.
    resolved = given.clone()
    if resolved.defaultOutputMode():
        resolved.outputMode(enums.OutputMode.Final)
    # PopTorch's rule: sums in float16 overflow, so a running mean is used unless it was chosen.
    accum = getattr(optimizer, "accum_type", None)
    strategy = resolved.Training.meanAccumulationAndReplicationReductionStrategy
    combined = getattr(optimizer, "use_combined_accum", False)
    if accum is torch.float16 and strategy is enums.MeanReductionStrategy.Post and not combined:
        resolved.Training.setMeanAccumulationAndReplicationReductionStrategy(
            enums.MeanReductionStrategy.Running
        )
    resolved.freeze()
    return _TrainingExecutor(module, resolved, optimizer)


def inferenceModel(
    model: torch.nn.Module | Model, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a module for running on the device.

    Args:
        model: the module, or a model made from it.
        options: see `Options`.

    Raises:
        OptionError: options break a rule; inference accumulates no gradients.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> model = poptorch.inferenceModel(torch.nn.ReLU())
    >>> model(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    given = _options(options)
    module = model.module if isinstance(model, Model) else model
    if given.Training.gradient_accumulation != 1:
        hint = ""
        if given.execution_strategy.execution == "pipelined":
            hint = " Use poptorch.Options().deviceIterations for more batches to a call."
        raise OptionError(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its "
            f"default value (1) when running a poptorch.inferenceModel().{hint}"
        )
    resolved = given.clone()
    if resolved.defaultOutputMode():
        resolved.outputMode(enums.OutputMode.All)
    resolved.freeze()
    return _InferenceExecutor(module, resolved)


def _options(options: Options | None) -> Options:
    if options is None:
        return Options()
    check_options(options)
    options.freeze()
    return options


def _grouped(
    name: str,
    comm_group_type: enums.CommGroupType,
    shards: int = 0,
    variable_retrieval_mode: enums.VariableRetrievalMode | None = None,
) -> None:
    """`parameter.replicaGrouping`: all replicas hold the same parameters here."""
    if comm_group_type is not enums.CommGroupType.All:
        raise OptionError(
            f"All replicas hold the same parameters: replicaGrouping takes "
            f"poptorch.CommGroupType.All. Received for {name}: {comm_group_type}. For values of its "
            f"own in each replica, give the parameter a leading dimension and choose by input."
        )


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], None] | None = None
) -> Any:
    """Refused: a file holds arrays, not the module's code. Wrap the module, then call its `load`.

    Args:
        filename: the file.
        edit_opts_fn: without effect.

    Raises:
        ProgramError: always.

    >>> from tailrace.compat import poptorch
    >>> poptorch.load("model.npz")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.errors.ProgramError: A saved model is a file of arrays, ...
    """
    raise ProgramError(
        f"A saved model is a file of arrays, so that reading one from elsewhere is safe; the module's "
        f"code is not in it. Make the module, wrap it, and call load({str(filename)!r}) on the result."
    )
