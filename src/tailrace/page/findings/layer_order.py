"""Tensors by layer, in the order of the model as far as names reveal it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DIGITS = re.compile(r"\d+")


def layer_of(name: str) -> str:
    """The layer of a tensor: its name without the kind and the last part.

    >>> layer_of("grad/blocks/0/attn/kernel"), layer_of("grad/w1"), layer_of("grad/stack/w [3]")
    ('blocks/0/attn', 'w1', 'stack [3]')
    """
    name, bracket, index = name.partition(" [")
    parts = name.split("/")[1:] or [name]
    layer = "/".join(parts[:-1]) or parts[-1]
    return layer + bracket + index


def layers(names: Sequence[str]) -> dict[str, list[int]]:
    """The layers of some tensors, and the indices of each layer's tensors.

    They are in the order of the tensors, except that layers whose names differ only in numbers are
    sorted by number: sorted as text, layer 10 would come before layer 2.

    >>> list(layers(["grad/in/w", "grad/l1/w", "grad/l10/w", "grad/l2/w", "grad/out/w"]))
    ['in', 'l1', 'l2', 'l10', 'out']
    """
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(layer_of(name), []).append(place)
    families: dict[str, list[str]] = {}
    for layer in found:
        families.setdefault(_DIGITS.sub("#", layer), []).append(layer)
    queues = {family: iter(sorted(members, key=_numbers)) for family, members in families.items()}
    ordered = [next(queues[_DIGITS.sub("#", layer)]) for layer in found]
    return {layer: found[layer] for layer in ordered}


def _numbers(layer: str) -> list[int]:
    return [int(digits) for digits in _DIGITS.findall(layer)]
