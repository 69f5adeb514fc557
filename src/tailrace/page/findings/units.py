"""Dead units: activations that are zero, and biases that get no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tailrace.base.messages import listed
from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.layers import LayerMap, plain_name

ZERO_ACTIVATIONS = 0.95
"""The fraction of zeros from which an activation is dead: a working ReLU has about half."""

DEAD_UNITS = 0.1
"""The fraction of a bias with a gradient of exactly zero; each such element is a silent unit."""

MOST_NAMED = 3

MASKS = {
    *("eq", "lt", "gt", "ge", "le", "ne", "and", "or", "not", "one_hot", "iota", "select_n"),
    *("broadcast_in_dim", "convert_element_type", "bitcast_convert_type", "sign", "stop_gradient"),
}
"""Operations whose results are often zero in a model that works."""

DRAWN = ("bernoulli", "uniform", "random_")
"""Parts of names under which random numbers are drawn: dropout."""


def unit_findings(zero: LayerMap, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Findings about the fractions of zeros in a run.

    Args:
        zero: the fractions of zeros.
        shapes: the shapes of the tensors, by name.
    """
    late = zero.late()
    silent: list[tuple[float, str]] = []
    biases: list[tuple[float, str]] = []
    for name, share in zip(zero.names, late, strict=True):
        plain = plain_name(name)
        if name.startswith("activation/") and share >= ZERO_ACTIVATIONS and not _is_mask(plain):
            silent.append((float(share), name))
        # Of the parameters of a layer, only a bias has exactly one element per unit.
        if name.startswith("grad/") and len(shapes.get(plain, ())) == 1 and share >= DEAD_UNITS:
            biases.append((float(share), name))
    if silent:
        # A layer is a better name for the user than the operations in it.
        silent = _layers_first(silent)
        yield Finding(
            Severity.WARNING,
            "dead units",
            f"Nearly all values are zero in {_shares(silent)}: units that pass nothing "
            f"on get no gradient either. A lower learning rate, or a leaky activation, keeps them "
            f"alive.",
            silent[0][1],
        )
    if biases and np.isfinite([share for share, _ in biases]).all():
        yield Finding(
            Severity.WARNING,
            "dead units",
            f"Some units get no gradient at all, step after step: "
            f"{_shares(sorted(biases, reverse=True))}. They are inactive for every element of a batch.",
            max(biases)[1],
        )


def _is_mask(name: str) -> bool:
    """Whether an operation is expected to return zeros: masks, constants, random numbers."""
    operation = name.rpartition(":")[2]
    return operation.split(".")[0] in MASKS or any(word in name for word in DRAWN)


def _layers_first(found: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Layers before single operations, each from the input on.

    What follows a dead layer is often dead because of it, so the one nearest to the input is named.
    """
    # The sort is stable: within both groups the order, from the input on, remains.
    return sorted(found, key=lambda one: ":" in one[1])


def _shares(found: list[tuple[float, str]]) -> str:
    return listed([f"{name!r} ({100 * share:.0f} %)" for share, name in found], MOST_NAMED)
