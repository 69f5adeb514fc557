"""Floating-point operations of a program, counted from its equations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.operations import multiplications
from tailrace.jaxprs.walk import walk


def model_flops(equations: Sequence[JaxprEqn]) -> float:
    """FLOPs of matrix products and convolutions, forward and backward, times the loops around them.

    Recomputation in the backward pass does not count: a model's FLOPs are those of its formula. A loop
    whose length is known only at run time counts once.
    """
    return sum(
        multiplications(place.equation) * math.prod(around.length or 1 for around in place.loops())
        for place in walk(equations)
        if not place.replayed
    )
