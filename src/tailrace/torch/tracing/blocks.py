"""Blocks: parts of a module that run on separate devices.

A block says which device what follows runs on. The forward pass is cut where the device (or the stage,
if stages are listed) changes; the order in which the module computes is what counts. Outside of a
wrapped model blocks do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.torch.errors import UsageError
from tailrace.torch.tracing.watch import Watch, current_watch

_ATTRIBUTE = "_tailrace_block"

Stages: TypeAlias = "str | Sequence[str | Sequence[str]]"
"""A rule by name, or the names of the blocks of each stage."""


class Block:
    """What is computed inside belongs to this block: `with tt.Block("encoder", 0): ...`.

    Args:
        name: the name of the block, for lists of stages.
        device: the index of its device.

    After the block no block is active, and everything that is computed must belong to one.

    >>> import tailrace.torch as tt
    >>> with tt.Block("encoder", device=0) as block:
    ...     pass
    >>> block.name, block.device
    ('encoder', 0)
    """

    def __init__(self, name: str | None = None, device: int | None = None) -> None:
        self.name, self.device = name, device

    def __enter__(self) -> Block:
        begin(self.name, self.device)
        return self

    def __exit__(self, *_: object) -> None:
        watch = current_watch()
        if watch is not None:
            watch.outside_of_blocks = True

    @classmethod
    def start(cls, name: str | None = None, device: int | None = None) -> None:
        """Begin a block that lasts until the next one begins."""
        begin(name, device)


class BlockFunction:
    """A decorator: each call of the function is a block.

    Args:
        name: the name of the block, for lists of stages.
        device: the index of its device.

    >>> import tailrace.torch as tt
    >>> double = tt.BlockFunction("double", device=1)(lambda x: 2 * x)
    >>> double(3)
    6
    """

    def __init__(self, name: str | None = None, device: int | None = None) -> None:
        self._name, self._device = name, device

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a block."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Block(self._name, self._device):
                return function(*args, **kwargs)

        return call


class _Begin:
    """A hook that begins a block before a module runs; an object, so that modules can be pickled."""

    def __init__(self, name: str | None, device: int | None) -> None:
        self.name, self.device = name, device

    def __call__(self, module: torch.nn.Module, args: Tree) -> None:
        begin(self.name, self.device)


class _Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def begin_block(module: torch.nn.Module, name: str | None = None, device: int | None = None) -> Any:
    """Begin a block wherever a module is called; returns the module.

    The block lasts until the next one begins. The names of parameters do not change. A function is
    wrapped in a module.

    Args:
        module: the module, or a function.
        name: the name of the block, for lists of stages.
        device: the index of its device.

    Raises:
        ProgramError: the module begins a block already.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = tt.BeginBlock(torch.nn.Linear(2, 2), "head", device=1)
    >>> tt.module_repr(layer)
    "Linear(in_features=2, out_features=2, bias=True)  [block 'head' on device 1]"
    """
    if not isinstance(module, torch.nn.Module):
        module = _Called(module)
    if hasattr(module, _ATTRIBUTE):
        raise ProgramError("module has already been assigned to a block.")
    hook = _Begin(name, device)
    # A hook and not a wrapper: names of parameters, and with them checkpoints, stay as they were.
    handle = module.register_forward_pre_hook(hook)
    module.__dict__[_ATTRIBUTE] = (hook, handle.id)
    return module


BeginBlock = begin_block


def remove_blocks(module: torch.nn.Module) -> None:
    """Remove all blocks that `tt.BeginBlock` put on a module and its submodules.

    Args:
        module: the module.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> module = torch.nn.Sequential(tt.BeginBlock(torch.nn.Linear(2, 2), "first", device=0))
    >>> tt.remove_blocks(module)
    >>> "block" in tt.module_repr(module)
    False
    """
    for inner in module.modules():
        found = inner.__dict__.pop(_ATTRIBUTE, None)
        if found is not None:
            inner._forward_pre_hooks.pop(found[1], None)


def module_repr(module: torch.nn.Module) -> str:
    """A module as text, with the blocks that begin in it.

    Args:
        module: the module.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> module = torch.nn.Sequential(tt.BeginBlock(torch.nn.ReLU(), "first", device=0))
    >>> print(tt.module_repr(module))
    Sequential(
      (0): ReLU()  [block 'first' on device 0]
    )
    """
    lines = repr(module).splitlines()
    blocks = {
        name.rsplit(".", 1)[-1]: inner.__dict__[_ATTRIBUTE][0]
        for name, inner in module.named_modules()
        if _ATTRIBUTE in inner.__dict__
    }
    for number, line in enumerate(lines):
        name = line.strip().split(":")[0].strip("()") if number else ""
        if name in blocks:
            hook = blocks[name]
            lines[number] = f"{line}  [block {hook.name!r} on device {hook.device}]"
    return "\n".join(lines)


class Staging:
    """Which stage and device a block belongs to.

    Args:
        stages: "device": what is on one device is one stage; "increment": each new block is the next
            stage; or a list with the names of the blocks of each stage.
        devices: the device of a stage, by number, where that is said apart from the blocks.
    """

    def __init__(self, stages: Stages = "device", devices: dict[int, int] | None = None) -> None:
        self.rule, self.devices = stages, devices or {}
        self._stage_of: dict[str, int] = {}
        if isinstance(stages, str):
            return
        for number, names in enumerate(stages):
            for name in [names] if isinstance(names, str) else names:
                if name in self._stage_of:
                    raise UsageError(f"Block {name!r} is associated with more than one stage.")
                self._stage_of[name] = number

    def place(self, name: str, device: int | None, seen: Sequence[Any]) -> tuple[Any, int]:
        """(stage, device) of a block, after `seen` [(stage, device), ...]."""
        if self.rule == "device":
            if device is None:
                raise UsageError(
                    f"Block {name!r} has no device, and stages are identified by their devices. Give "
                    f"it one: tt.Block({name!r}, device=1), or use stages='increment'."
                )
            return ("device", device), device
        if self.rule == "increment":
            known = {stage: device for stage, device in seen}
            stage = ("block", name)
            # A block of a known name goes on in its stage; a new one is on the next device.
            default = known.get(stage, len(known))
            return stage, default if device is None else device
        if name not in self._stage_of:
            raise UsageError(
                f"Unknown Block {name!r} list of expected Blocks: {list(self._stage_of)}"
            )
        stage = self._stage_of[name]
        return stage, self.devices.get(stage, stage if device is None else device)


def begin(name: str | None, device: int | None) -> None:
    """Begin a block here, if a forward pass is being traced."""
    watch = current_watch()
    if watch is None:
        return
    watch.outside_of_blocks = False
    if name is None:
        name = str(watch.blocks)
    watch.blocks += 1
    place = watch.staging.place(name, device, watch.stages)
    # Consecutive blocks of one stage are one stretch: a cut between them would be a stage of its own.
    if watch.stages and watch.stages[-1][0] == place[0]:
        return  # the same stage goes on, on its device
    if watch.latest is None:  # nothing was computed before: this is where everything begins
        watch.stages[:] = [place]
        return
    # Something was computed before the first block: it is a stretch too.
    if not watch.stages:
        watch.stages.append(first_place(watch))
        if watch.stages[-1][0] == place[0]:
            return
    watch.stages.append(place)
    _cut(watch)


def first_place(watch: Watch) -> tuple[Any, int]:
    """The device of everything before the first block: the first device."""
    return (("device", 0) if watch.staging.rule == "device" else ("start", 0)), 0


def _cut(watch: Watch) -> None:
    from tailrace.pipeline.boundary import stage_boundary

    latest = watch.latest
    # The latest tensor alone: what else crosses is found by its use.
    marked = stage_boundary(latest.jax())
    if hasattr(latest, "_elem"):
        # In place: whoever holds the tensor gets the marked value, which must be the one that is
        # used.
        latest._elem = marked


def recomputation_checkpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass of a pipeline that computes activations again.

    Returns its argument: a tensor, several as a tuple, or a list or tuple of them.

    Raises:
        ProgramError: something given is not a tensor.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> tt.recomputation_checkpoint(torch.ones(2))
    tensor([1., 1.])
    """
    from tailrace.pipeline.lowering.forward_backward import recomputation_checkpoint as keep
    from tailrace.torch.calls.containers import flatten, rebuild
    from tailrace.torch.tracing.watch import is_traced

    watch = current_watch()
    given = tensors[0] if len(tensors) == 1 else tensors
    for _, leaf in flatten(given):
        if not isinstance(leaf, torch.Tensor):
            raise ProgramError(
                f"recomputation_checkpoint keeps tensors. Received: {type(leaf).__name__}."
            )
    if watch is None:
        return given
    return rebuild(given, lambda t: watch.tensor(keep(t.jax())) if is_traced(t) else t)
