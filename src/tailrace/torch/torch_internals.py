"""Everything this front end relies on in PyTorch and torchax beyond their public interfaces.

Both are pinned (see `torchax.versions`); the probes detect changes in a patched or rebuilt release.
They run once, when torchax is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata

import torch

from tailrace.base.seams import Package, Seam
from tailrace.errors import VersionError


def check(tested: str) -> None:
    """Raise a `VersionError` if a seam has changed; `tested` names the supported versions."""
    for package, seams in packages():
        try:
            package.check(seams)
        except VersionError as error:
            raise VersionError(f"{error} {tested}") from None


def packages() -> tuple[tuple[Package, tuple[Seam, ...]], ...]:
    """Both packages, with what is relied on in each."""
    torchax = importlib.metadata.version("torchax")
    return (
        (Package("PyTorch", "torch", torch.__version__, "2.13.0"), TORCH),
        (Package("torchax", "torchax", torchax, "0.0.13"), TORCHAX),
    )


def _has(owner: object, *names: str) -> bool:
    return all(hasattr(owner, name) for name in names)


def _packets() -> bool:
    packet = torch.ops.aten.add
    return _has(type(packet), "__getattr__") and _has(packet.Tensor, "_overloadname", "_schema")


def _torchax(module: str, *names: str) -> bool:
    return _has(importlib.import_module(f"torchax.{module}"), *names)


TORCH = (
    Seam("the form of operations", "the import of torchax", _packets),
    Seam(
        "the registration of devices",
        "the import of torchax",
        lambda: (
            _has(torch, "_register_device_module")
            and _has(torch.utils, "rename_privateuse1_backend")
        ),
    ),
    Seam(
        "the switch of torch functions",
        "tracing modules",
        lambda: _has(torch._C, "DisableTorchFunction"),
    ),
    Seam(
        "the hooks of modules",
        "names and backward hooks",
        lambda: _has(
            torch.nn.Module(),
            *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
        ),
    ),
    Seam(
        "the descriptor of gradients",
        "messages about .grad",
        lambda: _has(torch.Tensor.grad, "__get__", "__set__", "__delete__"),
    ),
    Seam(
        "the count of writes to a tensor",
        "the note about weights changed on the host",
        lambda: _has(torch.zeros(()), "_version"),
    ),
    Seam(
        "the class of custom functions",
        "torch.autograd.Function",
        lambda: _has(torch.autograd.function, "_SingleLevelFunction"),
    ),
)

TORCHAX = (
    Seam(
        "the environment of operations",
        "every module",
        lambda: _has(
            importlib.import_module("torchax.tensor").Environment, "load_ops", "_get_op_or_decomp"
        ),
    ),
    Seam(
        "the registry of operations",
        "operations of our own",
        lambda: _torchax("ops.ops_registry", "Operator"),
    ),
    Seam("the class of tensors", "every module", lambda: _torchax("tensor", "Tensor")),
    Seam("the class of views", "views", lambda: _torchax("view", "View")),
    Seam(
        "writes by a mask",
        "x[mask] = value",
        lambda: _torchax("ops.jaten", "_shape_static_boolean_index_put"),
    ),
)
