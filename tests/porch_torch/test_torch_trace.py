"""The timeline of a PyTorch training: what the host does, read back from the file."""

import pytest
import torch
from small_modules import Regression, line, seeded

import tailrace as tr
import tailrace.torch as tt
from timelines import Timeline, no_overlap


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_host_says_what_it_does(tmp_path, mode):
    model = tt.training_model(seeded(Regression)[0], device_iterations=2)
    data = torch.utils.data.TensorDataset(*line(24))
    loader = tt.DataLoader(model, data, batch_size=4, mode=mode)
    with tr.trace(tmp_path, operations=0) as timeline:
        for batch in loader:
            loss = model(*batch)[1]
            tr.counter("mine", loss)
    loader.terminate()
    found = Timeline(timeline.path)
    for name, least in {
        "dataset wait": 3,
        "infeed copy": 3,
        "compilation": 1,
        "dispatch": 3,
        "execution wait": 3,
        "outfeed copy": 3,
    }.items():
        assert len(found.named(name)) >= least, name
    executions = found.slices["executions"]
    assert no_overlap(executions)
    assert [one.about["first_step"] for one in executions] == [0, 2, 4]
    assert len(found.values["mine"]) == len(found.values["loss"]) == 3
