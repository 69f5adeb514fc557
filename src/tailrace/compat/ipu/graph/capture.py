"""Gradients of activations, captured where they flow back through a value.

A value is captured by adding a zero to it: the gradient in that zero is the gradient in the value.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import IPURuntimeError, IPUValueError
from tailrace.compat.ipu.graph.capture_context import GradientCaptureContext, active
from tailrace.compat.ipu.graph.gradients import GradientTape, watched_zero


class GradientCaptureTape(GradientTape, GradientCaptureContext):
    """A `GradientTape` that captures gradients too. Not inside a pipeline: tap `cotangent/...` there.

    Args:
        persistent: whether it may be asked more than once; it always may.
        watch_accessed_variables: without effect: all variables can be differentiated.

    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(3.0, name="w")
    >>> def step():
    ...     with ipu.eager.backprop.GradientCaptureTape() as tape:
    ...         hidden = ipu.ops.grad_util_ops.capture_upstream_gradients(w * 2, tag="hidden")
    ...         loss = hidden * 5
    ...     return tape.gradient(loss, w), tape.captured_gradients["hidden"][0]
    >>> [value.item() for value in ipu.ipu_compiler.compile(step)()]
    [10.0, 5.0]
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        GradientTape.__init__(self, persistent, watch_accessed_variables)
        GradientCaptureContext.__init__(self)

    def __enter__(self) -> GradientCaptureTape:
        GradientCaptureContext.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        GradientCaptureContext.__exit__(self, *error)

    def gradient(self, target: TensorLike, sources: Tree) -> Any:
        """The gradient of `target` with respect to `sources`. Captured gradients are kept.

        Args:
            target: a value of the program.
            sources: a variable, or a list of them.
        """
        # It is often called after its block: then it is opened once more.
        with contextlib.nullcontext() if active() is self else self:
            return super().gradient(target, sources)


def capture_upstream_gradients(args: Tree, tag: str = "") -> Any:
    """`args` (a tree) as they are; their gradients are captured under `tag`.

    Args:
        args: a value, or a tree of them.
        tag: the key in `captured_gradients`.

    Raises:
        IPURuntimeError: no tape or context is open that captures.
        IPUValueError: the tag is in use.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(3.0, name="w")
    >>> def step():
    ...     with ipu.eager.backprop.GradientCaptureContext() as context:
    ...         hidden = ipu.ops.grad_util_ops.capture_upstream_gradients(w * 2, tag="hidden")
    ...         optimizer = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.25))
    ...         optimizer.minimize(hidden * 5, var_list=[w])
    ...     return context.captured_gradients["hidden"][0]
    >>> ipu.ipu_compiler.compile(step)()[0].item()
    5.0
    """
    context = active()
    if context is None:
        raise IPURuntimeError(
            "capture_upstream_gradients may only be used within the context of a "
            "GradientCaptureTape or a GradientCaptureContext."
        )
    if tag in context.zeros:
        raise IPUValueError(f"Gradients are captured under the tag {tag!r} already.")
    # JAX's trees, unlike elsewhere here: a None has no gradient to capture.
    leaves, structure = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    zeros = context.zeros[tag] = [watched_zero(leaf) for leaf in leaves]
    summed = [leaf + zero for leaf, zero in zip(leaves, zeros, strict=True)]
    return jax.tree.unflatten(structure, summed)
