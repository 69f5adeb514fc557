"""`tr.batches` against an oracle of a few lines: however the stream is read, it is the same one."""

import json
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.data.batch_iterator import BatchIterator
from tailrace.data.batches import Batches, batches
from tailrace.errors import DataError


def oracle(n, batch, shuffle, seed, drop, first_epoch, num_epochs):
    """The rows of every batch, one list for each."""
    rows_of_batches = []
    for epoch in range(first_epoch, first_epoch + num_epochs):
        order = np.arange(n)
        if shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(n)
        cut = [order[i : i + batch].tolist() for i in range(0, n, batch)]
        rows_of_batches += [rows for rows in cut if len(rows) == batch or not drop]
    return rows_of_batches


def arrays_of(n):
    return {"x": np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3), "y": (np.arange(n),)}


recipes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 12),
        "batch": st.integers(1, 13),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "repeat": st.booleans(),
        "drop": st.booleans(),
        "first_epoch": st.integers(0, 2),
    }
).filter(lambda r: r["batch"] <= r["n"] or not r["drop"])

operations = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.just(1)),
        st.tuples(st.just("read"), st.integers(0, 9)),
        st.tuples(st.just("indices"), st.integers(0, 9)),
        st.tuples(st.just("move to another iterator"), st.just(0)),
        st.tuples(st.just("go back"), st.integers(0, 5)),
    ),
    max_size=12,
)


@given(recipe=recipes, operations=operations)
@settings(max_examples=250, deadline=None)
def test_any_interleaving_delivers_the_same_stream(recipe, operations):
    n, batch = recipe["n"], recipe["batch"]
    arrays = arrays_of(n)
    data = batches(
        arrays,
        batch,
        shuffle=recipe["shuffle"],
        seed=recipe["seed"],
        repeat=recipe["repeat"],
        drop_remainder=recipe["drop"],
    )
    expected = oracle(
        n,
        batch,
        recipe["shuffle"],
        recipe["seed"],
        recipe["drop"],
        recipe["first_epoch"],
        num_epochs=130 if recipe["repeat"] else 1,
    )
    iterator = data.iterate(recipe["first_epoch"])
    at = 0
    for name, count in operations:
        # What `read` and `indices` may deliver: full batches up to the first smaller one.
        stackable = []
        for rows in expected[at : at + count]:
            if len(rows) < batch:
                break
            stackable.append(rows)
        if name == "next":
            if at == len(expected):
                with pytest.raises(StopIteration):
                    next(iterator)
            else:
                got = next(iterator)
                np.testing.assert_array_equal(got["x"], arrays["x"][expected[at]])
                np.testing.assert_array_equal(got["y"][0], arrays["y"][0][expected[at]])
                assert got["x"].dtype == np.uint8
                at += 1
        elif name == "read":
            got, m = iterator.read(count)
            assert m == len(stackable)
            assert got["x"].shape == (m, batch, 2, 3)
            assert got["x"].dtype == np.uint8
            for i, rows in enumerate(stackable):
                np.testing.assert_array_equal(got["x"][i], arrays["x"][rows])
                np.testing.assert_array_equal(got["y"][0][i], arrays["y"][0][rows])
            at += m
        elif name == "indices":
            got = iterator.indices(count)
            assert got.dtype == np.int32
            assert got.shape == (len(stackable), batch)
            assert got.tolist() == stackable
            at += len(stackable)
        elif name == "go back":
            at = max(0, at - count)
            iterator.seek(at)
        else:
            state = json.loads(json.dumps(iterator.get_state()))
            iterator = iter(data)
            iterator.set_state(state)
        assert iterator.position == at


def test_iterating_again_begins_anew_and_epochs_are_shuffled_differently():
    data = batches(np.arange(20), 5, shuffle=True, seed=3)
    first, again = np.concatenate(list(data)), np.concatenate(list(data))
    np.testing.assert_array_equal(first, again)
    second = np.concatenate(list(data.iterate(epoch=1)))
    assert sorted(second) == list(range(20))
    assert second.tolist() != first.tolist()
    endless, _ = iter(batches(np.arange(20), 5, shuffle=True, seed=3, repeat=True)).read(8)
    np.testing.assert_array_equal(endless.reshape(-1), np.concatenate([first, second]))


