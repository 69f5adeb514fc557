"""Tensors inside a wrapped module: names, taps, anchors, prints."""

import jax
import numpy as np
import pytest
import torch
from small_modules import SeedModel, cut, digits, line, seeded, train_plainly, training
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close
from tailrace.base.spans import device_times
from tailrace.base.spans import span as span_module
from tailrace.page.followed import FollowedRun
from tailrace.page.summary import numbers
from waits import Clock


class Deep(nn.Module):
    """Containers in containers, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(3, 3), nn.Tanh())})  # noqa: E731
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(3, 1)

    def forward(self, x, y):
        for block in self.blocks:
            x = block["mlp"](x)
        x = self.blocks[1]["mlp"](x)
        out = self.head(x)
        return out, nn.functional.mse_loss(out, y)


def test_names_carry_the_path_of_the_module():
    model, *_ = training(Deep)
    with pytest.raises(AssertionError, match="Model must be compiled before calling tensor_names"):
        model.tensor_names()
    model.compile(*line(4))
    names = model.tensor_names()
    assert names == sorted(names)
    for name in (
        "param/blocks.1.mlp.0.weight",
        "grad/blocks.1.mlp.0.weight",
        "accumulated/head.bias",
        "reduced/head.bias",
        "update/head.bias",
        "updated/head.bias",
        "activation/blocks.0.mlp",
        "activation/blocks.0.mlp.0",
        "activation/blocks.1.mlp.1",
        "activation/blocks.1.mlp#1",
        "activation/blocks.1.mlp#1.0",
        "cotangent/blocks.0.mlp",
        "input/x",
        "output/0",
        "output/1",
        "loss",
    ):
        assert name in names, name
    model(*line(4))
    assert model.tensor_names() == names


def hooked(reference, batch):
    """Activations and gradients that hooks see in plain PyTorch."""
    seen = {}

    def keep(name, out):
        seen[f"activation/{name}"] = out.detach().numpy()
        out.register_hook(lambda g: seen.__setitem__(f"cotangent/{name}", g.numpy()))

    for name, inner in reference.named_modules():
        if name:
            inner.register_forward_hook(lambda _m, _i, out, name=name: keep(name, out))
    reference(*batch)[1].backward()
    seen.update({f"grad/{n}": p.grad.numpy() for n, p in reference.named_parameters()})
    return seen


def test_taps_see_what_hooks_see():
    model, _, reference = training(observe=[tr.Tap("*", reduce="tensor")])
    batch = digits(4)
    model(*batch)
    expected = hooked(reference, batch)
    for name, value in expected.items():
        assert_close(model.records[name].values[0], value)
    assert_close(model.records["param/fc1.bias"].values[0], reference.fc1.bias.detach().numpy())
    assert_close(model.records["input/labels"].values[0], batch[1].numpy().astype(np.int32))


def test_records_cover_the_latest_call_and_change_nothing():
    model, module, _ = training(device_iterations=4, observe=[tr.Tap("grad/*", mode=tr.every(2))])
    plain, other, _ = training(device_iterations=4)
    for _ in range(2):
        assert_bits_equal(model(*digits(16))[0].numpy(), plain(*digits(16))[0].numpy())
    assert list(model.records["grad/fc1.weight"].steps) == [5, 7]
    assert_bits_equal(module.fc1.weight.detach().numpy(), other.fc1.weight.detach().numpy())


def test_observing_in_inference():
    module, _ = seeded(SeedModel)
    model = tt.inference_model(module.eval(), observe=["activation/fc1"], device_iterations=2)
    model(digits(8)[0])
    assert model.records["activation/fc1"].values["mean"].shape == (2,)
    assert not [name for name in model.tensor_names() if name.startswith(("cotangent", "grad"))]
    model.anchor_tensor("hidden", "activation/relu")
    x = digits(8)[0]
    model(x)
    expected = module.relu(module.fc1(x.flatten(1))).detach().numpy()
    assert_close(model.anchored_tensor("hidden").numpy(), expected)


def gradients(reference, batches, lr=0.1):
    """The gradient of fc2.bias in each microbatch, by plain SGD one microbatch a step."""
    found = []
    for batch in batches:
        train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=lr), [batch])
        found.append(reference.fc2.bias.grad.clone().numpy())
    return np.stack(found)


def test_anchors_have_modes_of_their_own():
    model, _, reference = training(device_iterations=6)
    for mode in ("all", "sum", "final"):
        model.anchor_tensor(mode, "grad/fc2.bias", output_mode=mode)
    model.anchor_tensor("every", "grad/fc2.bias", "every_n", 3)
    model.anchor_tensor("every2", "grad/fc2.bias", tr.every(2))
    model.anchor_tensor("as outputs", "grad/fc2.bias")
    batch = digits(24)
    model(*batch)
    expected = gradients(reference, cut(batch, 6))
    assert_close(model.anchored_tensor("all").numpy(), expected.reshape(-1))
    assert_close(model.anchored_tensor("sum").numpy(), expected.sum(0))
    assert_close(model.anchored_tensor("final").numpy(), expected[-1])
    assert_close(model.anchored_tensor("as outputs").numpy(), expected[-1])
    assert_close(model.anchored_tensor("every").numpy(), expected[[2, 5]].reshape(-1))
    assert_close(model.anchored_tensor("every2").numpy(), expected[1::2].reshape(-1))


def test_anchors_with_accumulation_and_replicas():
    model, _, reference = training(
        device_iterations=2, accumulation=3, replicas=2, optimizer=momentum, output_mode="all"
    )
    names = {
        "grad": "grad/fc1.weight",
        "after": "updated/fc1.weight",
        "sum": "accumulated/fc1.weight",
        "state": "optimizer/momentum_buffer/fc1.weight",
        "hidden": "activation/relu",
        "back": "cotangent/relu",
    }
    for name, tensor in names.items():
        model.anchor_tensor(name, tensor)
    model.anchor_tensor("last", "updated/fc1.weight", "final")
    model.anchor_tensor("third", "activation/relu", "every_n", 2)
    batch = digits(48)
    model(*batch)
    shapes = {name: tuple(model.anchored_tensor(name).shape) for name in names}
    assert shapes == {
        "grad": (12 * 8, 12),
        "after": (12 * 8, 12),
        "sum": (12 * 8, 12),
        "state": (12 * 8, 12),
        "hidden": (48, 8),
        "back": (48, 8),
    }
    hidden = reference.relu(reference.fc1(batch[0].flatten(1))).detach().numpy()
    assert_close(model.anchored_tensor("hidden").numpy()[:24], hidden[:24])
    kept = hidden[:24].reshape(3, 8, 8)[1]
    assert_close(model.anchored_tensor("third").numpy()[:8], kept)
    after = model.anchored_tensor("after").reshape(2, 6, 8, 12)
    assert (after[0] == after[0, 0]).all()
    assert_bits_equal(
        model.anchored_tensor("last").reshape(2, 8, 12)[1].numpy(), after[1, 0].numpy()
    )
    assert_bits_equal(after[1, 0].numpy(), model.module.fc1.weight.detach().numpy())


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def test_anchors_are_renewed_by_each_call():
    model, *_ = training()
    model.anchor_tensor("g", "grad/fc1.bias")
    with pytest.raises(AssertionError, match="No tensor with name g found"):
        model.anchored_tensor("g")
    model(*digits(4))
    first = model.anchored_tensor("g")
    assert model.anchored_tensor("g") is not first
    model(*digits(4, seed=3))
    assert not torch.equal(model.anchored_tensor("g"), first)
    with pytest.raises(AssertionError, match="No tensor with name h found"):
        model.anchored_tensor("h")
    model.anchor_tensor("odd", "grad/fc9.bias")
    with pytest.raises(tr.TailraceError, match="nearest names are: 'grad/fc"):
        model(*digits(4))


def test_anchoring_later_keeps_what_was_trained():
    model, module, reference = training(optimizer=momentum)
    batches = [digits(4, seed=n) for n in range(3)]
    model(*batches[0])
    model.anchor_tensor("g", "grad/fc1.bias")
    model(*batches[1])
    model(*batches[2])
    train_plainly(reference, momentum(reference), batches)
    assert_close(module.fc1.weight.detach().numpy(), reference.fc1.weight.detach().numpy())
    assert model.history.first_step == 2


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        out = tt.print_tensor(self.linear(x), "out", digits=3)
        return tt.identity_loss(out, reduction="sum")


def test_printing_forward_and_backward(capfd):
    module = Prints()
    model = tt.training_model(module, None, device_iterations=2)
    with torch.no_grad():
        module.linear.weight.copy_(torch.eye(2))
        module.linear.bias.zero_()
    model(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    printed = capfd.readouterr().err
    assert printed.count("out: (") == 2
    assert printed.count("out_gradient: (") == 2
    assert printed.index("1.00") < printed.index("out_gradient")
    module(torch.ones(1, 2))
    assert not capfd.readouterr().err
    with pytest.raises(tr.TailraceError, match="prints a tensor. Received: int"):
        tt.print_tensor(3)
    with pytest.raises(tr.errors.OptionError, match="float_format is one of"):
        tt.print_tensor(torch.ones(1), float_format="octal")  # also outside of a model


def test_stop_on_nonfinite_keeps_the_weights():
    model, module, reference = training(device_iterations=3, observe=[tr.stop_on_nonfinite()])
    x, y = digits(12)
    x[5] = float("nan")
    with pytest.raises(tr.errors.NonFiniteError) as caught:
        model(x, y)
    assert caught.value.step == 1
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), cut((x, y), 3)[:1])
    model.copy_weights_to_host()
    assert_close(module.fc1.weight.detach().numpy(), reference.fc1.weight.detach().numpy())


def test_names_and_values_with_a_warm_compile_cache(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    found = []
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            model, *_ = training(device_iterations=2)
            model.anchor_tensor("g", "grad/fc1.weight", "all")
            model(*digits(8))
            found.append((model.tensor_names(), model.anchored_tensor("g").numpy()))
            assert list(tmp_path.iterdir()), "something was cached"
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert found[0][0] == found[1][0]
    assert_bits_equal(found[0][1], found[1][1])


def test_runs_are_kept_on_disk(tmp_path):
    pytest.importorskip("zarr")
    model, *_ = training(
        device_iterations=2, run_dir=tmp_path / "run", observe=[tr.Tap("grad/fc1.*", reduce="norm")]
    )
    for _ in range(3):
        model(*digits(8))
    model.destroy()
    run = tr.open_run(tmp_path / "run")
    assert len(run.records["grad/fc1.weight"]) == 6
    assert "output/0" not in run.records


@pytest.mark.parametrize(("slow", "limit"), [("data", "data"), ("loop", "host")])
def test_a_run_says_what_it_is_bound_by(tmp_path, monkeypatch, slow, limit):
    pytest.importorskip("zarr")
    clock = Clock()
    for module in (device_times, span_module):
        monkeypatch.setattr(module, "time", clock)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            clock.now += 0.25 * (slow == "data")
            return tuple(part[0] for part in digits(1))

    model, *_ = training(run_dir=tmp_path / "run")
    for batch in tt.DataLoader(model, Rows(), batch_size=4):
        model(*batch)
        clock.now += 1.0 * (slow == "loop")
    model.destroy()
    times = tr.open_run(tmp_path / "run").executions["times"]
    expected = {name: 2.0 * (name == limit) for name in device_times.ACTIVITIES}
    assert dict(zip(expected, times[1:].sum(axis=0), strict=True)) == pytest.approx(expected)
    shown = dict(numbers(FollowedRun(tmp_path / "run")))
    assert shown["bound by"] == f"{limit}: the device waits for it 100 % of the time"
