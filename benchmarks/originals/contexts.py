"""What a document leaves to its reader: names that a block takes for granted, and the place of a block.

Blocks are never edited, except that `...` is filled in where it is a place for the reader's own value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Context:
    """What is supplied for a document.

    Attributes:
        before: code that runs before a block, by its number.
        after: blocks that come after another one, by what the text says, in place of their own place.
        filled: what `...` is in a block.
        skipped: blocks that are not programs, and why.
    """

    before: Mapping[int, str] = dataclasses.field(default_factory=dict)
    after: Mapping[int, int] = dataclasses.field(default_factory=dict)
    filled: Mapping[int, str] = dataclasses.field(default_factory=dict)
    skipped: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def order(self, count: int) -> Sequence[int]:
        """The numbers of the blocks in the order in which they run.

        >>> Context(after={3: 0}).order(4)
        [0, 3, 1, 2]
        """
        numbers = [number for number in range(count) if number not in self.after]
        for number, place in self.after.items():
            numbers.insert(numbers.index(place) + 1, number)
        return numbers


_TORCH = """\
import torch
import torch.nn as nn
import poptorch
"""

_MODEL = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 10)
        self.fc2 = nn.Linear(10, 10)
        self.loss = nn.MSELoss()

    def forward(self, input, label):
        output = self.fc2(self.fc1(input))
        return output, self.loss(output, label)
"""

CONTEXTS = {
    "# Observing Tensors in PopTorch": Context(
        # A model is wrapped once; the document wraps it again to show the next step.
        before={0: _TORCH, 1: _MODEL, 3: "poptorch_model.destroy()\n"},
        # "Here, we will do it right after the PopTorch options have been initialised."
        after={14: 10},
    ),
    "Training a model": Context(
        before={1: "import tensorflow as tf\n"},
        filled={2: "tf.data.Dataset.from_tensors(tf.zeros([4])).repeat()"},
        skipped={0: "a sketch, not Python: `def stage1a(args...)`"},
    ),
}
"""By the first heading of a document."""


def context_of(text: str) -> Context:
    """What is supplied for a document, by its first heading."""
    lines = [line.strip() for line in text.splitlines()]
    return next((CONTEXTS[line] for line in lines[:5] if line in CONTEXTS), Context())
