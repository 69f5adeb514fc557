"""Memory of blocks is used again, and never while an array refers to it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.feeds import buffers, transfer
from tailrace.feeds.buffers import LENT_FROM, allocate

LARGE = (LENT_FROM // 4,)


@pytest.fixture(autouse=True)
def empty_pool():
    gc.collect()  # or what other tests left would come back in the middle of one of these
    buffers.trim()
    buffers.trim()
    yield
    buffers.trim()
    buffers.trim()


def address(array):
    return array.ctypes.data


def test_what_is_gone_is_lent_again():
    array = allocate(LARGE, np.float32)
    assert address(array) % 64 == 0
    before = address(array)
    view = array.reshape(2, -1)[1:]
    del array
    gc.collect()
    other = allocate(LARGE, np.float32)
    assert address(other) != before, "a view still looks at it"
    del view
    gc.collect()
    again = allocate(LARGE, np.int32)
    assert address(again) == before


def test_an_array_of_jax_keeps_its_memory():
    array = allocate(LARGE, np.float32)
    array[:] = 1
    on_device = jax.device_put(array)
    doubled = jax.jit(lambda x: 2 * x)(on_device)
    del array
    gc.collect()
    others = [allocate(LARGE, np.float32) for _ in range(3)]
    for other in others:
        other[:] = 7
    assert float(on_device.sum()) == LARGE[0]
    assert float(doubled.sum()) == 2 * LARGE[0]


def test_what_no_fit_has_used_goes_back_to_the_system():
    array = allocate(LARGE, np.float32)
    del array
    buffers.trim()
    assert buffers.idle_bytes(), "it may be wanted soon"
    buffers.trim()
    assert not buffers.idle_bytes()


def test_small_ones_are_not_lent():
    arrays = [allocate((3,), np.float32) for _ in range(3)]
    del arrays
    assert not buffers.idle_bytes()


def test_idle_memory_has_a_limit(monkeypatch):
    monkeypatch.setattr(buffers, "MOST_IDLE", 3 * LENT_FROM)
    arrays = [allocate(LARGE, np.float32) for _ in range(5)]
    del arrays
    gc.collect()
    assert 2 * LENT_FROM <= buffers.idle_bytes() <= 3 * LENT_FROM


def test_training_on_large_blocks_sees_each_element_once():
    """Many executions on lent memory: a block that was written too early would change a loss."""
    rows = LENT_FROM // 4 // 8
    elements = [np.full((rows,), i, np.float32) for i in range(64)]
    infeed = tr.InfeedQueue(elements, prefetch=2)
    outfeed = tr.OutfeedQueue()

    def body(total, x):
        outfeed.enqueue(x.mean())
        return total + x[0]

    program = tr.compile(lambda t: tr.repeat(8, body, t, infeed=infeed))
    total = jnp.float32(0)
    for _ in range(8):
        total = program(total)
    assert float(total) == sum(range(64))
    assert_bits_equal(outfeed.dequeue(), np.arange(64, dtype=np.float32))
    infeed.close()


# -- transfers in pieces ------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(transfer, "on_cpu", lambda: False)


@pytest.mark.cpu
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_put_in_pieces_is_the_array(accelerator, monkeypatch, rows):
    monkeypatch.setattr(transfer, "PIECE", 256)
    array = np.arange(rows * 24, dtype=np.float32).reshape(rows, 24)
    device = jax.devices()[1]
    for target in (device, jax.sharding.SingleDeviceSharding(device)):
        moved = transfer.put(array, target)
        assert moved.devices() == {device}
        assert_bits_equal(moved, array)


def test_put_over_several_devices_is_one_transfer(accelerator, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE", 256)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = np.arange(512, dtype=np.float32).reshape(64, 8)
    moved = transfer.put(array, sharding)
    assert moved.sharding == sharding
    assert_bits_equal(moved, array)


def test_put_of_a_single_number(accelerator):
    assert float(transfer.put(np.float32(3).reshape(()), jax.devices()[0])) == 3
