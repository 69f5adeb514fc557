"""Gradients that vanish or explode from some layer on, or over time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tailrace.base.messages import listed
from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.findings.layer_order import layers
from tailrace.page.layers import LayerMap
from tailrace.page.summary import number

DEPTH_RATIO = 1e-3
"""Gradients of the first layers vanish if they are below this fraction of the largest layer's. They
explode if they are above the last layer's by the inverse factor."""

GROWTH = 1e3
"""A gradient explodes if it exceeds its median so far by this factor."""

ABOVE = 10.0
"""It must also exceed the largest median of all gradients of the run by this factor."""

FEWEST = 8
"""The fewest columns before the maximum, so that a median means something."""

KINDS = ("grad", "accumulated", "reduced")
"""The kinds that count as gradients; the first recorded one is used."""


def gradient_findings(rms: LayerMap) -> Iterator[Finding]:
    """Findings about the rms of the gradients of a run."""
    for kind in KINDS:
        rows = [i for i, name in enumerate(rms.names) if name.startswith(f"{kind}/")]
        if rows:
            names = [rms.names[row] for row in rows]
            late = rms.late()[rows]
            yield from _without_gradient(names, late)
            yield from _through_layers(names, late, rms.ordered)
            yield from _over_time(rms, rows)
            return  # the other kinds show the same gradients, accumulated or reduced


def _without_gradient(names: list[str], late: np.ndarray) -> Iterator[Finding]:
    silent = [name for name, value in zip(names, late, strict=True) if value == 0]
    if silent:
        yield Finding(
            Severity.WARNING,
            "no gradient",
            f"{listed([*map(repr, silent)])} {'is' if len(silent) == 1 else 'are'} exactly zero in "
            f"the last part of the run: these parameters do not train. A stop_gradient, a branch that "
            f"is never taken, or dead units before them are the usual causes.",
            silent[0],
        )


def _through_layers(names: list[str], late: np.ndarray, ordered: bool) -> Iterator[Finding]:
    order = layers(names, ordered)
    sizes = {}
    for layer, places in order.items():
        values = late[places]
        values = values[np.isfinite(values) & (values > 0)]
        if len(values):
            # The largest tensor of a layer: a bias may have a small gradient beside a healthy kernel.
            sizes[layer] = float(values.max())
    # Two layers show no trend: a large ratio between them is common.
    if len(sizes) < 3:
        return
    names_in_order, values = list(sizes), np.array(list(sizes.values()))
    largest, last = int(values.argmax()), values[-1]
    small = _leading(values < DEPTH_RATIO * values[largest])
    if small:
        layer = names_in_order[small - 1]
        yield Finding(
            Severity.BAD,
            "vanishing gradients",
            f"From {layer!r} on towards the input ({small} of {len(values)} layers) gradients "
            f"vanish: rms {number(values[:small].min())} against {number(values[largest])} in "
            f"{names_in_order[largest]!r}. Normalisation, residual connections or another "
            f"initialisation keep them alive.",
            names[order[layer][0]],
        )
    large = _leading(values > last / DEPTH_RATIO)
    if large:
        layer = names_in_order[large - 1]
        yield Finding(
            Severity.BAD,
            "exploding gradients",
            f"From {layer!r} on towards the input ({large} of {len(values)} layers) gradients "
            f"explode: rms {number(values[:large].max())} against {number(last)} in the last layer. "
            f"Clip gradients, or scale the initial weights down.",
            names[order[layer][0]],
        )


def _over_time(rms: LayerMap, rows: list[int]) -> Iterator[Finding]:
    worst: tuple[float, int, int] | None = None
    usual = np.nanmax(rms.late(share=1.0)[rows], initial=0.0)  # medians over the whole run
    for row in rows:
        values = rms.values[row]
        there = np.isfinite(values) & (values > 0)
        highest = int(np.argmax(np.where(there, values, -np.inf)))
        before = values[:highest][there[:highest]]
        if len(before) < FEWEST:
            continue
        growth = float(values[highest] / np.median(before))
        is_large = values[highest] > ABOVE * usual  # not a gradient that was close to zero before
        if growth > GROWTH and is_large and (worst is None or growth > worst[0]):
            worst = growth, row, highest
    if worst is not None:
        growth, row, column = worst
        yield Finding(
            Severity.BAD,
            "exploding gradients",
            f"{rms.names[row]!r} grows to {number(growth, 2)} times its median so far "
            f"near step {int(rms.steps[column])}. Lower the learning rate, or clip gradients.",
            rms.names[row],
            int(rms.steps[column]),
        )


def _leading(flags: np.ndarray) -> int:
    """The number of leading true flags."""
    # If all layers are alike, there is no trend from some layer on.
    return int(np.argmin(flags)) if not flags.all() else 0
