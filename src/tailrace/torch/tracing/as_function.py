"""A module as a function of JAX arrays: for everything that takes one, such as `tr.diff`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.checks import check_seed
from tailrace.torch.tracing.forward import weights_of
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes


def as_function(
    module: torch.nn.Module, *, seed: int = 0
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The module's forward pass as a JAX function, and the parameters it has now.

    `function(params, *args)` returns what `module(*args)` would, as JAX arrays; tensors inside are
    named after the modules that compute them. The function uses the current buffers, and drops the
    changes that forward makes to them.

    Args:
        module: the module; each module inside runs in its current mode, training or evaluation.
        seed: the seed of random operations; every call draws the same numbers.

    Raises:
        OptionError: `seed` is not a whole number.
        ProgramError: an operation cannot run on the device; when the function is called.

    >>> import numpy as np, torch, tailrace.torch as tt
    >>> function, params = tt.as_function(torch.nn.Linear(2, 3))
    >>> function(params, np.ones((4, 2), np.float32)).shape
    (4, 3)
    """
    # Copies: what the module's own optimizer does to its tensors later does not change them.
    key_seed = check_seed(seed)
    params, buffers = ({n: jnp.array(v) for n, v in held.items()} for held in weights_of(module))
    run = ModuleFunction(module, training_modes(module))

    def function(params: dict[str, Any], *args: Any) -> Any:
        def fill(wrap: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return jax.tree.map(lambda array: wrap(jnp.asarray(array)), args), {}

        weights = {name: jnp.asarray(value) for name, value in params.items()}
        # The same key in each call: the function is pure, and two of its calls can be compared.
        return run(weights, buffers, fill, jax.random.key(key_seed)).outputs

    return function, params
