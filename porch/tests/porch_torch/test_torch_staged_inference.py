"""Inference of a module whose blocks are on several devices."""

import copy

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close
from tailrace.program.running.loop_state import Buffer
from tailrace.torch.programs import infer_pipelined
from tailrace.torch.programs.infer import InferenceProgram
from tailrace.torch.programs.infer_pipelined import StagedInferenceProgram


class Staged(nn.Module):
    """Three blocks; what the first makes is returned as well, and the third uses an input again."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        with tt.Block("one", device=0):
            hidden = self.norm(torch.tanh(self.a(x)))
        with tt.Block("two", device=1):
            out = torch.tanh(self.b(hidden))
        with tt.Block("three", device=2):
            return {"out": self.c(out) + x.sum(), "hidden": hidden}


def made(training=False):
    torch.manual_seed(0)
    module = Staged().train(training)
    x = torch.randn(4 * 60, 3)
    return module, copy.deepcopy(module), x


def plainly(reference, x, batches):
    outs = [reference(part) for part in x.chunk(batches)]
    return {name: torch.cat([out[name] for out in outs]).detach().numpy() for name in outs[0]}


@pytest.mark.parametrize(
    ("iterations", "training", "options"),
    [
        (60, False, {}),
        (60, True, {}),
        (7, True, {}),
        (1, False, {}),
        (6, False, {"replicas": 2}),
        (8, True, {"execution": "sharded"}),
        (8, False, {"stages": [["one"], ["two", "three"]]}),
    ],
)
def test_outputs_are_those_of_the_plain_module(iterations, training, options):
    module, reference, x = made(training)
    replicas = options.get("replicas", 1)
    model = tt.inference_model(module, device_iterations=iterations, **options)
    x = x[: 4 * iterations * replicas]
    for _ in range(2):
        out = model(x)
        assert isinstance(model._program, StagedInferenceProgram)
        expected = plainly(reference, x, iterations * replicas)
        assert {n: tuple(v.shape) for n, v in out.items()} == {
            n: v.shape for n, v in expected.items()
        }
        for name in expected:
            assert_close(out[name].numpy(), expected[name])
    for name, value in model._program.buffers.items():
        assert_close(np.asarray(value), reference.state_dict()[name].numpy())


@pytest.mark.cpu
def test_each_stage_is_on_its_device():
    module, _, x = made()
    model = tt.inference_model(module, device_iterations=60)
    model.anchor_tensor("middle", "activation/b", "final")
    model(x)
    runner = model._program.runner
    assert runner.placement.mesh.devices.shape == (1, 3)
    assert runner.per_pass == 20
    assert model._program._passes == 3
    assert model.tensors()["activation/b"].stage == 1
    assert {"param/c.weight", "buffer/norm.running_mean", "input/x"} <= set(model.tensor_names())
    held = [
        value for key, value in model._program.loop_state.values.items() if isinstance(key, Buffer)
    ]
    assert held
    assert all(len(value.sharding.device_set) == 3 for value in held)


def test_anchors_and_records_count_batches():
    """As on one device, although the loop makes passes of many batches."""
    anchors = {
        "all": ("activation/b", "all"),
        "final": ("activation/c", "final"),
        "sum": ("activation/c", "sum"),
        "every": ("activation/norm", tr.every(15)),
        "param": ("param/c.weight", "final"),
        "input": ("input/x", tr.every(20)),
    }
    taps = [
        tr.Tap("activation/c", mode=tr.every(12), reduce="stats"),
        tr.Tap("activation/a", mode="all", reduce="norm"),
        tr.Tap("activation/b", mode="final", reduce="stats"),
    ]
    found = []
    for blocks in (True, False):
        module, _, x = made()
        stages = "device" if blocks else [["one", "two", "three"]]
        model = tt.inference_model(module, device_iterations=60, observe=taps, stages=stages)
        for name, (tensor, mode) in anchors.items():
            model.anchor_tensor(name, tensor, output_mode=mode)
        model(x)
        model(x)
        assert isinstance(model._program, StagedInferenceProgram) is blocks
        seen = {name: model.anchored_tensor(name).numpy() for name in anchors}
        for key in sorted(model.records):
            record = model.records[key]
            names = record.values.dtype.names or ()
            values = [record.values[name] for name in names] or [record.values]
            seen[key] = [record.steps, record.microbatches, record.replicas, *values]
        found.append(seen)
    staged, alone = found
    assert staged.keys() == alone.keys()
    for name in alone:
        jax.tree.map(assert_close, staged[name], alone[name])
    assert list(staged["activation/c", "stats"][0]) == [71, 83, 95, 107, 119]


def test_it_predicts_with_what_was_learnt():
    class Learning(Staged):
        def forward(self, x):
            out = super().forward(x)
            tt.Block.start("loss", 2)
            return out, tt.identity_loss(out["out"].square(), reduction="mean")

    torch.manual_seed(0)
    module = Learning()
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), 0.1), accumulation=5)
    predict = tt.inference_model(module, device_iterations=6)
    x = torch.randn(24, 3)
    before, _ = predict(x)
    model(torch.randn(20, 3))
    after, _ = predict(x)
    assert not torch.equal(before["out"], after["out"])
    reference = Learning().train()
    reference.load_state_dict(module.state_dict())
    expected = plainly(lambda part: reference(part)[0], x, 6)
    assert_close(after["out"].numpy(), expected["out"])


def test_too_few_devices(monkeypatch, caplog):
    monkeypatch.setattr(infer_pipelined, "available", lambda: [None, None])
    module, reference, x = made()
    model = tt.inference_model(module, device_iterations=60)
    with caplog.at_level("INFO"):
        out = model(x)
    assert type(model._program) is InferenceProgram
    assert "are on 3 devices" in caplog.text
    assert "there are 2" in caplog.text
    assert_close(out["out"].numpy(), plainly(reference, x, 60)["out"])


def test_weights_can_be_given_anew():
    module, reference, x = made()
    model = tt.inference_model(module, device_iterations=12)
    model(x[:48])
    state = {name: value * 2 for name, value in reference.state_dict().items()}
    model.load_state_dict(state)
    reference.load_state_dict(state)
    expected = plainly(reference, x[:48], 12)
    out = model(x[:48])
    assert_close(out["out"].numpy(), expected["out"])
    assert_bits_equal(model(x[:48])["out"].numpy(), out["out"].numpy())
