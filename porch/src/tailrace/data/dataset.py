"""The one face that every dataset has inside Tailrace, whatever it was outside."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from tailrace.data.batches import Batches
from tailrace.data.trees import Tree


class Dataset(ABC):
    """A stream of elements, each a tree of numpy arrays; make one with `as_dataset`.

    Which object owns what: the adapter (a subclass of this, one for each kind of source) knows how
    a source is read and turns its leaves into numpy arrays; the infeed compares elements with the
    first one, counts them and moves them to the device; neither knows of the other's concern.

    A source of your own can be given this face by deriving from it:

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
    """What messages call it."""

    length: int | None = None
    """How many elements one iteration gives, if that is known for certain."""

    endless: bool = False
    """Whether it is known to go on forever (False: it ends, or nobody knows)."""

    restartable: bool = True
    """Whether each iteration begins anew (False: a one-shot iterator, which goes on instead)."""

    fast: Batches | None = None
    """The arrays behind the stream, where they are in memory: then `iterate` gives a
    `BatchIterator`, with its position, `read` and `indices`."""

    @abstractmethod
    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """An iterator from the beginning, or where a one-shot source stands.

        `epoch` is how often the source was iterated before. Only what shuffles by epoch number
        (`tr.batches`) looks at it.
        """

    def __iter__(self) -> Iterator[Tree]:
        return self.iterate()

    def __repr__(self) -> str:
        return f"<dataset: {self.name}>"
