"""A call that is dispatched in portions is the call that is dispatched whole, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from small_modules import SeedModel, digits, training
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from tailrace.torch.calls import arrays
from tailrace.torch.programs import portions
from tailrace.torch.programs.portions import lengths_of

STEPS, MICROBATCHES, BATCH = 12, 2, 4


@pytest.fixture
def divided(monkeypatch):
    """Calls are dispatched in portions, as on an accelerator, however small they are."""
    monkeypatch.setattr(portions, "on_accelerator", lambda runner: True)
    monkeypatch.setattr(portions, "LEAST_BYTES", 4 * BATCH * MICROBATCHES * 12 * 3)


class Noisy(SeedModel):
    """With dropout, and a buffer that each step changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, labels):
        x = self.norm(self.relu(self.fc1(torch.flatten(x, start_dim=1))))
        x = self.log_softmax(self.fc2(nn.functional.dropout(x, 0.5)))
        return x, self.loss(x, labels)


ANCHORS = {
    "all": ("grad/fc1.weight", "all"),
    "final": ("updated/fc1.weight", "final"),
    "activation": ("activation/relu", "final"),
    "every": ("activation/fc2", tr.every(3)),
}


def two_calls(observe=(), anchors=ANCHORS, **options):
    """Everything that one can see of two calls, and into how many portions they were divided."""
    torch.manual_seed(3)
    options = {"device_iterations": STEPS, "accumulation": MICROBATCHES} | options
    model, module, _ = training(Noisy, observe=observe, seed=5, **options)
    for name, (tensor, mode) in anchors.items():
        model.anchor_tensor(name, tensor, output_mode=mode)
    seen = []
    for call in range(2):
        out, loss = model(*digits(model.options.pieces * BATCH, seed=call))
        seen += [out, loss, model.history.loss, model.history["loss"]]
        seen += [model.anchored_tensor(name) for name in anchors]
        for key in sorted(model.records):
            record = model.records[key]
            seen += [record.steps, record.microbatches]
            seen += jax.tree.leaves(record.values)
    seen += module.state_dict().values()
    return [np.asarray(value) for value in seen], len(model._program._portions.lengths)


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


TAPS = [
    tr.Tap("grad/fc2.*", mode="all", reduce="stats"),
    tr.Tap("param/fc1.bias", mode="final", reduce="tensor"),
    tr.Tap("buffer/norm.running_*", mode="final", reduce="stats"),
]
PERIODIC = [tr.Tap("loss", mode=tr.every(3), reduce="tensor")]


@pytest.mark.parametrize(
    ("taps", "options"),
    [
        (TAPS, {"output_mode": "final"}),
        ((), {"output_mode": "all"}),
        ((), {"output_mode": tr.every(2)}),
        (PERIODIC, {"output_mode": "final", "accumulation": 1}),
    ],
)
def test_everything_is_as_of_one_execution(divided, monkeypatch, taps, options):
    seen, count = two_calls(taps, **options)
    assert count > 2
    monkeypatch.undo()
    whole, count = two_calls(taps, **options)
    assert count == 1
    same(seen, whole)


def test_sums_and_guards_are_not_divided(divided):
    for options in ({"output_mode": "sum"}, {"observe": [tr.stop_on_nonfinite("loss")]}):
        model, _, _ = training(device_iterations=STEPS, **options)
        model.compile(*digits(STEPS * 10))
        assert model._program._portions.lengths == (STEPS,)


def test_several_devices_are_not_divided(divided):
    model, _, _ = training(device_iterations=4, replicas=2)
    model.compile(*digits(64))
    assert model._program._portions.lengths == (4,)


def test_what_only_some_steps_make_is_not_divided(divided):
    """The last value of a branch may come from any step."""

    def loss_fn(w, x):
        return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(w * x).sum(), lambda: w.sum())

    def lengths(mode):
        tap = tr.Tap("activation/:tanh", mode=mode, reduce="tensor")
        trainer = tr.Trainer(loss_fn, optax.sgd(0.1), jnp.ones(3), observe=[tap])
        engine = trainer.engine
        engine.use([np.ones((400, 3), np.float32)])
        return len(portions.Portions(engine.runner, engine.sight, 12, resident=False).lengths)

    assert lengths("final") == 1
    assert lengths("all") > 2


@pytest.mark.parametrize("mode", ["all", "final"])
def test_inference(divided, monkeypatch, mode):
    module = SeedModel().eval()
    x, _ = digits(480)
    found = []
    for _ in range(2):
        model = tt.inference_model(module, device_iterations=12, output_mode=mode)
        model.anchor_tensor("hidden", "activation/relu", output_mode="all")
        out = model(x)
        found.append([out, model.anchored_tensor("hidden")])
        found[-1].append(len(model._program._portions.lengths) > 2)
        monkeypatch.undo()
    (out, hidden, cut), (whole, whole_hidden, whole_cut) = found
    assert cut
    assert not whole_cut
    assert torch.equal(out, whole)
    assert torch.equal(hidden, whole_hidden)


def test_compiling_first_is_compiling_all(divided):
    model, _, _ = training(device_iterations=STEPS)
    x, labels = digits(STEPS * 10)
    model.compile(x, labels)
    programs = [model._program._portions._body, model._program._portions._runner]
    before = [[e.compiled for e in runner._executables.values()] for runner in programs]
    assert len(model._program._portions.lengths) > 2
    model(x, labels)
    assert before == [[e.compiled for e in runner._executables.values()] for runner in programs]
    assert all(made is not None for runner in before for made in runner)


def test_tensors_on_the_device_need_no_portions(divided, monkeypatch):
    handed = []

    def reshaped(tensor, shape):
        handed.append(shape)
        return jnp.asarray(arrays.array_of(tensor).reshape(shape))

    from tailrace.torch.calls import inputs

    monkeypatch.setattr(inputs, "is_resident", lambda tensor: True)
    monkeypatch.setattr(inputs, "rows_of", reshaped)
    model, _, _ = training(device_iterations=STEPS)
    model(*digits(STEPS * 10))
    assert model._program._portions.lengths == (STEPS,)
    assert len(handed) == 2


@pytest.mark.parametrize(
    ("steps", "megabytes", "period", "ending", "expected"),
    [
        (100, 5, 1, True, (49, 49, 2)),
        (100, 10, 1, True, (24, 24, 24, 24, 4)),
        (100, 300, 1, True, (*[6] * 16, 4)),
        (100, 10, 1, False, (25, 25, 25, 25)),
        (100, 10, 10, True, (20, 20, 20, 20, 20)),
        (100, 20, 7, True, (100,)),
        (100, 2, 1, True, (100,)),
        (1, 300, 1, True, (1,)),
        (2, 300, 1, True, (1, 1)),
        (97, 10, 1, False, (25, 25, 25, 22)),
    ],
)
def test_lengths(steps, megabytes, period, ending, expected):
    found = lengths_of(steps, megabytes << 20, period, ending)
    assert found == expected
    assert sum(found) == steps
    assert len(set(found)) <= 2
