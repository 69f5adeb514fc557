"""Operations and annotations of the original that modules call in their forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from tailrace.compat.originals.missing import missing_from
from tailrace.compat.poptorch.settings.containers import noted
from tailrace.data.array_like import TensorLike
from tailrace.errors import OptionError, ProgramError
from tailrace.torch.tracing import blocks
from tailrace.torch.tracing.printing import print_tensor
from tailrace.torch.tracing.watch import current_watch, is_traced

ipu_print_tensor = print_tensor
removeBlocks = blocks.remove_blocks
module_repr = blocks.module_repr


class Block(blocks.Block):
    """What is computed inside belongs to this block."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(user_id, ipu_id)

    @classmethod
    def start(  # type: ignore[override]
        cls, user_id: str | None = None, ipu_id: int | None = None
    ) -> None:
        """Begin a block that lasts until the next one begins."""
        blocks.begin(user_id, ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from 0 in each forward pass; they always are here."""


class BlockFunction(blocks.BlockFunction):
    """A decorator: each call of the function is a block."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(user_id, ipu_id)


def BeginBlock(
    layer_to_call: torch.nn.Module,
    user_id: str | None = None,
    ipu_id: int | None = None,
) -> Any:
    """Let a block begin where a module is called; returns the module."""
    return blocks.begin_block(layer_to_call, user_id, ipu_id)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass of a pipeline that computes activations again.

    Raises:
        OptionError: an argument is not a tensor, nor a list or tuple of them.
    """
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    if not all(isinstance(t, torch.Tensor) for t in given):
        raise OptionError("recomputationCheckpoint takes tensors, or a list or tuple of them")
    return blocks.recomputation_checkpoint(*tensors)


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    _need_tensor("nop", tensor)
    return tensor


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the tensor; the rest is for the IPU only."""
    noted("set_available_memory")
    return tensor


def set_overlap_for_input(input_tensors: Sequence[Any], mode: Any) -> Any:
    """Return the argument; the rest is for the IPU only."""
    noted("set_overlap_for_input")
    return input_tensors


def set_overlap_for_output(output_tensors: Sequence[Any], mode: Any) -> Any:
    """Return the argument; the rest is for the IPU only."""
    noted("set_overlap_for_output")
    return output_tensors


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: Any, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Return the matrix product; how it is split matters on an IPU only."""
    noted("serializedMatMul")
    return torch.matmul(lhs, rhs)


def for_loop(count: int, body: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    """`body(*inputs)`, again and again, `count` times; inference only.

    Raises:
        OptionError: `inputs` is not a list of tensors.
    """
    if not isinstance(inputs, list):
        raise OptionError("poptorch.for_loop() takes a list of inputs. (Object is not list)")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise OptionError(f"Object contained in list at index {index} is not torch.tensor")
    watch = current_watch()
    if watch is None:
        for _ in range(count):
            out = body(*inputs)
            inputs = list(out) if isinstance(out, tuple | list) else [out]
        return inputs

    def one(_: Any, values: list[Any]) -> list[Any]:
        out = body(*map(watch.tensor, values))
        out = list(out) if isinstance(out, tuple | list) else [out]
        if len(out) != len(values):
            raise ProgramError(
                f"The body of for_loop returns as many tensors as it gets, {len(values)}. It "
                f"returned {len(out)}."
            )
        return [t.jax().astype(v.dtype) for t, v in zip(out, values, strict=True)]

    start: list[Any] = [t.jax() for t in inputs]  # type: ignore[attr-defined]
    return [watch.tensor(v) for v in jax.lax.fori_loop(0, count, one, start)]


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[Any]:
    """Run one of two functions, as the condition says while the model runs.

    Raises:
        OptionError: inputs are not lists.
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise OptionError("poptorch.cond() takes lists of inputs. (Object is not list)")
    watch = current_watch()
    if watch is None or not is_traced(condition):
        body, inps = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        out = body(*inps)
        return list(out) if isinstance(out, tuple | list) else [out]

    def branch(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(values: list[Any]) -> list[Any]:
            out = body(*map(watch.tensor, values))
            return [t.jax() for t in (out if isinstance(out, tuple | list) else [out])]

        return run

    flag: Any = condition
    chosen: list[list[Any]] = [[t.jax() for t in inps] for inps in (then_inps, else_inps)]  # type: ignore[attr-defined]
    out = jax.lax.cond(
        flag.jax().reshape(()).astype(bool),
        lambda: branch(then_body)(chosen[0]),
        lambda: branch(else_body)(chosen[1]),
    )
    return [watch.tensor(v) for v in out]


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int = 1
) -> torch.Tensor:
    """`size` entries of a dim, from a place that a tensor says."""
    _need_tensor("dynamic_slice", tensor)
    _need_tensor("dynamic_slice", start)
    index = start.reshape(()).long() + torch.arange(0, size, step, device=tensor.device)
    return tensor.index_select(dim, index)


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """A copy of `input` with `size` entries of a dim replaced by `src`."""
    for value in (input, src, start):
        _need_tensor("dynamic_update", value)
    index = start.reshape(()).long() + torch.arange(size, device=input.device)
    return input.index_copy(dim, index, src)


class NameScope:
    """A name around operations: part of the names of their tensors."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> NameScope:
        self._scope: Any = jax.named_scope(self._name) if current_watch() else None
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._scope is not None:
            self._scope.__exit__(*exc)


class _Scope:
    def __init__(self, *_: Any, **__: Any) -> None:
        noted(type(self).__name__)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MultiConv(_Scope):
    """Convolutions that the IPU plans together."""

    def availableMemoryProportions(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self

    def partialsTypes(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self

    def planType(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self

    def enableConvDithering(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """IPU only: accepted, without effect."""
        return self


class Attribute(_Scope):
    """Attributes of operations, for a compiler that is not here."""


def isRunningOnIpu() -> bool:
    """Whether the module is being traced for the device."""
    return current_watch() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """False: there is no IPU. Models run on the devices that JAX finds."""
    return False


def ipuHardwareVersion() -> int:
    """0: there is no IPU."""
    return 0


class CPU:
    """Refused: a function that runs on the host in the middle of a model."""

    def __init__(self, layer_to_call: torch.nn.Module, ID: str) -> None:
        raise ProgramError(
            f"poptorch.CPU runs a function on the host in the middle of a model, which would stop the "
            f"device in each microbatch. Received: {ID!r}. Call the function in forward, where it is "
            f"compiled with the rest, or on the host before or after the call."
        )


def custom_op(*_: Any, **__: Any) -> Any:
    """Refused: an operation compiled for the IPU."""
    raise ProgramError(
        "custom_op runs code that is compiled for the IPU. Write the operation with PyTorch's own, "
        "or in JAX."
    )


def ctc_beam_search_decoder(*_: Any, **__: Any) -> Any:
    """Refused: not available."""
    raise ProgramError("ctc_beam_search_decoder is not available. Decode on the host.")


def setLogLevel(level: str | int) -> None:
    """Set how much the original logged; the standard logger `tailrace` is what there is here."""
    names = ("TRACE", "TRACE_ALL", "DEBUG", "DEBUG_IR", "INFO", "WARN", "ERR", "OFF")
    if isinstance(level, str) and level not in names:
        raise ValueError(f"Unknown log level {level!r}. Valid: {', '.join(names)}")
    noted("setLogLevel")


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class Channel:
    """`poptorch.profiling.Channel`: tracepoints of a tool that is not here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tracepoint(self, label: str) -> Any:
        """Nothing is recorded."""
        return _nothing()

    def instrument(self, obj: object, *methods: str) -> Any:
        """The object itself."""
        return obj


def _need_tensor(name: str, value: TensorLike) -> None:
    if not isinstance(value, torch.Tensor):
        raise ProgramError(f"{name} takes a tensor. Received: {type(value).__name__}.")


__getattr__, __dir__ = missing_from(__name__)
