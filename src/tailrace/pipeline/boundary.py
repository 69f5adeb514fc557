"""`tr.stage_boundary`: where one stage of a pipeline ends and the next begins."""

from __future__ import annotations

import jax

from tailrace.base.trees import Tree
from tailrace.errors import PipelineError
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.marks import Tag, mark

ROLE = "stage"
NEXT, BESIDE = "next", "beside"


def stage_boundary(values: Tree) -> Tree:
    """End a stage of a pipeline here: everything computed after this belongs to the next one.

    Only the order of computation counts. `values` are returned unchanged; pass what the next stage
    uses. Values that skip stages are passed along automatically. Outside a `tr.Pipeline` it does
    nothing.

    Args:
        values: a tree of arrays, with at least one.

    Raises:
        PipelineError: there is no array in it, or something else.

    >>> import tailrace as tr
    >>> import jax.numpy as jnp
    >>> float(tr.stage_boundary(jnp.float32(2.0)))
    2.0
    """
    return boundary(values, NEXT)


def boundary(values: Tree, which: str) -> Tree:
    """Begin the next stage, or (`BESIDE`) the next member of a group of concurrent stages."""
    if not jax.tree.leaves(values):
        raise PipelineError(
            f"tr.stage_boundary marks the values that flow from one stage to the next, and there "
            f"is at least one. Received: {values!r}. Give the activations."
        )
    check_arrays("tr.stage_boundary takes", values, error=PipelineError)
    # A mark is an identity, so the model computes the same without a pipeline; and it has a place
    # in the order of equations, which is all that a cut needs.
    return mark(values, Tag(ROLE, payload=which))
