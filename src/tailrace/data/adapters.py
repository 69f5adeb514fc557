"""`as_dataset`: any source of data as a `Dataset`, and errors for anything else.

A list is a sequence of elements. A tuple or a dict is one element, or arrays that are not cut into
batches yet; it is never a dataset.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import numpy as np

from tailrace.base.trees import Tree, describe
from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batches import Batches
from tailrace.data.dataset import Dataset, hinted_length
from tailrace.data.foreign import FOREIGN
from tailrace.data.leaves import to_numpy_tree
from tailrace.data.resumable import resumable
from tailrace.errors import DataError

ACCEPTED = (
    "Accepted are: tr.batches(arrays, batch_size), an iterable or iterator of arrays or trees of "
    "arrays (one for each batch), a function without arguments that returns one, a "
    "tf.data.Dataset, a grain dataset or DataLoader, and a PyTorch DataLoader."
)


class ArrayBatches(Dataset):
    """`tr.batches`: the one source that can be read many elements at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = self.fast = batches
        self.exact = self.pure = True
        self.name = f"batches of {batches.batch_size} from {batches.num_examples} examples"
        self.endless = batches.repeat
        self.length = None if batches.repeat else len(batches)

    def iterate(self, epoch: int = 0) -> BatchIterator:
        """The batches from the beginning of `epoch`."""
        return self._batches.iterate(epoch)


class PlainIterable(Dataset):
    """Anything that returns a new iterator from each `iter()`."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = self.origin = iterable
        self.name = type(iterable).__name__
        self.length = hinted_length(iterable)
        # Not subclasses, whose methods may be other people's.
        self.exact = self.pure = type(iterable) in (list, range)

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """A fresh iterator."""
        return resumable(to_numpy_tree, self._iterable)


USED_UP = (
    "An iterator is used up after one pass. To read it again, give a list, tr.batches(...), or a "
    "function that makes a new iterator."
)


class OneShotIterator(Dataset):
    """A generator, or an iterator of Python's, which can be read only once."""

    restartable = False
    continues = True
    when_empty = USED_UP

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.origin = iterator
        # One map for all callers: elements that one did not take stay in the shared iterator.
        self._iterator = resumable(to_numpy_tree, iterator)
        called = getattr(iterator, "__name__", None)
        self.name = f"{type(iterator).__name__} {called}" if called else type(iterator).__name__

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """The iterator, at its current position."""
        return self._iterator


class OwnIterator(Dataset):
    """An iterator of a user's class, which is its own iterator, and may begin anew after its end."""

    continues = True
    when_empty = USED_UP

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = self.origin = iterator
        self.name = type(iterator).__name__

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """The iterator, at its current position."""
        return resumable(to_numpy_tree, self._iterator)


