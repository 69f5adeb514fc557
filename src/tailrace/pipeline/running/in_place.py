"""Work on one device of many, in place, and its emissions.

XLA copies what passes through a conditional, which would be all parameters, the stash and the
accumulators. The carry of a loop it updates in place. So everything that a device does, or skips, is
in a loop of at most one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.taps.counted_loop import zeros
from tailrace.taps.frame import Emissions


def once_if(condition: jax.Array | bool, body: Callable[[Any], Any], carried: Tree) -> Tree:
    """`body(carried)` if the condition holds, else `carried`; updated in place.

    >>> once_if(jnp.array(True), lambda x: x + 1, jnp.int32(1)).item()
    2
    """
    # Known while tracing (one device, nothing on the host): no loop is needed.
    if condition is True:
        return body(carried)

    def run(state: Tree) -> Tree:
        old, structure = jax.tree.flatten(state[1])
        new = jax.tree.leaves(body(state[1]))
        # Values that are only read must be carried as well: used from outside the loop, they would
        # be copied.
        kept = [lax.optimization_barrier(n) if n is o else n for o, n in zip(old, new, strict=True)]
        return jnp.zeros((), bool), jax.tree.unflatten(structure, kept)

    return lax.while_loop(lambda state: state[0], run, (condition, carried))[1]


class Emitting:
    """The emissions of jobs and blocks on all devices, as those of one program.

    Attributes:
        sources: the device of each emission, by key.
    """

    def __init__(self) -> None:
        self.sources: dict[Hashable, int] = {}

    def room(self, function: Callable[..., Any], args: Sequence[Any], device: int) -> Emissions:
        """The shapes of the emissions of `function(*args)`, which returns (..., emissions)."""
        # One device has these values; they are sent to all from there, at the end of the execution.
        shapes = jax.eval_shape(function, *args)[-1]
        self.sources.update(dict.fromkeys(shapes, device))
        return shapes


def empty(
    shapes: Emissions, lead: Callable[[Hashable], tuple[int, ...]] = lambda _: ()
) -> Emissions:
    """Zeros of the shapes of emissions, with additional leading dims."""
    return Emissions(
        (key, jax.tree.map(lambda s, k=key: zeros(s, lead(k)), shape))
        for key, shape in shapes.items()
    )
