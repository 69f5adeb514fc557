"""Floating-point operations of a program, counted from its equations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.operations import multiplications
from tailrace.jaxprs.walk import walk


def model_flops(equations: Sequence[JaxprEqn]) -> float:
    """Operations of matrix products and convolutions, forward and backward, in all loops.

    What a backward pass only computes again does not count: a model's FLOPs are those of its formula.
    A loop whose length only the running program knows counts once.
    """
    return sum(
        multiplications(place.equation) * math.prod(around.length or 1 for around in place.loops())
        for place in walk(equations)
        if not place.replayed
    )
