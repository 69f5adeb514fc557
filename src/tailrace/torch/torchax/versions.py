"""Which PyTorch and which torchax go together, and the import of torchax.

torchax 0.0.13 names overloads of ATen operations that newer PyTorch releases no longer have (those
for named tensors). While it is imported, and only then, a missing overload is answered with a
placeholder: an entry in a table that no operation ever looks up. Everything else that importing it
changes in the process (logging, environment, JAX options, PyTorch's attention fast path, a device
of its own) is put back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from typing import Any

from tailrace.errors import MissingDependency, OptionError

TORCH = ((2, 11), (2, 14))
"""PyTorch: from, and below."""

TORCHAX = ((0, 0, 13), (0, 0, 14))
"""torchax: from, and below. It is young, and each release moves what we stand on."""


class _NoOverload:
    """Stands for an overload that this PyTorch does not have; equal to nothing but itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<no overload {self.name}>"


@functools.cache
def environment() -> Any:
    """torchax's environment, in which PyTorch's operations become JAX's.

    Late, on the first model that is traced: making it starts JAX, after which devices can no longer
    be chosen.
    """
    check_installed()
    with _placeholders(), _side_effects_undone():
        torchax = importlib.import_module("torchax")
        importlib.import_module("tailrace.torch.torch_internals").check(together())
        device = property(lambda _: unnamed_device())
        for kind in (torchax.tensor.Tensor, importlib.import_module("torchax.view").View):
            kind.device = device  # they ask for it by the name that it did not get
            kind.requires_grad = property(_has_gradient, _give_gradient)
        return importlib.import_module("tailrace.torch.torchax.environment").make_environment()


def _has_gradient(tensor: Any) -> bool:
    """Whether PyTorch would differentiate by a tensor. Said by us: JAX differentiates here."""
    return vars(tensor).get("_has_gradient", False)


def _give_gradient(tensor: Any, flag: bool) -> None:
    tensor._has_gradient = flag


def unnamed_device() -> Any:
    """The device that torchax's tensors say they are on."""
    import torch

    return torch.device("privateuseone:0")


def check_installed() -> None:
    """Refuse to go on if PyTorch or torchax is missing, or the two do not go together."""
    check_pair(_version("torch"), _version("torchax"))


def check_pair(torch: str | None, torchax: str | None) -> None:
    """Refuse a pair of versions that is not known to work.

    >>> check_pair("2.13.0+cpu", "0.0.13")
    """
    if torch is None:
        raise MissingDependency.for_feature("tailrace.torch", "torch", "torch")
    if torchax is None:
        raise MissingDependency.for_feature("tailrace.torch", "torchax", "torch")
    fits = _within(torch, *TORCH) and _within(torchax, *TORCHAX)
    if not fits:
        raise OptionError(
            f"{together()} Received: torch {torch}, torchax {torchax}. Install a pair that "
            f"goes together: pip install 'tailrace[torch]'."
        )


def together() -> str:
    """The one sentence about which versions go together.

    >>> together()
    'tailrace.torch works with torch >=2.11,<2.14 together with torchax >=0.0.13,<0.0.14.'
    """
    return (
        f"tailrace.torch works with torch {_shown(TORCH)} together with torchax {_shown(TORCHAX)}."
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _within(version: str, least: tuple[int, ...], below: tuple[int, ...]) -> bool:
    numbers = tuple(
        int("".join(c for c in part if c.isdigit()) or 0)
        for part in version.split("+")[0].split(".")[:3]
    )
    return least <= numbers and numbers[: len(below)] < below


def _shown(limits: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    least, below = (".".join(map(str, part)) for part in limits)
    return f">={least},<{below}"


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """A missing overload of an ATen operation is a placeholder, for as long as this lasts."""
    import torch

    packet: Any = type(torch.ops.aten.add)
    plain = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return plain(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _NoOverload(f"{self}.{name}")

    packet.__getattr__ = lenient
    try:
        yield
    finally:
        packet.__getattr__ = plain


@contextlib.contextmanager
def _side_effects_undone() -> Iterator[None]:
    import jax
    import torch

    option = "jax_pjrt_client_create_options"
    before = getattr(jax.config, option, None)
    fast = torch.backends.mha.get_fastpath_enabled()
    variables = dict(os.environ)
    # torchax logs through the root logger, which would permanently give that logger a handler.
    quiet = logging.NullHandler()
    logging.getLogger().addHandler(quiet)
    # A device of its own kind, which nothing here uses, would become PyTorch's accelerator: backward
    # passes of the caller's own CUDA tensors would look for it, and fail.
    utils: Any = torch.utils
    named = utils.rename_privateuse1_backend, torch._register_device_module
    utils.rename_privateuse1_backend = _nothing
    # Its module, which PyTorch's own decompositions ask for, is found under the name it has anyway.
    torch._register_device_module = lambda _, module: named[1]("privateuseone", module)
    try:
        yield
    finally:
        utils.rename_privateuse1_backend, torch._register_device_module = named
        logging.getLogger().removeHandler(quiet)
        if hasattr(jax.config, option):
            jax.config.update(option, before)
        torch.backends.mha.set_fastpath_enabled(fast)
        for name in set(os.environ) - set(variables):
            del os.environ[name]


def _nothing(*_: Any, **__: Any) -> None:
    """Done instead of naming the device."""
