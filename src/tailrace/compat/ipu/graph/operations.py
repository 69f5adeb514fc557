"""What the original called an operation, which has no value; and what its queues deliver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.deferred import Operation as Operation
from tailrace.compat.ipu.graph.state import is_variable
from tailrace.compat.ipu.graph.variables import as_array


class ResultText(str):
    """The text of a benchmark. A session returns it; other strings that it fetches are names."""

    __slots__ = ()


class HasElements(Protocol):
    """A queue; the class of outfeeds is in a file that imports this one."""

    def dequeue(self) -> Any:
        """What waits in it."""
        ...


class Undelivered(list[Any]):
    """What `dequeue` returns before a program has run: nothing, and what a session then runs."""

    is_one_value = True  # for nests: a session asks it, and does not look for fetches in it

    def __init__(self, queue: HasElements) -> None:
        super().__init__()
        self._queue = queue

    def again(self) -> Any:
        """Dequeue now."""
        found = self._queue.dequeue()
        return [] if isinstance(found, Undelivered) else found


class HostTensor(np.ndarray):
    """An array of numpy that has `numpy()`, as what the original's queues deliver has."""

    def numpy(self) -> np.ndarray:
        """The plain array."""
        return self.view(np.ndarray)

    def __array_wrap__(
        self, array: np.ndarray, context: object = None, return_scalar: bool = False
    ) -> Any:
        del context  # a sum of all elements is a number, as it is of a plain array
        return array[()] if return_scalar else array.view(HostTensor)


def delivered(array: TensorLike) -> HostTensor:
    """An array as a tensor of the host.

    >>> delivered([1.0, 2.0]).numpy().tolist()
    [1.0, 2.0]
    """
    return np.asarray(array).view(HostTensor)


def tensors_of(out: Tree, what: str, at_most: int | None = None) -> list[Any]:
    """The tensors that a function returned; operations after them are left out.

    Args:
        out: what it returned: nothing, a value, or a list.
        what: who returned it, for the message.
        at_most: variables after this number of tensors are results of assignments: operations.
    """
    values: Sequence[Any] = out if isinstance(out, list | tuple) else [] if out is None else [out]
    tensors: list[Any] = []
    ended = False
    for value in values:
        # What `assign` returns is the variable here; in the original it is an operation.
        done = isinstance(value, Operation) or value is None
        if is_variable(value) and at_most is not None and len(tensors) >= at_most:
            done = True
        if not done and ended:
            raise IPUValueError(
                f"{what} must return zero or more Tensor values followed by zero or more Operations."
            )
        ended = ended or done
        if not done:
            tensors.append(as_array(value))
    return tensors
