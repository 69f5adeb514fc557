"""The loader joins the batches of a call, with PyTorch's own loader underneath."""

import logging
import threading

import pytest
import torch
from small_modules import digits, training
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

import tailrace as tr
import tailrace.torch as tt
from tailrace.devices import devices
from tailrace.feeds import waiting
from waits import LIMIT_S, Clock

ROWS = TensorDataset(torch.arange(103), torch.arange(103) * 2)


def sizes(loader):
    return [len(batch[0]) for batch in loader]


def test_batches_hold_a_whole_call():
    options = tt.ModelOptions(device_iterations=2, accumulation=3, replicas=2)
    loader = tt.DataLoader(options, ROWS, batch_size=4)
    assert loader.combined_batch_size == 48
    assert sizes(loader) == [48, 48]
    assert len(loader) == 2
    assert torch.equal(torch.cat([x for x, _ in loader]), torch.arange(96))
    model, *_ = training(device_iterations=2)
    x, y = digits(20)
    for batch in tt.DataLoader(model, TensorDataset(x, y), batch_size=4, shuffle=True):
        model(*batch)
    assert model.history.first_step == 2


@pytest.mark.parametrize("mode", ["sync", "async", "async_rebatched"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_modes_deliver_the_same(mode, drop_last):
    loader = tt.DataLoader(5, ROWS, batch_size=4, mode=mode, drop_last=drop_last)
    assert sizes(loader) == [20] * 5 + [3] * (not drop_last)
    assert len(loader) == 5 + (not drop_last)
    for _ in range(2):
        rows = torch.cat([x for x, _ in loader])
        assert torch.equal(rows, torch.arange(len(rows)))
    assert not [t for t in threading.enumerate() if t.name == "tailrace-loader"]


def test_an_iteration_that_is_left_leaves_no_thread():
    loader = tt.DataLoader(1, ROWS, batch_size=2, mode="async", async_options={"buffer_size": 2})
    iterator = iter(loader)
    next(iterator)
    loader.terminate()
    assert not [t for t in threading.enumerate() if t.name == "tailrace-loader"]


@pytest.mark.parametrize("size", [0, 1, 50])
def test_every_batch_comes_whatever_is_read_ahead(size):
    options = {"mode": "async", "async_options": {"buffer_size": size}}
    loader = tt.DataLoader(1, ROWS, batch_size=2, **options)
    assert len(list(loader)) == len(loader)


def test_errors_of_the_dataset_arrive():
    class Fails(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                raise LookupError("row 5")
            return torch.tensor(index)

    for mode in ("sync", "async"):
        with pytest.raises(LookupError, match="row 5"):
            list(tt.DataLoader(1, Fails(), batch_size=2, mode=mode))


class Shared(IterableDataset):
    """101 rows, shared out to workers by hand."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        share = -(-101 // info.num_workers)
        start = info.id * share
        return iter(range(start, min(start + share, 101)))


def begin(_):
    """What a worker does first; a function that can be sent to it."""


@pytest.mark.filterwarnings("ignore:os.fork")  # the workers do not touch JAX
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 2 worker"
)  # where there is one core
@pytest.mark.parametrize(("mode", "expected"), [("sync", 24), ("async_rebatched", 25)])
def test_rebatching_loses_one_remainder_only(mode, expected):
    loader = tt.DataLoader(
        1,
        Shared(),
        batch_size=4,
        mode=mode,
        num_workers=2,
        worker_init_fn=begin,
        persistent_workers=False,
    )
    batches = list(loader)
    assert len(batches) == expected
    assert all(len(batch) == 4 for batch in batches)


def test_workers_are_not_forked_from_a_process_with_an_accelerator(monkeypatch):
    """That has started: a fork of it dies. Who gives a context decides."""
    started = []
    monkeypatch.setattr(
        torch.utils.data.DataLoader,
        "__iter__",
        lambda self: started.append(self.multiprocessing_context) or iter(()),
    )
    for platform, given in [("cpu", None), ("gpu", None), ("gpu", "spawn")]:
        monkeypatch.setattr(devices, "platform", lambda found=platform: found)
        list(tt.DataLoader(1, ROWS, num_workers=1, multiprocessing_context=given))
    ways = [context and context.get_start_method() for context in started]
    assert ways == [None, "forkserver", "spawn"]


def test_samplers_and_elements_as_they_are():
    sampler = BatchSampler(SequentialSampler(ROWS), 4, drop_last=True)
    loader = tt.DataLoader(3, ROWS, batch_sampler=sampler)
    assert loader.combined_batch_size == 12
    assert sizes(loader) == [12] * 8
    assert sizes(tt.DataLoader(3, ROWS, batch_sampler=sampler, drop_last=False))[-1] == 4
    bare = tt.DataLoader(3, ROWS, batch_size=None)
    assert bare.combined_batch_size is None
    assert next(iter(bare))[0].shape == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": "x"}, "must know how many there are"),
        ({"mode": "later"}, "The mode of a loader is one of 'sync', 'async'"),
        (
            {"mode": "async_rebatched", "rebatched_worker_size": 99},
            "rebatched_worker_size is at most",
        ),
        ({"batch_sampler": [[0]], "batch_size": 2}, "goes with neither batch_size nor shuffle"),
        ({"async_options": {"rebatched_size": 3}}, "async_options has 'buffer_size'"),
    ],
)
def test_what_is_refused(arguments, message):
    given = {"options": 3, "dataset": ROWS, **arguments}
    with pytest.raises(tr.TailraceError, match=message):
        tt.DataLoader(**given)


def test_a_dataset_that_blocks_is_noted(monkeypatch, caplog):
    """Batches that are read ahead: who waits for one hears of it, with its number."""
    clock, opened, wait = Clock(), threading.Event(), waiting.wait

    class Slow(IterableDataset):
        def __iter__(self):
            for number in range(4):
                assert number != 2 or opened.wait(LIMIT_S), "something waits for it"
                yield torch.full((1,), float(number))

    def ten_seconds_later(*args, **kwargs):
        clock.now += 10
        if "Still waiting for batch 2 of a loader (Slow), for " in caplog.text:
            opened.set()
        return wait(*args, **kwargs)

    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    monkeypatch.setattr(waiting, "wait", ten_seconds_later)
    with caplog.at_level(logging.WARNING, "tailrace"):
        found = [float(x) for x in tt.DataLoader(1, Slow(), batch_size=1, mode="async")]
    assert found == [0, 1, 2, 3]
    assert opened.is_set()
