"""What leaves a device in few pieces is what was put into them."""

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.program.running import result_packing
from tailrace.program.running.result_packing import Packed, Packing


def test_a_tree_there_and_back(monkeypatch):
    monkeypatch.setattr(result_packing, "MOST_BYTES", 64)
    tree = {
        "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "b": [jnp.float32(7), None, jnp.zeros((0, 4))],
        "c": jnp.array([True, False]),
        "d": jnp.arange(3, dtype=jnp.bfloat16),
        "large": jnp.arange(40, dtype=jnp.float32),
        "key": jax.random.key(3),
        "e": jnp.ones((2, 2)),
        "f": 5,
    }
    made = Packing()
    arrays = jax.jit(made.pack)(tree)
    assert sorted((str(a.dtype), a.shape) for a in arrays) == [
        ("bfloat16", (3,)),
        ("bool", (2,)),
        ("float32", (11,)),
        ("float32", (40,)),
        ("int32", (1,)),
        ("key<fry>", ()),
    ]
    back = made.unpack(arrays)
    assert isinstance(back["a"], Packed)
    assert isinstance(back["large"], jax.Array)
    assert (jax.random.key_data(back.pop("key")) == jax.random.key_data(tree.pop("key"))).all()
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True),
        back,
        tree | {"f": np.int32(5)},
    )


def test_copies_and_dtypes_as_numpy_asks_for_them():
    whole = jnp.arange(4.0)
    one = Packed(whole, 1, (2,))
    assert np.array(one, copy=True).flags.writeable
    assert np.asarray(one, dtype=np.int32).tolist() == [1, 2]
    result_packing.start_copying([one, Packed(whole, 0, (1,))])