def test_other_seeds_give_other_orders():
    orders = {tuple(batches(np.arange(30), 30, shuffle=True, seed=s).order(0)) for s in range(5)}
    assert len(orders) == 5


def test_the_length_is_that_of_an_epoch_and_endless_batches_have_none():
    assert len(batches(np.arange(10), 4)) == 2
    assert len(batches(np.arange(10), 4, drop_remainder=False)) == 3
    endless = batches(np.arange(10), 4, repeat=True)
    with pytest.raises(TypeError, match="repeat without end and have no length"):
        len(endless)
    with pytest.raises(DataError, match="`batches_per_epoch` of them"):
        len(endless)
    assert endless.batches_per_epoch == 2
    assert endless


def test_recipe_is_frozen_and_shows_itself():
    data = batches({"x": np.zeros((4, 2), np.uint8)}, np.int64(2), seed=7)
    with pytest.raises(AttributeError):
        data.batch_size = 3
    assert repr(data) == (
        "Batches({'x': uint8[4, 2]}, batch_size=2, shuffle=False, seed=7, repeat=False, "
        "drop_remainder=None)"
    )
    assert isinstance(data, Batches)
    assert data.nbytes == 8
    assert repr(data.without([1])).endswith("drop_remainder=None).without(1 row: 1)")
    many = batches(np.arange(50), 2).without(range(3, 20))
    assert repr(many).endswith(").without(17 rows: 3, 4, 5, 6, ...)")
    with pytest.raises(
        DataError, match=r"numbers from 0 to 49. Received: 5 rows: 50, 51, 52, 53, \.\.\."
    ):
        many.without(range(40, 55))


def test_arrays_are_held_and_not_copied():
    x = np.arange(6)
    assert batches(x, 2).arrays is x
    assert batches([x], 2, shuffle=True).arrays[0] is x


def test_what_is_delivered_is_not_the_callers_memory():
    x = np.zeros(6)
    for data in (batches(x, 2), batches(x, 2, shuffle=True)):
        iterator = iter(data)
        next(iterator)[:] = 1
        iterator.read(1)[0][:] = 1
    assert x.sum() == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_read_fills_what_allocate_gives(shuffle):
    made = []

    def allocate(shape, dtype):
        made.append(np.full(shape, 99, dtype))
        return made[-1]

    data = batches((np.arange(10, dtype=np.int16), np.ones((10, 3))), 2, shuffle=shuffle)
    tree, m = iter(data).read(4, allocate)
    assert m == 4
    assert [a.shape for a in made] == [(4, 2), (4, 2, 3)]
    assert tree[0] is made[0]
    assert tree[1] is made[1]
    assert (made[0] < 99).all()
    assert (made[1] == 1).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_strided_arrays(shuffle):
    x = np.asfortranarray(np.arange(24).reshape(8, 3))[::2]
    data = batches(x, 2, shuffle=shuffle)
    got, _ = iter(data).read(2)
    np.testing.assert_array_equal(got, x[data.order(0)].reshape(2, 2, 3))


def test_bfloat16_stays_bfloat16():
    x = np.arange(8).astype(ml_dtypes.bfloat16)
    got, _ = iter(batches(x, 4, shuffle=True)).read(2)
    assert got.dtype == ml_dtypes.bfloat16
    assert sorted(got.reshape(-1).tolist()) == list(range(8))


class Pair(NamedTuple):
    image: np.ndarray
    label: np.ndarray


def test_named_tuples_stay_named_tuples():
    got = next(iter(batches(Pair(np.zeros((4, 2)), np.arange(4)), 2)))
    assert isinstance(got, Pair)
    assert got.label.tolist() == [0, 1]


