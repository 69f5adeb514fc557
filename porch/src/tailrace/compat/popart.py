"""`popart`, the layer below PopTorch: programs import it; what they ask of it is refused by name."""

from __future__ import annotations

from typing import Any

from tailrace.compat.originals.missing import RefusedName


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise RefusedName(
        f"popart.{name} is not available: PopART built graphs of the chip's own operators, and ran "
        f"operators that were compiled for it. Write the model in PyTorch, and an operator with "
        f"torch.autograd.Function or jax.numpy."
    )
