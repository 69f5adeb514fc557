"""`poptorch` on PyTorch itself: a loop over microbatches, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from typing import Any

import torch

from benchmarks.originals.plain.anything import Anything
from benchmarks.originals.reports import loss_of, report


class OutputMode:
    """Which results a call returns."""

    Final, All, Sum, EveryN, Default = "final", "all", "sum", "every", "default"


class Options(Anything):
    """The options that change what is computed; others have no effect."""

    def __init__(self) -> None:
        self.iterations = self.replicas = self.accumulation = 1
        self.mode = OutputMode.Default
        self.anchors: dict[str, str] = {}

    def deviceIterations(self, count: int) -> Options:
        """Weight updates of one call."""
        self.iterations = count
        return self

    def replicationFactor(self, count: int) -> Options:
        """Their microbatches count like accumulated ones."""
        self.replicas = count
        return self

    def outputMode(self, mode: str, *_: Any) -> Options:
        """Which results a call returns."""
        self.mode = mode
        return self

    def anchorTensor(self, short: str, long: str, *_: Any, **__: Any) -> Options:
        """Gradients of parameters can be asked for."""
        self.anchors[short] = long.removeprefix("Gradient___")
        return self

    def gradientAccumulation(self, count: int) -> Options:
        """`options.Training.gradientAccumulation`: every attribute is the options themselves."""
        self.accumulation = count
        return self

    def clone(self) -> Options:
        """A copy."""
        return copy.copy(self)

    @property
    def pieces(self) -> int:
        """Microbatches of one call."""
        return self.iterations * self.replicas * self.accumulation


class DataLoader(torch.utils.data.DataLoader):
    """PyTorch's loader, with all rows of a call in a batch."""

    def __init__(self, options: Options, dataset: Any, batch_size: int = 1, **kwargs: Any) -> None:
        workers = kwargs.get("num_workers", 0)
        super().__init__(
            dataset,
            batch_size * options.pieces,
            shuffle=kwargs.get("shuffle"),
            drop_last=kwargs.get("drop_last", True),
            num_workers=workers,
            collate_fn=kwargs.get("collate_fn"),
            persistent_workers=workers > 0,  # as in the original; the order depends on it
        )

    def terminate(self) -> None:
        """Nothing runs."""


class _Model:
    def __init__(self, model: Any, options: Options | None) -> None:
        self.model, self.options = model, options or Options()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def getTensorNames(self) -> list[str]:
        """The names of gradients."""
        return [f"Gradient___{name}" for name, _ in self.model.named_parameters()]

    def getAnchoredTensor(self, short: str) -> Any:
        """The gradient of a parameter in the last update."""
        return dict(self.model.named_parameters())[self.options.anchors[short]].grad

    def _parts(self, args: Any, count: int) -> list[Any]:
        return list(zip(*(arg.chunk(count) for arg in args), strict=True))


class _Training(_Model):
    def __init__(self, model: Any, options: Options | None, optimizer: Any) -> None:
        super().__init__(model, options)
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        self.scaling = getattr(self.optimizer, "loss_scaling", 1.0)

    def _update(self) -> None:
        """A step of the optimizer: in float32, as the original's, also of weights in half precision."""
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        changed = [(p, p.dtype) for p in given if p.grad is not None]
        for parameter, _ in changed:
            grad = parameter.grad.float() / self.scaling
            parameter.data = parameter.data.float()
            parameter.grad = grad
        self.optimizer.step()
        for parameter, dtype in changed:
            grad, parameter.data = parameter.grad, parameter.data.to(dtype)
            parameter.grad = grad.to(dtype)

    def __call__(self, *args: Any) -> Any:
        self.model.train()
        each = self.options.pieces // self.options.iterations
        results = []
        for start, part in enumerate(self._parts(args, self.options.pieces)):
            if start % each == 0:
                self.optimizer.zero_grad()
            _marked.clear()
            out = self.model(*part)
            (_loss(out) * self.scaling / each).backward()
            results.append(_detached(out))
            if start % each == each - 1:
                self._update()
        kept = results if self.options.mode == OutputMode.All else results[-self.options.replicas :]
        whole = _joined(kept)
        report("loss", loss_of(whole))
        return whole


class _Inference(_Model):
    def __call__(self, *args: Any, **same: Any) -> Any:
        self.model.eval()
        with torch.no_grad():
            parts = self._parts(args, min(self.options.pieces, len(args[0])))
            whole = _joined([self.model(*part, **same) for part in parts])
        report("output", whole)
        return whole


def trainingModel(model: Any, options: Any = None, optimizer: Any = None) -> Any:
    """A loop that trains a module."""
    return _Training(model, options, optimizer)


def inferenceModel(model: Any, options: Any = None) -> Any:
    """A module that is only called."""
    return _Inference(model, options)


def AsynchronousDataAccessor(loader: Any, *_: Any, **__: Any) -> Any:
    """The loader itself."""
    return loader


def identity_loss(loss: Any, reduction: str) -> Any:
    """The loss itself, reduced."""
    reduced = {"none": lambda: loss, "mean": loss.mean, "sum": loss.sum}[reduction]()
    _marked[:] = [reduced]
    return reduced


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The tensors."""
    return tensors[0] if len(tensors) == 1 else tensors


def ipu_print_tensor(tensor: Any, *_: Any) -> Any:
    """The tensor."""
    return tensor


def BeginBlock(layer_to_call: Any, *_: Any, **__: Any) -> Any:
    """The layer."""
    return layer_to_call


def Block(*_: Any, **__: Any) -> Any:
    """Nothing."""
    return contextlib.nullcontext()


MultiConv = Block
DataLoaderMode = Stage = PipelinedExecution = ShardedExecution = Anything()
TensorLocationSettings = setLogLevel = AutoStage = ConnectionType = Anything()


def _optimizer(kind: Any) -> Any:
    known = inspect.signature(kind).parameters

    def made(*args: Any, **kwargs: Any) -> Any:
        found = kind(*args, **{key: value for key, value in kwargs.items() if key in known})
        found.loss_scaling = kwargs.get("loss_scaling", 1.0)
        return found

    return made


optim = types.SimpleNamespace(
    **{name: _optimizer(getattr(torch.optim, name)) for name in ("SGD", "Adam", "AdamW", "RMSprop")}
)


_marked: list[Any] = []
"""The loss of the last forward pass, if it was named by `identity_loss`."""


def _loss(out: Any) -> Any:
    if _marked:
        return _marked[0].mean()
    return (out[-1] if isinstance(out, tuple | list) else out).mean()


def _detached(out: Any) -> Any:
    if isinstance(out, tuple | list):
        return tuple(_detached(one) for one in out)
    return out.detach()


def _joined(results: list[Any]) -> Any:
    if isinstance(results[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*results, strict=True))
    return torch.cat([one.reshape(1) if one.dim() == 0 else one for one in results])
