"""The reader: blocks of elements, put back, ended, failed; nothing is lost."""

import re
import traceback

import ml_dtypes
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import DataError, DataExhausted, ElementError, ProducerError
from tailrace.feeds.buffers import allocate
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.reader import Reader


def numbers(count):
    return [np.float32(i) for i in range(count)]


def values(block):
    return block[0].tolist()


def test_blocks_of_any_size_follow_each_other():
    reader = Reader(numbers(10))
    assert [values(reader.read(n)) for n in (3, 0, 1, 6)] == [
        [0, 1, 2],
        [],
        [3],
        [4, 5, 6, 7, 8, 9],
    ]
    assert reader.delivered == 10


def test_the_first_element_is_looked_at_and_not_lost():
    reader = Reader(iter(numbers(3)))
    assert reader.spec().leaves[0].shape == ()
    assert reader.delivered == 0
    assert values(reader.read(3)) == [0, 1, 2]


def test_put_back_comes_first():
    reader = Reader(numbers(6))
    first, second = reader.read(2), reader.read(2)
    reader.put_back([leaf[1:] for leaf in second])
    assert reader.delivered == 3
    reader.put_back(first)
    assert values(reader.read(5)) == [0, 1, 3, 4, 5]
    reader.put_back([np.zeros(0, np.float32)])
    assert reader.delivered == 6


def test_a_waiting_block_is_split():
    reader = Reader(numbers(6))
    reader.put_back(reader.read(4))
    assert [values(reader.read(n)) for n in (1, 2, 3)] == [[0], [1, 2], [3, 4, 5]]


def test_available_counts_and_keeps():
    reader = Reader(iter(numbers(5)))
    assert reader.available(3) == 3
    assert reader.available(9) == 5
    assert reader.delivered == 0
    assert values(reader.read(5)) == [0, 1, 2, 3, 4]
    assert reader.available(1) == 0


def test_exhaustion_says_how_many_and_keeps_them():
    reader = Reader(iter(numbers(5)))
    reader.read(2)
    text = r"Asked for 4, found 3 \(after 2 delivered before\).*What was found is kept"
    for _ in range(2):
        with pytest.raises(DataExhausted, match=text):
            reader.read(4)
    assert values(reader.read(3)) == [2, 3, 4]


def test_an_empty_dataset():
    with pytest.raises(DataExhausted, match="at least one element. Received: an empty list"):
        Reader([]).spec()


def failing(good, error=None):
    yield from numbers(good)
    raise OSError("disk on fire") if error is None else error


def test_a_failing_producer_keeps_what_came_before_and_stays_failed():
    reader = Reader(failing(3))
    caught = []
    for _ in range(2):
        with pytest.raises(ProducerError, match=r"raised OSError .*: disk on fire") as info:
            reader.read(5)
        caught.append(info.value)
    assert caught[0] is caught[1]
    assert isinstance(caught[0].__cause__, OSError)
    assert "in failing" in "".join(traceback.format_exception(caught[0]))
    assert values(reader.read(3)) == [0, 1, 2]
    with pytest.raises(ProducerError):
        reader.read(1)


def test_a_producer_that_fails_at_once():
    with pytest.raises(ProducerError, match="raised KeyError"):
        Reader(failing(0, KeyError("x"))).spec()


def test_the_sentence_counts_what_was_read_before_the_failure():
    """Elements 0 to 4 came; a reader of the message looks for element 5."""
    reader = Reader(failing(5))
    reader.read(2)
    with pytest.raises(ProducerError, match="after 5 elements"):
        reader.read(6)


# -- elements that are not like the first -------------------------------------------------------


def element(x=None, y=1.0):
    return {"x": np.zeros((4, 2), np.float32) if x is None else x, "y": (np.float32(y),)}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            element(np.zeros((3, 2), np.float32)),
            "leaf ['x'] is float32[4, 2]. Received: element 3 with float32[3, 2]. It looks like a "
            "smaller last batch: drop it (drop_remainder=True), or pad it.",
        ),
        (
            element(np.zeros((4, 3), np.float32)),
            "Received: element 3 with float32[4, 3]. Cast, pad or reshape in the dataset.",
        ),
        (element(np.zeros((4, 2), np.float64)), "element 3 with float64[4, 2]"),
        (
            {**element(), "y": (np.int32(3),)},
            "leaf ['y'][0] is float32[]. Received: element 3 with int32[]",
        ),
        ({"x": element()["x"]}, "have the structure of the first one"),
        ({**element(), 1: 2.0}, "Received: element 3 with keys that cannot be sorted: {'x': "),
    ],
)
def test_another_form_in_mid_stream(bad, text):
    reader = Reader([element(y=i) for i in range(3)] + [bad, element()])
    for _ in range(2):  # it does not go away by asking again
        with pytest.raises(ElementError, match=re.escape(text)):
            reader.read(5)
    assert reader.read(3)[1].tolist() == [0, 1, 2]


