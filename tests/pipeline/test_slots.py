"""Layouts: what one device writes into the common buffers it reads back, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import assert_bits_equal
from tailrace.pipeline.lowering.buffers import Form, Layout

# The machine may be busy: no limit on the time of one example.
drawn = settings(deadline=None, max_examples=25)

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "float16", "key")


def forms():
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.just((70, 80))

    def make(shape, dtype, depth):
        kind = jax.random.key(0).dtype if dtype == "key" else jnp.dtype(dtype)
        return Form(() if dtype == "key" else shape, kind, depth)

    return st.builds(make, shapes, st.sampled_from(DTYPES), st.integers(1, 3))


def devices():
    return st.lists(st.lists(forms(), max_size=4), min_size=1, max_size=3)


def value(form, seed):
    rng = np.random.default_rng(seed)
    if form.is_key:
        return jax.random.key(seed)
    return jnp.asarray(rng.integers(0, 2, form.shape), form.dtype)


def bits(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@drawn
@given(devices(), st.booleans())
def test_what_is_written_is_read(forms, together):
    layout = Layout([dict(enumerate(each)) for each in forms], together=together)
    for device, own in enumerate(forms):
        buffers = layout.zeros()
        written = {}
        for key, form in enumerate(own):
            for index in range(form.depth):
                written[key, index] = value(form, 10 * key + index)
                at = index if form.depth > 1 else None
                layout.write(device, buffers, key, written[key, index], at)
        for (key, index), expected in written.items():
            at = index if own[key].depth > 1 else None
            found = layout.read(device, buffers, key, at)
            assert found.dtype == expected.dtype
            assert_bits_equal(bits(found), bits(expected))


@drawn
@given(devices(), st.booleans())
def test_slots_of_a_device_do_not_overlap_and_fit(forms, together):
    layout = Layout([dict(enumerate(each)) for each in forms], together=together)
    for device, slots in enumerate(layout.slots):
        taken = {}
        for slot in slots.values():
            stop = slot.offset + slot.form.size * slot.form.depth
            buffer = layout.buffers[slot.buffer]
            assert stop <= buffer.size
            assert buffer.dtype == slot.form.stored.dtype
            for start, end in taken.setdefault(slot.buffer, []):
                assert stop <= start or slot.offset >= end
            taken[slot.buffer].append((slot.offset, stop))
        assert layout.used(device) <= layout.nbytes
        assert layout.used(device) == sum(form.nbytes for form in forms[device])


@drawn
@given(devices())
def test_messages_have_one_buffer_for_each_dtype(forms):
    layout = Layout([dict(enumerate(each)) for each in forms], together=True)
    kinds = {str(form.stored.dtype) for each in forms for form in each}
    assert sorted(str(buffer.dtype) for buffer in layout.buffers) == sorted(kinds)


def test_an_index_may_be_traced():
    form = Form((2, 3), jnp.dtype("float32"), depth=4)
    layout = Layout([{"a": form, "b": Form((5,), jnp.dtype("float32"))}])

    @jax.jit
    def write_and_read(index, x):
        buffers = layout.zeros()
        layout.write(0, buffers, "a", x, index)
        return [layout.read(0, buffers, "a", i) for i in range(4)]

    x = jnp.arange(6.0).reshape(2, 3)
    for index in range(4):
        found = write_and_read(index, x)
        for i, each in enumerate(found):
            assert_bits_equal(each, x if i == index else jnp.zeros_like(x))


def test_stages_that_look_alike_are_not_padded():
    form = Form((100, 100), jnp.dtype("float32"))
    layout = Layout([{"w": form}, {"v": form}])
    assert layout.nbytes == layout.used(0) == layout.used(1) == form.nbytes


def test_unequal_stages_share_the_largest_buffers():
    large, small = (Form((n, 100), jnp.dtype("float32")) for n in (200, 50))
    layout = Layout([{"a": large, "b": small}, {"c": small}])
    assert layout.nbytes == large.nbytes + small.nbytes
    assert layout.nbytes - layout.used(1) == large.nbytes  # what padding costs device 1


@pytest.mark.parametrize("each", [False, True])
def test_values_that_differ_per_replica_have_separate_buffers(each):
    forms = {
        "a": Form((3,), jnp.dtype("float32"), each=each),
        "b": Form((3,), jnp.dtype("float32")),
    }
    assert len(Layout([forms]).buffers) == 1 + each
