"""Trees, their paths and their leaves, with JAX's reading of containers as the oracle."""

from collections import OrderedDict
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.base.trees import describe, leaves, map_leaves, paths, rebuild
from tailrace.data.dtypes import is_numeric
from tailrace.data.leaves import to_numpy, to_numpy_tree
from tailrace.errors import DataError

jax = pytest.importorskip("jax")


class Point(NamedTuple):
    x: object
    y: object


trees = st.recursive(
    st.one_of(st.integers(), st.none()),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Point, children, children),
        # Sorted, because JAX visits a dict by its sorted keys and we keep the order it has.
        st.dictionaries(st.sampled_from("abc"), children).map(lambda d: dict(sorted(d.items()))),
    ),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_leaves_paths_and_rebuilding_agree_with_jax(tree):
    with_paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    assert leaves(tree) == [leaf for _, leaf in with_paths]
    assert paths(tree) == [jax.tree_util.keystr(path) for path, _ in with_paths]
    assert rebuild(tree, iter(leaves(tree))) == tree
    same = map_leaves(lambda leaf: leaf, tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)


def test_mappings_become_dicts_in_their_own_order():
    got = map_leaves(str, OrderedDict([("b", 1), ("a", 2)]))
    assert type(got) is dict
    assert list(got.items()) == [("b", "1"), ("a", "2")]


def test_a_long_tree_is_described_shortly():
    assert describe([np.zeros(3)] * 100).endswith("...")
    assert len(describe([np.zeros(3)] * 100)) == 160


def test_what_counts_as_numbers():
    yes = ["bool", "int8", "uint64", "float16", "complex64", ml_dtypes.bfloat16, ml_dtypes.int4]
    no = ["O", "S3", "U3", "M8[s]", "m8[s]", "V8", [("a", "i4")]]
    assert all(is_numeric(np.dtype(dtype)) for dtype in yes)
    assert not any(is_numeric(np.dtype(dtype)) for dtype in no)


def test_leaves_of_jax_and_python():
    got = to_numpy_tree({"a": jax.numpy.ones((2,), "bfloat16"), "b": True, "c": [1.5]})
    assert got["a"].dtype == ml_dtypes.bfloat16
    assert got["b"].dtype == bool
    assert got["c"][0].shape == ()
    assert all(type(leaf) is np.ndarray for leaf in leaves(got))


def test_the_path_is_in_the_sentence():
    with pytest.raises(DataError, match=r"leaf \['a'\]\[1\] holds strings"):
        to_numpy_tree({"a": (1, "text")})

    class Unreadable:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("no numbers here")

    with pytest.raises(DataError, match=r"leaf \['k'\] is a .*, which numpy cannot read"):
        to_numpy_tree({"k": Unreadable()})
    with pytest.raises(DataError, match=r"leaf \[0\] holds dates"):
        to_numpy("[0]", np.datetime64("2024-01-01"))
    with pytest.raises(DataError, match=r"leaf \[0\] has the other one \(dtype >f4\). Convert it"):
        to_numpy("[0]", np.ones(2, ">f4"))
