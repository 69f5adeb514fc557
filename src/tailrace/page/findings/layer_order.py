"""Tensors by layer, from the input of the model to its output; and the first that a step computes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tailrace.runs.diff.difference import ORDER as KINDS

BACK = ("cotangent", "grad")
"""Kinds that the backward pass computes."""

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


def layers(names: Sequence[str], ordered: bool = False) -> dict[str, list[int]]:
    """The layers of some tensors, and the indices of each layer's tensors.

    They are in the order of the tensors. If that is not known to be the order of the model, layers
    whose names differ only in numbers are sorted by number: sorted as text, layer 10 would come before
    layer 2.

    >>> list(layers(["grad/in/w", "grad/l1/w", "grad/l10/w", "grad/l2/w", "grad/out/w"]))
    ['in', 'l1', 'l2', 'l10', 'out']
    """
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(layer_of(name), []).append(place)
    if ordered:
        return found
    families: dict[str, list[str]] = {}
    for layer in found:
        families.setdefault(_DIGITS.sub("#", layer), []).append(layer)
    # Each position keeps its family (`blocks/#/attn`); only its members are sorted by number.
    queues = {family: iter(sorted(members, key=_numbers)) for family, members in families.items()}
    by_number = [next(queues[_DIGITS.sub("#", layer)]) for layer in found]
    return {layer: found[layer] for layer in by_number}


def _numbers(layer: str) -> list[int]:
    return [int(digits) for digits in _DIGITS.findall(layer)]


def made_first(names: Sequence[str]) -> int:
    """The index of the tensor that a step computes first. Names are in order, from input to output.

    Kinds follow each other in the order of a step. The backward pass starts at the output.

    >>> made_first(["grad/a", "grad/b", "activation/a", "activation/b", "loss"])
    2
    >>> made_first(["grad/a", "grad/b"])
    1
    """

    def time(index: int) -> tuple[int, int]:
        kind = names[index].split("/")[0]
        return KINDS.index(kind) if kind in KINDS else len(KINDS), -index if kind in BACK else index

    return min(range(len(names)), key=time)
