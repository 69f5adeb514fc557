"""Training without data: elements that hold nothing, of which there are always more.

A loss function may need no batch: collocation points are drawn from `tr.key()`, an environment is part
of the step. `fit(None, steps=n)` then reads these elements, so that everything that counts elements
(executions, accumulation, replicas, positions in checkpoints) does what it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.base.trees import Tree
from tailrace.data.dataset import Dataset


class NoElement:
    """An element without data: a tree of one leaf, or none. Functions that get an element get nothing.

    Args:
        byte: what it is on its way to the device, where the rows of a block are counted; None in a
            program.
    """

    def __init__(self, byte: Any = None) -> None:
        self.byte = byte

    def __repr__(self) -> str:
        return "no data"


class NoElements(Iterator[NoElement]):
    """The same element again and again; its position is a number, so that a resumed fit skips none."""

    def __init__(self) -> None:
        self._number = 0

    def __next__(self) -> NoElement:
        self._number += 1
        return NoElement(np.zeros((), np.uint8))

    def read(self, count: int) -> np.ndarray:
        """As many elements at once, as the rows of their leaf."""
        self._number += count
        return np.zeros(count, np.uint8)

    def get_state(self) -> int:
        """The number of elements so far."""
        return self._number

    def set_state(self, number: int) -> None:
        """Go on from there."""
        self._number = number


class NoData(Dataset):
    """What `fit(None, steps=n)` reads; `NO_DATA` is the only one."""

    name = "no data"
    endless = pure = True

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """Elements without data, without end."""
        return NoElements()


NO_DATA = NoData()


def or_no_data(dataset: object) -> object:
    """The dataset, or `NO_DATA` if it is None."""
    return NO_DATA if dataset is None else dataset
