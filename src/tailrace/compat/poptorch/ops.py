"""Operations and annotations of the original that modules call in their forward.

Long, and one thing: a table of short functions, each described for the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from tailrace.base.array_like import TensorLike
from tailrace.compat.originals.missing import missing_from
from tailrace.compat.poptorch import enums
from tailrace.compat.poptorch.settings.containers import noted
from tailrace.errors import OptionError, ProgramError
from tailrace.torch.tracing import blocks
from tailrace.torch.tracing.printing import print_tensor
from tailrace.torch.tracing.watch import current_watch, is_traced

ipu_print_tensor = print_tensor
removeBlocks = blocks.remove_blocks
module_repr = blocks.module_repr


class Block(blocks.Block):
    """What is computed inside belongs to this block: `with poptorch.Block("encoder", ipu_id=0): ...`.

    Args:
        user_id: the name of the block, for stages that list blocks by name.
        ipu_id: the number of the device that it runs on.

    >>> from tailrace.compat import poptorch
    >>> with poptorch.Block("encoder", ipu_id=0) as block:
    ...     pass
    >>> block.name, block.device
    ('encoder', 0)
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(user_id, ipu_id)

    @classmethod
    def start(  # type: ignore[override]
        cls, user_id: str | None = None, ipu_id: int | None = None
    ) -> None:
        """Begin a block that lasts until the next one begins.

        Args:
            user_id: the name of the block.
            ipu_id: the number of the device that it runs on.
        """
        blocks.begin(user_id, ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from 0 in each forward pass; they always are here."""


class BlockFunction(blocks.BlockFunction):
    """A decorator: each call of the function is a block.

    Args:
        user_id: the name of the block.
        ipu_id: the number of the device that it runs on.

    >>> from tailrace.compat import poptorch
    >>> @poptorch.BlockFunction("double", ipu_id=1)
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(user_id, ipu_id)


def BeginBlock(
    layer_to_call: torch.nn.Module,
    user_id: str | None = None,
    ipu_id: int | None = None,
) -> Any:
    """Begin a block where a module is called; returns the module.

    Args:
        layer_to_call: the module, or a function, which gets a module around it.
        user_id: the name of the block.
        ipu_id: the number of the device that it runs on.

    Raises:
        ProgramError: a block begins there already.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> layer = poptorch.BeginBlock(torch.nn.ReLU(), "first", ipu_id=0)
    >>> print(poptorch.module_repr(torch.nn.Sequential(layer)))
    Sequential(
      (0): ReLU()  [block 'first' on device 0]
    )
    """
    return blocks.begin_block(layer_to_call, user_id, ipu_id)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass of a pipeline that recomputes activations.

    Args:
        *tensors: tensors, or one list or tuple of them.

    Returns:
        The same tensors; go on with them.

    Raises:
        OptionError: an argument is not a tensor, nor a list or tuple of them.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.recomputationCheckpoint(torch.ones(2))
    tensor([1., 1.])
    """
    # Both spellings of the original: several tensors, or one list of them.
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    if not all(isinstance(t, torch.Tensor) for t in given):
        raise OptionError("recomputationCheckpoint takes tensors, or a list or tuple of them")
    return blocks.recomputation_checkpoint(*tensors)


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself.

    Args:
        tensor: the tensor.

    Raises:
        ProgramError: it is not a tensor.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.nop(torch.ones(2))
    tensor([1., 1.])
    """
    _need_tensor("nop", tensor)
    return tensor


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """The tensor itself; the rest is for the IPU only.

    Args:
        tensor: the tensor.
        available_memory_proportion: noted.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.set_available_memory(torch.ones(2), 0.3)
    tensor([1., 1.])
    """
    noted("set_available_memory")
    return tensor


def set_overlap_for_input(input_tensors: Sequence[Any], mode: enums.OverlapMode) -> Any:
    """The tensors themselves: input overlaps with computation by itself here.

    Args:
        input_tensors: the tensors.
        mode: an `OverlapMode`; noted.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> mode = poptorch.OverlapMode.OverlapAccumulationLoop
    >>> poptorch.set_overlap_for_input(torch.ones(2), mode)
    tensor([1., 1.])
    """
    noted("set_overlap_for_input")
    return input_tensors


def set_overlap_for_output(output_tensors: Sequence[Any], mode: enums.OverlapMode) -> Any:
    """The tensors themselves: output overlaps with computation by itself here.

    Args:
        output_tensors: the tensors.
        mode: an `OverlapMode`; noted.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.set_overlap_for_output(torch.ones(2), poptorch.OverlapMode.NoOverlap)
    tensor([1., 1.])
    """
    noted("set_overlap_for_output")
    return output_tensors


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """The matrix product, computed at once; the original computed it in pieces.

    Args:
        lhs: the left matrix.
        rhs: the right matrix.
        mode: a `MatMulSerializationMode`; noted.
        factor: in how many pieces; noted.
        keep_precision: without effect.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> mode = poptorch.MatMulSerializationMode.ReducingDim
    >>> poptorch.serializedMatMul(torch.ones(1, 2), torch.ones(2, 1), mode, factor=2)
    tensor([[2.]])
    """
    noted("serializedMatMul")
    return torch.matmul(lhs, rhs)


def for_loop(count: int, body: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    """`body(*inputs)`, applied `count` times to what it returned before; inference only.

    Args:
        count: how many times.
        body: a function of tensors that returns as many.
        inputs: a list of tensors.

    Returns:
        A list of what the last pass returned.

    Raises:
        OptionError: `inputs` is not a list of tensors.
        ProgramError: the body returns another number of tensors.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.for_loop(3, lambda x: x * 2, [torch.ones(1)])
    [tensor([8.])]
    """
    if not isinstance(inputs, list):
        raise OptionError("poptorch.for_loop() takes a list of inputs. (Object is not list)")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise OptionError(f"Object contained in list at index {index} is not torch.tensor")
    watch = current_watch()
    # Outside a wrapped model PyTorch runs it, pass by pass.
    if watch is None:
        for _ in range(count):
            out = body(*inputs)
            inputs = list(out) if isinstance(out, tuple | list) else [out]
        return inputs

    def one(_: object, values: list[Any]) -> list[Any]:
        out = body(*map(watch.tensor, values))
        out = list(out) if isinstance(out, tuple | list) else [out]
        if len(out) != len(values):
            raise ProgramError(
                f"The body of for_loop returns as many tensors as it gets, {len(values)}. It "
                f"returned {len(out)}."
            )
        # A loop of the program keeps its types; PyTorch's promotion in the body may have widened one.
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
    """Run one of two functions; which one is decided on the device while the model runs.

    Args:
        condition: a tensor with one boolean.
        then_body: the function for True.
        then_inps: a list of its tensors.
        else_body: the function for False.
        else_inps: a list of its tensors.

    Returns:
        A list of what the function returned.

    Raises:
        OptionError: inputs are not lists.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> x = torch.ones(1)
    >>> poptorch.cond(x > 0, lambda x: x + 1, [x], lambda x: x - 1, [x])
    [tensor([2.])]
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise OptionError("poptorch.cond() takes lists of inputs. (Object is not list)")
    watch = current_watch()
    # A condition that is known chooses now, as Python's `if` does.
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
        # By closure, not as operands: the branches may take different inputs.
        lambda: branch(then_body)(chosen[0]),
        lambda: branch(else_body)(chosen[1]),
    )
    return [watch.tensor(v) for v in out]


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int = 1
) -> torch.Tensor:
    """`size` entries of a dimension, beginning at a place that is computed on the device.

    Args:
        tensor: the tensor.
        dim: the dimension.
        start: a tensor with the first index.
        size: how many entries the slice spans.
        step: the distance between entries.

    Raises:
        ProgramError: `tensor` or `start` is not a tensor.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> poptorch.dynamic_slice(torch.arange(5), 0, torch.tensor(2), 3)
    tensor([2, 3, 4])
    """
    _need_tensor("dynamic_slice", tensor)
    _need_tensor("dynamic_slice", start)
    # Indices instead of a slice: PyTorch has no slice that begins at a tensor.
    index = start.reshape(()).long() + torch.arange(0, size, step, device=tensor.device)
    return tensor.index_select(dim, index)


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """A copy of `input` with `size` entries of a dimension replaced by `src`.

    Args:
        input: the tensor.
        src: the new entries.
        dim: the dimension.
        start: a tensor with the first index.
        size: how many entries are replaced.

    Raises:
        ProgramError: an argument is not a tensor.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> new = torch.tensor([8, 9])
    >>> poptorch.dynamic_update(torch.arange(5), new, 0, torch.tensor(2), 2)
    tensor([0, 1, 8, 9, 4])
    """
    for value in (input, src, start):
        _need_tensor("dynamic_update", value)
    index = start.reshape(()).long() + torch.arange(size, device=input.device)
    return input.index_copy(dim, index, src)


class NameScope:
    """A name for the operations inside: part of the names of their tensors.

    Args:
        name: the name.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> with poptorch.NameScope("scores"):
    ...     torch.ones(1) + 1
    tensor([2.])
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> NameScope:
        # Only while a module is traced: outside, the operations are PyTorch's own.
        self._scope: Any = jax.named_scope(self._name) if current_watch() else None
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
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
    """Convolutions that the IPU planned together; here the compiler plans them. Noted once.

    >>> from tailrace.compat import poptorch
    >>> with poptorch.MultiConv():
    ...     pass
    """

    def availableMemoryProportions(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self

    def partialsTypes(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self

    def planType(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self

    def enableConvDithering(self, value: TensorLike) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """IPU only: accepted, without effect.

        Args:
            value: without effect.
        """
        return self


class Attribute(_Scope):
    """Attributes of the operations inside, for the original's compiler. Noted once, without effect.

    >>> from tailrace.compat import poptorch
    >>> with poptorch.Attribute(name="value"):
    ...     pass
    """


def isRunningOnIpu() -> bool:
    """Whether the module is being traced for the device.

    >>> from tailrace.compat import poptorch
    >>> poptorch.isRunningOnIpu()
    False
    """
    # Programs choose their code for the device by it, and it must be in the trace.
    return current_watch() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Always False: there is no IPU. Models run on the devices that JAX finds.

    Args:
        num_ipus: without effect.

    >>> from tailrace.compat import poptorch
    >>> poptorch.ipuHardwareIsAvailable()
    False
    """
    return False


def ipuHardwareVersion() -> int:
    """Always 0: there is no IPU.

    >>> from tailrace.compat import poptorch
    >>> poptorch.ipuHardwareVersion()
    0
    """
    return 0


class CPU:
    """Refused: a function that runs on the host in the middle of a model.

    Call the function in forward, where it is compiled with the rest, or on the host before or after.

    Args:
        layer_to_call: the function.
        ID: its name.

    Raises:
        ProgramError: always.

    >>> from tailrace.compat import poptorch
    >>> poptorch.CPU(print, "show")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.errors.ProgramError: poptorch.CPU runs a function on the host ...
    """

    def __init__(self, layer_to_call: torch.nn.Module, ID: str) -> None:
        raise ProgramError(
            f"poptorch.CPU runs a function on the host in the middle of a model, which would stop the "
            f"device in each microbatch. Received: {ID!r}. Call the function in forward, where it is "
            f"compiled with the rest, or on the host before or after the call."
        )


def custom_op(*_: Any, **__: Any) -> Any:
    """Refused: an operation compiled for the IPU. Write it with PyTorch's operations, or in JAX.

    Args:
        *_: without effect.
        **__: without effect.

    Raises:
        ProgramError: always.

    >>> from tailrace.compat import poptorch
    >>> poptorch.custom_op()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.errors.ProgramError: custom_op runs code that is compiled for the IPU. ...
    """
    raise ProgramError(
        "custom_op runs code that is compiled for the IPU. Write the operation with PyTorch's own, "
        "or in JAX."
    )


def ctc_beam_search_decoder(*_: Any, **__: Any) -> Any:
    """Refused: decode on the host.

    Args:
        *_: without effect.
        **__: without effect.

    Raises:
        ProgramError: always.

    >>> from tailrace.compat import poptorch
    >>> poptorch.ctc_beam_search_decoder()
    Traceback (most recent call last):
    ...
    tailrace.errors.ProgramError: ctc_beam_search_decoder is not available. Decode on the host.
    """
    raise ProgramError("ctc_beam_search_decoder is not available. Decode on the host.")


def setLogLevel(level: str | int) -> None:
    """Without effect beyond a check: the logger is Python's, `logging.getLogger("tailrace")`.

    Args:
        level: "TRACE", "TRACE_ALL", "DEBUG", "DEBUG_IR", "INFO", "WARN", "ERR", "OFF", or a number.

    Raises:
        ValueError: there is no such level.

    >>> from tailrace.compat import poptorch
    >>> poptorch.setLogLevel("WARN")
    """
    names = ("TRACE", "TRACE_ALL", "DEBUG", "DEBUG_IR", "INFO", "WARN", "ERR", "OFF")
    if isinstance(level, str) and level not in names:
        raise ValueError(f"Unknown log level {level!r}. Valid: {', '.join(names)}")
    noted("setLogLevel")


class Channel:
    """Tracepoints of the original's profiler; nothing is recorded here. `tr.trace` draws timelines.

    Args:
        name: the name of the channel.

    >>> from tailrace.compat import poptorch
    >>> channel = poptorch.profiling.Channel("training")
    >>> with channel.tracepoint("step"):
    ...     pass
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def tracepoint(self, label: str) -> Any:
        """A context in which nothing is recorded.

        Args:
            label: the name of the tracepoint.
        """
        return contextlib.nullcontext()

    def instrument(self, obj: object, *methods: str) -> Any:
        """The object itself.

        Args:
            obj: the object.
            *methods: names of its methods.
        """
        return obj


def _need_tensor(name: str, value: TensorLike) -> None:
    if not isinstance(value, torch.Tensor):
        raise ProgramError(f"{name} takes a tensor. Received: {type(value).__name__}.")


__getattr__, __dir__ = missing_from(__name__)
