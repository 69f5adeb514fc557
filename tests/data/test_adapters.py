"""`as_dataset` for what Python itself offers, and the sentences for what is no dataset."""

import itertools

import numpy as np
import pytest

from tailrace.data.adapters import as_dataset
from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batches import batches
from tailrace.data.dataset import Dataset
from tailrace.errors import DataError, TailraceError


def rows(n=3):
    for i in range(n):
        yield {"x": np.full(2, i)}


def values(dataset):
    return [int(element["x"][0]) for element in dataset]


def test_batches_keep_their_fast_path():
    recipe = batches({"x": np.zeros((6, 1))}, 2, shuffle=True)
    data = as_dataset(recipe)
    assert data.fast is recipe
    assert (data.length, data.restartable, data.endless) == (3, True, False)
    assert data.name == "batches of 2 from 6 examples"
    assert isinstance(data.iterate(), BatchIterator)
    assert data.iterate(epoch=4).first_epoch == 4


def test_endless_batches():
    data = as_dataset(batches(np.zeros(6), 2, repeat=True))
    assert (data.length, data.endless) == (None, True)


def test_a_list_of_elements():
    data = as_dataset(list(rows()))
    assert (data.length, data.restartable, data.fast, data.name) == (3, True, None, "list")
    assert values(data) == values(data) == [0, 1, 2]


def test_an_iterable_without_length():
    class Stream:
        def __iter__(self):
            return rows()

    data = as_dataset(Stream())
    assert (data.length, data.name, data.restartable) == (None, "Stream", True)
    assert values(data) == values(data) == [0, 1, 2]


def test_an_iterable_of_unknown_length():
    class Stream:
        def __iter__(self):
            return rows()

        def __len__(self):
            raise TypeError("unknown")

    assert as_dataset(Stream()).length is None


def test_a_generator_continues_from_its_position():
    data = as_dataset(rows(5))
    assert (data.length, data.restartable, data.name) == (None, False, "generator rows")
    assert values(itertools.islice(data, 2)) == [0, 1]
    assert values(itertools.islice(data, 2)) == [2, 3]
    assert values(data) == [4]
    assert values(data) == []


def test_an_iterator_survives_an_element_that_is_refused():
    data = as_dataset(iter([{"x": "no"}, {"x": np.ones(1)}]))
    with pytest.raises(DataError, match=r"leaf \['x'\] holds strings"):
        next(iter(data))
    assert values(data) == [1]


def test_a_function_is_called_for_each_iteration():
    data = as_dataset(rows)
    assert (data.length, data.restartable, data.name) == (None, True, "function rows")
    assert values(data) == values(data) == [0, 1, 2]
    assert as_dataset(lambda: batches(np.arange(4), 2)).iterate(2).first_epoch == 2


def test_a_dataset_is_left_as_it_is():
    data = as_dataset([np.zeros(1)])
    assert as_dataset(data) is data
    assert repr(data) == "<dataset: list>"


def test_a_dataset_of_ones_own():
    class Mine(Dataset):
        name = "mine"

        def iterate(self, epoch=0):
            return iter([np.full(1, epoch)])

    assert next(as_dataset(Mine()).iterate(3)) == 3
    assert next(iter(Mine())) == 0


def test_leaves_become_numpy_without_a_copy():
    x = np.zeros(3)
    assert next(iter(as_dataset([x]))) is x
    assert next(iter(as_dataset([(1, 2.5)])))[1].dtype == np.float64


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (None, r"not a dataset\. Received: None\. Accepted are: tr\.batches"),
        ("train.csv", r"Received: a str: 'train\.csv'"),
        (b"x", "Received: a bytes: b'x'"),
        (5, r"Received: a int: 5\. Accepted are: .*a tf\.data\.Dataset.*a PyTorch DataLoader"),
        (object(), "Received: a object: <object object"),
        (np.zeros((3, 2)), r"but an array was received: float64\[3, 2\]\. .*use tr\.batches"),
        (
            (np.zeros((3, 2), np.float32), np.zeros(3, np.int32)),
            r"but a tuple was received: \(float32\[3, 2\], int32\[3\]\)\. To cut arrays into",
        ),
        ({"x": np.zeros(3)}, r"but a dict was received: \{'x': float64\[3\]\}"),
        ([np.zeros((3, 2)), np.zeros(3)], "but a list of arrays that are not alike was received"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_dataset(received, text):
    with pytest.raises(DataError, match=text):
        as_dataset(received)


def test_arrays_of_other_libraries_are_arrays_too():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(DataError, match=r"but an array was received: float32\[2\]"):
        as_dataset(jnp.zeros(2))


def test_a_function_with_arguments():
    def load(path, *, fast=True):
        return []

    with pytest.raises(
        DataError,
        match=r"load\(path, \*, fast=True\) needs some\. Wrap it: lambda: .*load\(",
    ):
        as_dataset(load)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: None, "did not return one. This is not a dataset. Received: None"),
        (lambda: rows, "did not return one. This is not a dataset. Received: a function"),
        (lambda: (np.zeros(2),), "did not return one. A dataset is a stream of elements"),
    ],
)
def test_a_function_that_returns_no_dataset(function, text):
    with pytest.raises(TailraceError, match=f"The function .*lambda.* was called for .*{text}"):
        iter(as_dataset(function))
