"""The iterations of a `lax.while_loop` that is emitted again, and which of their emissions are kept.

The number of iterations is known only afterwards. A Tailrace loop has an upper bound, and its
emissions are written to buffers with that many rows; a flag per row says whether it was written. A
user's loop has no bound, so there is no buffer: the last value of each emission is kept.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.taps.counted_loop import traced_once, zeros
from tailrace.taps.frame import Emission, Emissions, Emitted
from tailrace.taps.loop_passes import both, collected
from tailrace.taps.wanted import is_collected


def run_while(
    go_on: Callable[[Tree], jax.Array],
    one_pass: Callable[[jax.Array, Tree], Any],
    init: list[Any],
    most: int | None,
) -> tuple[jax.Array, list[Any], Emitted]:
    """Emit the loop; returns the number of iterations, the carry, and the emissions with their
    validity.

    Args:
        go_on: `go_on(carry)` returns whether there is another iteration.
        one_pass: `one_pass(number, carry)` returns the next carry and emissions.
        init: the carry before the first iteration.
        most: the most iterations; None if there is no bound.
    """

    def is_single(key: Hashable) -> bool:
        return most is None or is_collected(key)

    def keep(number: jax.Array, kept: Emitted, emitted: Emitted) -> Emitted:
        put = lambda buffer, new: lax.dynamic_update_index_in_dim(buffer, new, number, 0)  # noqa: E731
        return Emissions(
            # A user's loop gives one value, its last, to a tap that sums too: that sums over our
            # iterations, not over these.
            (key, collected(key, old, emitted[key], most is not None))
            if is_single(key)
            else (key, jax.tree.map(put, old, emitted[key]))
            for key, old in kept.items()
        )

    # Traced once, for shapes and body together: a separate trace for the shapes would double the
    # work at each level of nested loops.
    traced, (_, shapes) = traced_once(one_pass, jnp.int32(0), init)
    # The buffers join the carry, which must have its final shape before the first iteration.
    start = Emissions(
        (key, jax.tree.map(lambda s, k=key: zeros(s, () if is_single(k) else (most,)), shape))
        for key, shape in shapes.items()
    )

    def advance(state: Tree) -> Tree:
        number, carry, kept = state
        carry, emitted = traced(number, carry)
        return number + 1, carry, keep(number, kept, emitted)

    passes, carry, kept = lax.while_loop(
        lambda state: go_on(state[1]), advance, (jnp.int32(0), list(init), start)
    )
    found: Emitted = Emissions()
    for key, emission in kept.items():
        # Zeros that no iteration overwrote must not be taken for values.
        made = passes > 0 if is_single(key) else jnp.arange(most) < passes
        valid = made if emission.valid is None else both(made, emission.valid)
        found[key] = Emission(emission.value, valid)
    return passes, list(carry), found
