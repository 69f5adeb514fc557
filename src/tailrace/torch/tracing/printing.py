"""`tt.print_tensor`: print a tensor of a model, and its gradient, while the model runs."""

from __future__ import annotations

from typing import Any

import torch

from tailrace.errors import ProgramError
from tailrace.records.array_text import PrintOptions
from tailrace.records.print_tensor import print_tensor as print_array
from tailrace.torch.tracing.watch import current_watch, is_traced


def print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor to standard error each time a wrapped model computes it; returns the tensor.

    Continue with the tensor it returns. In training the gradient is printed too, as
    `<title>_gradient`. Outside of a wrapped model it does nothing.

    Args:
        tensor: what to print.
        title: the text before it; empty for the path of the running module.
        print_gradient: whether the gradient is printed too.
        summarise_threshold: larger tensors show only the edges of each dim; 0 shows everything.
        edge_items: how many entries an edge has.
        max_line_width: where lines are broken; 0 never breaks them.
        digits: significant digits; 0 leaves numbers as they are.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: between entries.
        open_bracket: before the entries of a dim.
        close_bracket: after them.

    Raises:
        ProgramError: it is not a tensor.
        OptionError: an option of the text has an invalid value.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> tt.print_tensor(torch.ones(2), "x")  # outside of a wrapped model nothing is printed
    tensor([1., 1.])
    """
    if not isinstance(tensor, torch.Tensor):
        raise ProgramError(
            f"print_tensor prints a tensor. Received: {type(tensor).__name__}. Call it for each "
            f"tensor of a container."
        )
    options: dict[str, Any] = {
        "summarise_threshold": summarise_threshold,
        "edge_items": edge_items,
        "max_line_width": max_line_width,
        "digits": digits,
        "float_format": float_format,
        "separator": separator,
        "open_bracket": open_bracket,
        "close_bracket": close_bracket,
    }
    PrintOptions(**options)  # refused also where nothing is printed
    watch = current_watch()
    if watch is None or not is_traced(tensor):
        return tensor
    traced: Any = tensor
    title = title or watch.module or "tensor"
    return watch.tensor(print_array(traced.jax(), title, print_gradient, **options))
