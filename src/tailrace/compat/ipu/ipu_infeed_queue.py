"""`IPUInfeedQueue`: the elements of a dataset, for the loops and pipelines of a program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import DatasetLike
from tailrace.compat.ipu.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    IPUNotImplementedError,
    IPURuntimeError,
    IPUTypeError,
    IPUValueError,
    NotFoundError,
)
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import current, inside
from tailrace.compat.nests import leaves
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import DataError
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.marks import current_trace, dequeue

ALLOWED = ("int32", "float32", "float16", "bool", "int8", "uint8")
"""The dtypes that a feed takes, as in the original."""

_numbers = itertools.count()


class IPUInfeedQueue:
    """A queue that feeds the elements of a dataset to loops and pipelines.

    Open it by reading `initializer`. Elements of a whole execution are staged ahead, so the depth of
    the queue has no effect here.

    Args:
        dataset: a `tf.data.Dataset` or anything `tr.InfeedQueue` takes; its shapes are static.
        device_ordinal: which logical device; None: that of the scope around.
        prefetch_depth: how many elements the original staged ahead, 1 to 255; checked, without effect.
        optimise_latency: how elements travelled in the original; without effect.
        **kwargs: refused: an argument that the original does not have either.

    Raises:
        IPUValueError: a shape is not static, or a number is out of its range.
        IPUTypeError: there is no such argument.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(list(np.arange(4, dtype=np.float32)))
    >>> infeed.initializer
    <Operation infeed initializer>
    >>> def add_up(total):
    ...     return ipu.loops.repeat(4, lambda total, x: total + x, total, infeed)
    >>> ipu.ipu_compiler.compile(add_up, [0.0])()[0].item()
    6.0
    >>> infeed.deleter
    <Operation infeed deleter>
    """

    def __init__(
        self,
        dataset: DatasetLike,
        device_ordinal: int | None = None,
        prefetch_depth: int | None = None,
        optimise_latency: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise IPUTypeError(f"IPUInfeedQueue has no argument {next(iter(kwargs))!r}.")
        _check_static(dataset)
        self.device_ordinal = check_ordinal(device_ordinal)
        self.prefetch_depth = _check_depth(prefetch_depth)
        self.optimise_latency = bool(optimise_latency)
        # Programs list the infeeds that they read by this number.
        self.id = next(_numbers)
        self.dataset = dataset
        self.dequeued = False
        self._queue: InfeedQueue | None = None
        self._open = False

    # -- life -----------------------------------------------------------------------------------

    @property
    def initializer(self) -> Operation:
        """Open the dataset; after `deleter`, from its beginning. It may be read once.

        Raises:
            IPUValueError: the dataset is open.
        """
        if self._open:
            raise IPUValueError(
                "The IPUInfeedQueue `initializer` function can only be accessed once."
            )
        if self._queue is None:
            # Not when the queue is made: only what is initialized opens its dataset.
            self._queue = InfeedQueue(self.dataset)
        else:  # programs compiled for the queue keep using it
            self._queue.restart()
        self._open = True
        return Operation("infeed initializer")

    @property
    def deleter(self) -> Operation:
        """Close the dataset.

        Raises:
            NotFoundError: the dataset is not open.
        """
        if self._queue is None or not self._open:
            raise NotFoundError(f"Infeed with id='{self.id}' is not there: it was not initialized.")
        # Not closed: programs compiled for this queue hold it, and `initializer` restarts it.
        self._queue.rest()
        self._open = False
        return Operation("infeed deleter")

    def get_next(self) -> Any:
        """Refused, as in the original: loops and pipelines take the elements.

        Raises:
            IPUValueError: always.
        """
        raise IPUValueError(
            "IPUInfeedQueue.get_next() is obsolete: give the queue to loops.repeat, "
            "loops.while_loop or pipelining_ops.pipeline, which take its elements."
        )

    @property
    def number_of_tuple_elements(self) -> int:
        """How many arguments one element supplies."""
        # A dataset of TensorFlow says it before it is opened.
        spec = getattr(self.dataset, "element_spec", None)
        args, kwargs = arguments_of(self.queue().spec().tree() if spec is None else spec)
        return len(args) + len(kwargs)

    # -- what programs use ----------------------------------------------------------------------

    def queue(self) -> InfeedQueue:
        """The engine's queue.

        Raises:
            FailedPreconditionError: the dataset has not been opened.
        """
        if self._queue is None or not self._open:
            raise FailedPreconditionError(
                "Trying to access an infeed dataset iterator which has not been created. Did you "
                "initialize the infeed_queue? Read its `initializer` before the program runs."
            )
        return self._queue

    def take_part(self, replicas: int | None) -> InfeedQueue:
        """The engine's queue, checked against the program's number of replicas.

        Args:
            replicas: how many replicas the program has; None if that is not known yet.

        Raises:
            FailedPreconditionError: the queue was set up for another number of replicas, or has a dtype
                that feeds do not take.
            InvalidArgumentError: an element has a dimension of size 0.
        """
        queue = self.queue()
        scope = current()
        if scope is not None:
            scope.found.infeeds[self.id] = self
        # Replicas take elements in turn: a queue cannot serve programs of different numbers of them.
        if replicas is not None and queue.replicas not in (None, replicas):
            raise FailedPreconditionError(
                f"Infeed with id='{self.id}' was already set up with replication factor "
                f"{queue.replicas} when it should have {replicas}. Use another IPUInfeedQueue."
            )
        try:
            spec = queue.spec()
        except DataError as error:
            # The engine has one error for data that cannot be fed; the original names this case apart.
            if "dim of size 0" not in str(error):
                raise
            raise InvalidArgumentError(
                f"Detected an input tensor to an infeed queue with a dimension of size 0. {error}"
            ) from error
        for index, dtype in enumerate(spec.dtypes):
            check_dtype(dtype, index)
        self.dequeued = True
        return queue


def check_dtype(dtype: DTypeLike, index: int) -> None:
    """Refuse a dtype that no feed of the original took."""
    if str(np.dtype(dtype)) not in ALLOWED:
        raise FailedPreconditionError(
            f"Unsupported datatype {np.dtype(dtype)} on index {index} of feed operation. Supported "
            f"are {', '.join(ALLOWED)}. Cast it in the dataset, with map()."
        )


def check_ordinal(ordinal: object) -> int | None:
    """The number of a logical device, checked as the feeds do."""
    if ordinal is None:
        return None
    if not isinstance(ordinal, int) or isinstance(ordinal, bool):
        raise IPUValueError("Device ordinal must be an integer")
    if ordinal < 0:
        raise IPUValueError("Device ordinal must be >= 0")
    return ordinal


def _check_depth(depth: int | None) -> int:
    if not depth:  # 0 as well, as in the original
        return 3
    if depth < 0:
        raise IPUValueError(f"prefetch_depth must be greater than zero. Received: {depth}.")
    if depth > 255:
        raise IPUValueError(f"prefetch_depth must be less than 256. Received: {depth}.")
    return depth


def _check_static(dataset: DatasetLike) -> None:
    spec = getattr(dataset, "element_spec", None)
    # Only TensorFlow's datasets say their shapes beforehand; others are known by their first
    # element.
    if spec is None:
        return
    for leaf in leaves(spec):
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, list | tuple) and any(isinstance(dim, list | tuple) for dim in shape):
            raise IPUValueError("Nested list/tuple input shapes are not supported")
        known = getattr(shape, "is_fully_defined", None)
        if known is not None and not known():
            raise IPUValueError(
                f"Output shape {shape} is not fully defined. If using tf.Dataset.batch, set "
                f"drop_remainder=True"
            )


def arguments_of(element: Tree) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments that an element supplies: a list by position, a lone dict by name.

    >>> arguments_of((1, 2)), arguments_of({"a": 1}), arguments_of(3)
    (([1, 2], {}), ([], {'a': 1}), ([3], {}))
    """
    items = list(element) if isinstance(element, list | tuple) else [element]
    # The original's rule: only a dict that is the whole element is passed by name; one among others is
    # an argument.
    lone = items[0] if len(items) == 1 else None
    if isinstance(lone, dict) and all(isinstance(key, str) for key in lone):
        return [], dict(lone)
    return items, {}


