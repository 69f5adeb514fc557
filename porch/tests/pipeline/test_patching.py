"""Parts of buffers that are spread over devices, read and replaced."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from oracles import assert_bits_equal
from tailrace.devices import devices
from tailrace.devices.devices import REPLICA, STAGE
from tailrace.pipeline.running.buffer_writes import cut_out, patched


@pytest.mark.parametrize("each", [False, True])
def test_only_what_is_given_changes(each):
    lead = (2, 3) if each else (3,)
    whole = np.arange(np.prod(lead) * 8, dtype=np.float32).reshape(*lead, 2, 4)
    spec = PartitionSpec(REPLICA, STAGE) if each else PartitionSpec(STAGE)
    buffer = jax.device_put(whole, NamedSharding(devices.mesh(2, 3), spec))
    patches = {(0, 1): {3: np.float32([-1, -2])}, (0, 2): {0: np.int32([-3]), 7: np.float32([-4])}}
    if each:
        patches[1, 0] = {5: np.float32([-5])}
    expected = whole.reshape(*lead, 8).copy()
    for (replica, device), parts in patches.items():
        row = expected[replica, device] if each else expected[device]
        for place, value in parts.items():
            row[place : place + len(value)] = value
    found = patched(buffer, patches, each)
    assert found.sharding == buffer.sharding
    assert_bits_equal(np.asarray(found), expected.reshape(whole.shape))
    assert_bits_equal(np.asarray(buffer), whole)


@pytest.mark.parametrize("made", [np.arange, jax.numpy.arange])
def test_arrays_are_cut_out(made):
    flat = made(10, dtype=np.float32)
    one, two, three = cut_out(flat, ((1, (2, 2)), (7, ()), (8, (2,))))
    assert type(one) is type(flat)
    assert_bits_equal(one, np.float32([[1, 2], [3, 4]]))
    assert_bits_equal(two, np.float32(7))
    assert_bits_equal(three, np.float32([8, 9]))
