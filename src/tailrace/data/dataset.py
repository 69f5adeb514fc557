"""The interface that every dataset has inside Tailrace, whatever its library."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tailrace.base.trees import Tree
from tailrace.data.batches import Batches


class Dataset(ABC):
    """A stream of elements, each a tree of numpy arrays; make one with `as_dataset`.

    The adapter (a subclass, one for each kind of source) reads a source and converts its leaves to
    NumPy arrays. The infeed checks elements against the first one, counts them and transfers them to
    the device.

    To add a kind of source, derive from it:

    >>> import numpy as np
    >>> class Squares(Dataset):
    ...     name = "squares"
    ...     length = 3
    ...     def iterate(self, epoch=0):
    ...         return iter([np.float32(i * i) for i in range(3)])
    >>> [float(x) for x in Squares()]
    [0.0, 1.0, 4.0]
    """

    name: str
    """Its name in messages."""

    length: int | None = None
    """The number of elements per iteration; None if unknown. Unless `exact`, it is only a hint."""

    exact: bool = False
    """Whether `length` is certain: `len()` of other people's classes may say anything."""

    endless: bool = False
    """Whether it is known to be endless (False: it ends, or that is unknown)."""

    restartable: bool = True
    """Whether it can be iterated again after its end (False: a one-shot iterator is used up)."""

    continues: bool = False
    """Whether another iteration, begun in the middle, continues where the last one stopped."""

    pure: bool = False
    """Whether earlier iterations matter to the next only by the random numbers that they drew, so that
    they need not be read again to know its order."""

    origin: Any = None
    """The object that was given: what it draws from and counts is found in its attributes."""

    first: int = 0
    """The number of its first element, for messages: a part of a dataset counts on."""

    when_empty: str = ""
    """What to give instead, for the message that there are no elements."""

    fast: Batches | None = None
    """The arrays of the stream, if they are in memory: `iterate` then returns a `BatchIterator`, with a
    position, `read` and `indices`."""

    @abstractmethod
    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """An iterator from the beginning, or from the current position of a one-shot source.

        `epoch` is the number of earlier iterations. Only sources that shuffle by epoch (`tr.batches`)
        use it.
        """

    def __iter__(self) -> Iterator[Tree]:
        return self.iterate()

    def __repr__(self) -> str:
        return f"<dataset: {self.name}>"


def hinted_length(iterable: Any) -> int | None:
    """What `len()` says; None if it says nothing.

    >>> hinted_length([1, 2]), hinted_length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(iterable)
    except Exception:  # a hint that cannot be had is none, whatever the class raises
        return None