def test_the_number_of_an_element_counts_from_the_start():
    reader = Reader(iter([*numbers(7), np.zeros(2, np.float32)]))
    reader.read(3)
    reader.put_back(reader.read(2))
    with pytest.raises(ElementError, match="element 7 with"):
        reader.read(5)


def test_a_dim_of_size_zero():
    with pytest.raises(
        DataError, match=r"dim of size 0.*leaf \[1\] of shape \(0, 3\).*drop_remainder=True"
    ):
        Reader([(np.zeros(2), np.zeros((0, 3)))]).spec()


def test_strings_objects_and_nothing():
    with pytest.raises(DataError, match=r"leaf \['name'\] holds strings"):
        Reader([{"name": "a"}]).spec()
    with pytest.raises(DataError, match="Python objects"):
        Reader([np.array([object()])]).spec()
    with pytest.raises(DataError, match="needs at least one array. Received: None"):
        Reader([None]).spec()


def test_strings_in_mid_stream_are_a_sentence_too():
    with pytest.raises(DataError, match="strings"):
        Reader([np.float32(1), "a"]).read(2)


# -- dtypes -------------------------------------------------------------------------------------


def test_64_bits_are_narrowed_and_said_once(caplog):
    data = [{"a": np.arange(3), "b": np.float64(i), "c": i, "d": np.uint64(i)} for i in range(4)]
    block = Reader(data).read(4)
    assert [leaf.dtype for leaf in block] == [np.int32, np.float32, np.int32, np.uint32]
    assert block[1].tolist() == [0, 1, 2, 3]
    Reader(data).read(4)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if text.startswith("int64 data is narrowed to int32")]) == 1
    assert len(said) == 3


@pytest.mark.parametrize(
    "dtype",
    [
        np.uint8,
        np.int8,
        bool,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        np.complex64,
    ],
)
def test_narrow_dtypes_stay_as_they_are(dtype, caplog):
    data = [np.arange(4).astype(dtype) for _ in range(3)]
    (block,) = Reader(data).read(3)
    assert block.dtype == dtype
    assert_bits_equal(block, np.stack(data))
    assert not caplog.records


def test_numbers_lists_and_trees_of_python():
    block = Reader([(1, [2.0, True])] * 2).read(2)
    assert [leaf.dtype for leaf in block] == [np.int32, np.float32, np.bool_]


# -- tr.batches, read many at a time -------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_equal_their_iteration(shuffle):
    data = tr.batches({"x": np.arange(23), "y": np.arange(23.0)}, 4, shuffle=shuffle, repeat=True)
    reader, plain = Reader(data), iter(data)
    for count in (1, 3, 0, 9, 2):
        block = reader.read(count)
        for row in range(count):
            expected = next(plain)
            assert block[0][row].tolist() == expected["x"].tolist()
            assert block[1][row].tolist() == expected["y"].tolist()


def test_batches_that_end():
    reader = Reader(tr.batches(np.arange(10.0), 2))
    reader.read(2)
    with pytest.raises(DataExhausted, match="batches of 2 from 10 examples.*Asked for 4, found 3"):
        reader.read(4)
    assert values(reader.read(3)) == [[4, 5], [6, 7], [8, 9]]


def test_a_smaller_last_batch_is_named():
    reader = Reader(tr.batches(np.arange(10.0), 4, drop_remainder=False))
    with pytest.raises(ElementError, match="element 2 with .*smaller last batch: drop it"):
        reader.read(3)
    assert values(reader.read(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_order_of_keys_is_that_of_the_tree():
    """A dict whose keys are not sorted: each leaf stays under its own name."""
    data = {"z": np.arange(6), "a": np.arange(6) * 10}
    for source in (tr.batches(data, 2), [{"z": np.arange(2), "a": np.arange(2) * 10}] * 3):
        reader = Reader(source)
        found = dict(zip(reader.spec().paths, reader.read(1), strict=True))
        assert found["['a']"].tolist() == [[0, 10]]
        assert found["['z']"].tolist() == [[0, 1]]


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16])
def test_memory_is_aligned_and_fresh(shape, dtype):
    first, second = allocate(shape, dtype), allocate(shape, dtype)
    assert first.shape == shape
    assert first.dtype == dtype
    assert first.ctypes.data % 64 == 0
    assert not np.shares_memory(first, second)


def test_a_block_is_a_copy_of_the_dataset():
    array = np.zeros((6, 2), np.float32)
    for source in ([array, array], tr.batches(array, 3)):
        (block,) = Reader(source).read(2)
        block += 1
        assert not array.any()


def test_specs_compare_and_count_bytes():
    one, other = ElementSpec.of(element()), ElementSpec.of(element(y=5))
    assert one == other
    assert hash(one) == hash(other)
    assert one != ElementSpec.of(element(np.zeros((4, 2))))
    assert one.nbytes == 4 * 2 * 4 + 4
