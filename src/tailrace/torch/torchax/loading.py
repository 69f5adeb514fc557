"""The import of torchax, which changes nothing else in the process.

torchax 0.0.13 names overloads of ATen operations that newer PyTorch releases no longer have (those
for named tensors). While it is imported, and only then, a missing overload is answered with a
placeholder: an entry in a table that no operation ever looks up. Everything else that importing it
changes in the process (logging, environment, JAX options, PyTorch's attention fast path, a device
of its own) is put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.base.seams import Package, Seam
from tailrace.torch.torchax.unnamed_device import unnamed_device
from tailrace.torch.torchax.versions import check_installed, together


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
        import torchax

        from tailrace.torch import torch_internals

        torch_internals.check(together())  # before anything else of it is relied on
        import torchax.view

        device = property(lambda _: unnamed_device())
        kinds: tuple[Any, ...] = (torchax.tensor.Tensor, torchax.view.View)
        for kind in kinds:
            kind.device = device  # they ask for it by the name that it did not get
            kind.requires_grad = property(_has_gradient, _give_gradient)
        from tailrace.torch.torchax.environment import make_environment

        return make_environment()


def probed() -> tuple[tuple[Package, tuple[Seam, ...]], ...]:
    """What is relied on in PyTorch and torchax, for `tailrace doctor`; torchax is imported."""
    with _placeholders(), _side_effects_undone():
        import torchax.ops.jaten
        import torchax.tensor
        import torchax.view  # noqa: F401

    from tailrace.torch import torch_internals

    return torch_internals.packages()


def _has_gradient(tensor: TensorLike) -> bool:
    """Whether PyTorch would differentiate by a tensor. Said by us: JAX differentiates here."""
    return vars(tensor).get("_has_gradient", False)


def _give_gradient(tensor: TensorLike, flag: bool) -> None:
    tensor._has_gradient = flag


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """A missing overload of an ATen operation is a placeholder, for as long as this lasts."""
    import torch

    packet: Any = type(torch.ops.aten.add)
    plain = packet.__getattr__

    def lenient(self: object, name: str) -> Any:
        try:
            return plain(self, name)
        except AttributeError:
            # Python itself looks for such names (`__wrapped__`, `__path__`), and takes an answer as
            # a yes.
            if name.startswith("__"):
                raise
            return _NoOverload(f"{self}.{name}")

    # On the class: operations are looked up on packets that do not exist yet.
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
    # torchax logs through the root logger, which would give that logger a handler for good.
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
