"""What this package uses of torchax's environment; its own class is known only after a late import."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import jax
import torch

from tailrace.base.trees import Tree


class Env(contextlib.AbstractContextManager[Any], Protocol):
    """The environment in which a forward pass is traced."""

    def j2t_iso(self, value: Tree) -> Any:
        """JAX values in nested containers as tensors of the program, which share them."""
        ...

    def t2j_copy(self, value: Tree) -> Any:
        """Tensors of the host as JAX values; copies, because PyTorch may write to them later."""
        ...

    def to_xla(self, value: Tree) -> Any:
        """Tensors of the host as tensors of the program."""
        ...

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        """A key for random numbers that nothing else gets."""
        ...

    def override_property(self, **properties: Any) -> contextlib.AbstractContextManager[Any]:
        """A context with other properties, such as the key that others are split from."""
        ...