class FromFunction(Dataset):
    """A function without arguments that returns an iterable; called for each iteration."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = self.origin = function
        self.name = f"function {_function_name(function)}"
        _check_takes_no_arguments(function)

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """A new iterator over a new result of the function."""
        return self.make().iterate(epoch)

    def make(self) -> Dataset:
        """Call the function, and return its result as a dataset."""
        made = self._function()
        try:
            # Refused, although `as_dataset` would accept it: one call must give the data.
            if callable(made) and not isinstance(made, Iterable):
                _refuse(made)
            return as_dataset(made)
        except DataError as error:
            raise DataError(
                f"The {self.name} was called for a dataset and did not return one. {error}"
            ) from None


def as_dataset(obj: object) -> Dataset:
    """Wrap `obj` as a `Dataset`, or raise an error that says why it cannot be one.

    Args:
        obj: the result of `tr.batches`, any iterable or iterator whose elements are arrays or trees
            of arrays, a function without arguments that returns such an iterable, a
            `tf.data.Dataset`, a grain dataset or loader, a PyTorch `DataLoader`, or a `Dataset`.

    Returns:
        A `Dataset`. Nothing is read yet.

    Raises:
        DataError: `obj` is no stream of elements; for plain arrays the message recommends `tr.batches`.

    >>> import numpy as np
    >>> data = as_dataset([{"x": np.zeros(2)}, {"x": np.ones(2)}])
    >>> data.length, data.restartable, [element["x"].sum() for element in data]
    (2, True, [np.float64(0.0), np.float64(2.0)])
    """
    if isinstance(obj, Dataset):
        return obj
    if isinstance(obj, Batches):
        return ArrayBatches(obj)
    # Only libraries that the program has loaded: an object of another cannot exist, and importing one
    # to ask would take seconds.
    for module_name, adapt in FOREIGN.items():
        module = sys.modules.get(module_name)
        found = adapt(module, obj) if module is not None else None
        if found is not None:
            return found
    # Before iterables: an array is one, and would silently become a stream of its rows.
    _refuse_arrays(obj)
    if isinstance(obj, (str, bytes, bytearray)):
        _refuse(obj)
    # Before iterables, which iterators are too: what matters is that they cannot start again.
    if isinstance(obj, Iterator):
        return _of_iterator(obj)
    if isinstance(obj, Iterable):
        return PlainIterable(obj)
    # A `for` loop asks for items 0, 1, ... until there are no more.
    if not isinstance(obj, type) and hasattr(type(obj), "__getitem__"):
        return PlainIterable(cast(Iterable[Any], obj))
    if callable(obj):
        return FromFunction(obj)
    _refuse(obj)


def rows_read(dataset: object, epoch: int, first: int, count: int) -> np.ndarray | None:
    """The numbers of the rows in `count` elements of a dataset, [count, batch size].

    Args:
        dataset: what was read.
        epoch: the epoch in which reading began.
        first: the number of the first element, counted from there.
        count: the number of elements.

    Returns:
        None if the dataset does not number its rows: only `tr.batches` does.
    """
    source = as_dataset(dataset).fast
    return None if source is None else source.rows(first, count, epoch)


def _of_iterator(iterator: Iterator[Any]) -> Dataset:
    code = getattr(type(iterator).__iter__, "__code__", None)
    library = type(iterator).__module__.partition(".")[0]
    # A generator, an iterator written in C, or one of those whose loaders make a new one.
    if code is None or library in FOREIGN:
        return OneShotIterator(iterator)
    # Any other `__iter__` does something: it begins a pass, as a `for` loop calls it for each.
    itself = code.co_code == Iterator.__iter__.__code__.co_code
    return OwnIterator(iterator) if itself else PlainIterable(iterator)


def _refuse(obj: object) -> NoReturn:
    shown = repr(obj)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    what = "None" if obj is None else f"a {type(obj).__name__}: {shown}"
    instead = getattr(type(obj), "instead_of_a_dataset", ACCEPTED)
    if obj is None:
        instead += " Only a fit can do without: fit(None, steps=...)."
    raise DataError(f"This is not a dataset. Received: {what}. {instead}")


def _refuse_arrays(obj: object) -> None:
    """Refuse plain arrays, which the caller may expect to be cut into batches."""
    if _is_array(obj):
        what = "an array"
    elif isinstance(obj, (tuple, Mapping)):
        what = "a tuple" if isinstance(obj, tuple) else f"a {type(obj).__name__}"
    elif isinstance(obj, list) and _are_unlike_arrays(obj):
        what = "a list of arrays that are not alike"
    else:
        return
    raise DataError(
        f"A dataset is a stream of elements, one for each batch, but {what} was received: "
        f"{describe(obj)}. To cut arrays into batches, use tr.batches(arrays, batch_size). To give "
        "elements that are batches already, put them into a list."
    )


def _is_array(obj: object) -> bool:
    return hasattr(obj, "__array__") or (hasattr(obj, "shape") and hasattr(obj, "dtype"))


def _are_unlike_arrays(members: list[Any]) -> bool:
    # [images, labels]: not a stream, since all elements of a stream have the same shape.
    kinds = {(tuple(a.shape), a.dtype) for a in members if _is_array(a) and hasattr(a, "shape")}
    return len(kinds) > 1 and all(_is_array(member) for member in members)


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _check_takes_no_arguments(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind()
    except TypeError:
        raise DataError(
            "A function given as a dataset is called without arguments, but "
            f"{_function_name(function)}{signature} needs some. Wrap it: "
            f"lambda: {_function_name(function)}(...)."
        ) from None
