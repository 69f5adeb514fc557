"""Several processes share out a dataset; each has whole calls, and together they have every row."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from tailrace.compat import poptorch

MODES = list(poptorch.DataLoaderMode)


def options_of(number, processes, seed=None):
    options = poptorch.Options().deviceIterations(2)
    options.Distributed.configureProcessId(number, processes)
    return options if seed is None else options.randomSeed(seed)


def loader_of(number, processes, rows, seed=None, **given):
    dataset = TensorDataset(torch.arange(rows))
    return poptorch.DataLoader(options_of(number, processes, seed), dataset, batch_size=3, **given)


def read(loader):
    return [row for (batch,) in loader for row in batch.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [36, 41, 47])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_whole_calls_in_order(mode, rows, processes):
    """A call has 6 rows: process p of P has the p-th of P equal parts, of as many calls as fit."""
    each = 6 * (rows // (6 * processes))
    for number in range(processes):
        loader = loader_of(number, processes, rows, mode=mode)
        found = read(loader)
        loader.terminate()
        assert found == list(range(number * each, (number + 1) * each))
        assert len(loader) == each // 6


@pytest.mark.parametrize("rows", [36, 41])
def test_all_rows_if_none_is_dropped(rows):
    found = [read(loader_of(number, 3, rows, drop_last=False)) for number in range(3)]
    assert [row for each in found for row in each] == list(range(rows))
    assert [len(each) for each in found] == [
        len(part) for part in torch.arange(rows).tensor_split(3)
    ]


def test_an_order_for_all_processes_and_another_one_each_epoch():
    loaders = [loader_of(number, 2, 48, seed=5, shuffle=True) for number in range(2)]
    epochs = [[read(loader) for loader in loaders] for _ in range(2)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(48))
    assert epochs[0] != epochs[1]


def test_rules():
    with pytest.raises(poptorch.Error, match=r"Call options.randomSeed"):
        loader_of(0, 2, 12, shuffle=True)
    with pytest.raises(
        poptorch.Error, match="Processes are numbered from 0. Received: process 2 of 2"
    ):
        poptorch.Options().Distributed.configureProcessId(2, 2)

    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(12))

    with pytest.raises(poptorch.Error, match="auto_distributed_partitioning=False"):
        poptorch.DataLoader(options_of(0, 2), Endless())
    own = poptorch.DataLoader(options_of(0, 2), Endless(), 3, auto_distributed_partitioning=False)
    assert sum(len(batch) for batch in own) == 12
    rows = TensorDataset(torch.arange(12))
    with pytest.raises(poptorch.Error, match="A sampler decides about rows itself"):
        poptorch.DataLoader(options_of(0, 2), rows, 3, sampler=torch.utils.data.RandomSampler(rows))


def test_the_environment_says_which_process_this_is(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    options = poptorch.Options()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    options.Distributed.disable()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_each_process_may_infer():
    options = options_of(1, 2)
    model = poptorch.inferenceModel(torch.nn.Identity(), options)
    rows = TensorDataset(torch.arange(24.0))
    loader = poptorch.DataLoader(options, rows, 3)
    assert torch.cat([model(batch) for (batch,) in loader]).tolist() == list(range(12, 24))