class IPUIterator:
    """An open infeed as an iterator: an argument of a function given to `strategy.run`.

    Give a dataset, or an existing queue together with the form of its elements.

    Args:
        dataset: what it reads.
        infeed_spec: an existing IPUInfeedQueue.
        element_spec: the form of the elements of that queue.
        **kwargs: arguments of IPUInfeedQueue.

    Raises:
        IPUValueError: neither a dataset nor a queue with its `element_spec` is given, or both.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> iterator = ipu.ipu_infeed_queue.IPUIterator(list(np.ones((2, 3), np.float32)))
    >>> ipu.ipu_compiler.compile(lambda: next(iterator).sum())()[0].item()
    3.0
    """

    def __init__(
        self,
        dataset: DatasetLike = None,
        infeed_spec: IPUInfeedQueue | None = None,
        element_spec: Tree = None,
        **kwargs: Any,
    ) -> None:
        from_spec = infeed_spec is not None and element_spec is not None
        if (dataset is None) != from_spec or (dataset is not None and infeed_spec is not None):
            raise IPUValueError(
                "Either dataset or both infeed_spec and element_spec need to be provided."
            )
        self.infeed_queue: Any = infeed_spec
        if dataset is not None:
            self.infeed_queue = IPUInfeedQueue(dataset, **kwargs)
            self.infeed_queue.initializer()
        self.element_spec = element_spec

    def __iter__(self) -> IPUIterator:
        return self

    def __next__(self) -> Any:
        """The next element, inside a device function.

        Raises:
            IPURuntimeError: it is called outside a device function.
        """
        if current() is None:
            raise IPURuntimeError(
                "Accessing dataset elements can not be accessed in eager mode when inside "
                "'IPUStrategy'. Take them in a function given to strategy.run, or outside the scope."
            )
        return _next_element(self.infeed_queue)

    get_next = __next__

    def get_next_as_optional(self) -> Any:
        """Refused, as in the original.

        Raises:
            IPUNotImplementedError: always.
        """
        raise IPUNotImplementedError("get_next_as_optional() is not available on an IPUIterator.")


def _next_element(infeed_queue: IPUInfeedQueue) -> Any:
    """The next element of an infeed, at this place of the program (outside of `repeat`)."""
    trace = current_trace("next(iterator)")
    looking = inside("next(iterator)").looking
    queue = infeed_queue.take_part(None if looking else trace.replicas)
    # Any counter: it only matters in loops, where it changes from pass to pass.
    return dequeue(jnp.int32(0), queue, queue.spec().tree())


class IPUOwnedIterator(IPUIterator):
    """An `IPUIterator` whose queue is closed when the iterator is deleted.

    `iter(dataset)` in the scope of an `IPUStrategy` returns one. Arguments are those of `IPUIterator`.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> iterator = ipu.ipu_infeed_queue.IPUOwnedIterator([np.float32(5)])
    >>> ipu.ipu_compiler.compile(lambda: next(iterator))()[0].item()
    5.0
    """

    def __del__(self) -> None:
        queue = getattr(self, "infeed_queue", None)
        opened = getattr(queue, "_queue", None)
        # A queue that is open has a thread, which would otherwise outlive the iterator.
        if opened is not None:
            opened.close()


__getattr__, __dir__ = missing_from(__name__)