def test_an_epoch_far_away_is_reached_without_reading_up_to_it():
    iterator = iter(batches(np.arange(4), 2, shuffle=True, seed=1, repeat=True))
    iterator.seek(2_000_001)
    expected = np.random.default_rng([1, 1_000_000]).permutation(4)[2:]
    assert next(iterator).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            {"x": np.zeros(3), "y": {"z": np.zeros(4)}},
            r"same leading size, but leaf \['x'\] has 3 and leaf \['y'\]\['z'\] has 4",
        ),
        ((np.zeros(3), 5), r"leading dimension to cut batches from, but leaf \[1\] is a single"),
        ([1, 2, 3], r"A list is read as a tree of arrays: write np\.asarray"),
        (Pair(np.zeros(3), np.array(["a", "b", "c"])), r"leaf \.label holds strings \(dtype <U1\)"),
        ({"x": np.array([object()] * 3)}, r"leaf \['x'\] holds Python objects"),
        (np.zeros((3,), "V4"), "the array holds structured or raw data"),
        ({}, "the tree holds no array"),
        (None, "the tree holds no array"),
        ((np.zeros((3, 0)),), r"size 0, but leaf \[0\] has the shape \(3, 0\)"),
    ],
)
def test_bad_arrays_are_answered_with_the_leafs_path(arrays, text):
    with pytest.raises(DataError, match=text):
        batches(arrays, 2)


def test_unreadable_leaf():
    class Awkward:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("no")

    with pytest.raises(DataError, match=r"leaf \['x'\] is a Awkward, which numpy cannot read \(no"):
        batches({"x": Awkward()}, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, r"batch_size must be a whole number >= 1\. Received: batch_size=0"),
        ({"batch_size": 2.5}, r"Received: batch_size=2\.5"),
        ({"batch_size": True}, "Received: batch_size=True"),
        ({"batch_size": 2, "seed": -1}, r"seed must be a whole number >= 0"),
        (
            {"batch_size": 4, "drop_remainder": True},
            r"A batch of 4 cannot be cut from 3 examples.*drop_remainder=False",
        ),
        (
            {"batch_size": 4, "repeat": True},
            r"A batch of 4 cannot be cut from 3 examples, and training drops what is smaller\. Choose",
        ),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(DataError, match=text):
        batches(np.arange(3), **options)


def test_fewer_examples_than_a_batch_has():
    recipe = batches(np.arange(3), 4)
    with pytest.raises(DataError, match="from 3 examples, and training drops what is smaller"):
        iter(recipe)
    assert [len(part) for part in recipe.keeping_rows()] == [3]
    assert [len(part) for part in batches(np.arange(3), 4, drop_remainder=False)] == [3]


def test_bad_places():
    iterator = iter(batches(np.arange(6), 2))
    with pytest.raises(DataError, match=r"n must be a whole number >= 0. Received: n=-1"):
        iterator.read(-1)
    with pytest.raises(DataError, match=r"which has 3 batches. Received: position=4"):
        iterator.seek(4)
    with pytest.raises(DataError, match="epoch must be a whole number >= 0"):
        iterator.batches.iterate(epoch=-1)
    iterator.seek(3)
    assert list(iterator) == []


def test_a_state_of_another_recipe_is_refused():
    state = iter(batches(np.arange(6), 2, shuffle=True, seed=1)).get_state()
    other = iter(batches(np.arange(6), 2, shuffle=True, seed=2))
    with pytest.raises(DataError, match="a state with seed=1, but these batches have seed=2"):
        other.set_state(state)
    with pytest.raises(DataError, match="num_examples=None"):
        other.set_state({})
    del state["position"]
    with pytest.raises(DataError, match="Received: position=None"):
        iter(batches(np.arange(6), 2, shuffle=True, seed=1)).set_state(state)
    assert isinstance(other, BatchIterator)
    assert other.position == 0


@pytest.mark.parametrize("name", ["shuffle", "repeat", "drop_remainder"])
def test_flags_are_true_or_false(name):
    for wrong in (np.ones(2), "no", 2, 1.0):
        with pytest.raises(DataError, match=f"{name} is True or False. Received: {name}="):
            batches(np.zeros((8, 2), np.float32), 4, **{name: wrong})
    assert getattr(batches(np.zeros((8, 2), np.float32), 4, **{name: np.bool_(True)}), name) is True


def test_a_smaller_last_batch_is_kept_by_a_flag_of_numpy():
    data = batches(np.zeros((6, 2), np.float32), 4, drop_remainder=np.bool_(False))
    assert [len(batch) for batch in data] == [4, 2]


@pytest.mark.parametrize("rows", [[1.5], True, ["a"], [-1]])
def test_rows_that_are_left_out_are_whole_numbers(rows):
    with pytest.raises(
        DataError,
        match="row must be a whole number >= 0 .its number in the arrays.. Received: row=",
    ):
        batches(np.arange(5), 2).without(rows)
