"""A wrapped module trains as plain PyTorch does: losses, outputs, weights, buffers, random numbers."""

import copy
import pickle

import pytest
import torch
from small_modules import (
    Regression,
    SeedModel,
    cut,
    digits,
    line,
    program_of,
    seeded,
    train_plainly,
    training,
)
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close


def weights(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("iterations", "microbatches", "replicas", "reduction"),
    [(1, 1, 1, "mean"), (3, 1, 1, "mean"), (2, 3, 1, "mean"), (2, 3, 1, "sum"), (2, 2, 2, "sum")],
)
def test_trains_like_pytorch(iterations, microbatches, replicas, reduction):
    pieces = iterations * microbatches * replicas
    model, module, reference = training(
        device_iterations=iterations,
        accumulation=microbatches,
        replicas=replicas,
        reduction=reduction,
        output_mode="all",
    )
    optimizer = sgd(reference)
    for call in range(2):
        batch = digits(4 * pieces, seed=call)
        out, loss = model(*batch)
        expected = train_plainly(
            reference, optimizer, cut(batch, pieces), microbatches, replicas, reduction
        )
        assert_close(loss.numpy().reshape(-1), torch.tensor(expected).numpy())
        assert out.shape == (4 * pieces, 4)
    assert_close(weights(module), weights(reference))


@pytest.mark.parametrize("shared", [False, True])
def test_state_in_shares_and_activations_elsewhere_change_nothing(shared):
    """The options about memory, with the optimizer that has most state."""
    kept = {
        "shard_optimizer_state": shared,
        "offload_activations": not shared,
        "offload_optimizer_state": not shared,
    }
    found = []
    for options in ({}, kept):
        model, module, _ = training(
            lambda: SeedModel(hidden=128),  # large enough for its state to be shared
            optimizer=lambda m: tt.optim.AdamW(m.parameters(), lr=0.01),
            device_iterations=2,
            accumulation=2,
            replicas=2,
            **options,
        )
        for call in range(2):
            model(*digits(4 * 8, seed=call))
        found.append(weights(module))
    assert_close(found[1], found[0])
    decided = " ".join(program_of(model).engine.memory.decisions)
    assert ("2 of 10 leaves" in decided) is shared


def test_weights_come_back_when_they_are_read():
    model, module, reference = training()
    before = module.fc1.weight.detach().clone()
    batch = digits(4)
    model(*batch)
    train_plainly(reference, sgd(reference), [batch])
    ways = {
        "attribute": lambda: module.fc1.weight,
        "parameters": lambda: next(iter(module.parameters())),
        "state_dict": lambda: module.state_dict()["fc1.weight"],
        "through the model": lambda: model.fc1.weight,
        "inner module": lambda: dict(module.fc1.named_parameters())["weight"],
    }
    for way in ways.values():
        with torch.no_grad():
            module.__dict__["_modules"]["fc1"].__dict__["_parameters"]["weight"].copy_(before)
        model._dirty = True
        assert_close(way().detach().numpy(), reference.fc1.weight.detach().numpy())
    assert not model.copy_weights_to_host_if_needed()
    model(*batch)
    assert model.copy_weights_to_host_if_needed()


def test_a_wrapped_module_is_still_itself():
    model, module, _ = training()
    model(*digits(4))
    assert isinstance(module, SeedModel)
    assert type(module).__name__ == "SeedModel"
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is SeedModel
    assert type(copy.deepcopy(module).fc1) is nn.Linear
    assert_bits_equal(weights(again), weights(module))
    with pytest.raises(tr.TailraceError, match="already been wrapped in 'training_model'"):
        tt.training_model(module)
    model.destroy()
    assert type(module) is SeedModel
    assert type(module.fc1) is nn.Linear
    tt.training_model(module).destroy()


def test_the_next_call_trains_what_was_written_on_the_host():
    model, module, _ = training(Regression, lr=0.0)
    x, y = line(4)
    model(x, y)
    with torch.no_grad():
        module.linear.weight.zero_()
        module.linear.bias.fill_(2.0)
    assert torch.equal(model(x, y)[0], torch.full((4, 1), 2.0))
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    assert torch.equal(model(x, y)[0], x.sum(1, keepdim=True) + 3.0)
    zero = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    model.load_state_dict(zero)
    assert torch.equal(model(x, y)[0], torch.zeros(4, 1))


def test_without_an_optimizer_it_is_sgd():
    model, module, reference = training(Regression, optimizer=lambda _: None)
    batch = line(4)
    model(*batch)
    train_plainly(reference, sgd(reference, 0.01), [batch])
    assert_close(weights(module), weights(reference))


def test_frozen_parameters_stay():
    module, reference = seeded(SeedModel)
    for one in (module, reference):
        one.fc1.weight.requires_grad_(False)
    model = tt.training_model(module, sgd(module, 0.5), device_iterations=3)
    batch = digits(12)
    model(*batch)
    train_plainly(reference, sgd(reference, 0.5), cut(batch, 3))
    assert_bits_equal(module.fc1.weight.numpy(), reference.fc1.weight.numpy())
    assert_close(weights(module), weights(reference))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head = nn.Linear(5, 1)

    def forward(self, x, y):
        out = self.head(self.body(x))
        return out, nn.functional.mse_loss(out, y)


def test_buffers_advance_with_each_microbatch():
    model, module, reference = training(Normed, device_iterations=2, accumulation=2)
    batch = line(32)
    model(*batch)
    train_plainly(reference, sgd(reference), cut(batch, 4), 2)
    assert module.body[1].num_batches_tracked == 4
    assert module.body[1].num_batches_tracked.dtype == torch.int64
    assert_close(weights(module), weights(reference))
    evaluated = tt.inference_model(module.eval())(*batch)
    assert_close(evaluated[0].numpy(), reference.eval()(*batch)[0].detach().numpy())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        out = self.drop(x) * self.scale
        return out, tt.identity_loss(out, reduction="mean")


def dropped(seed, calls=2):
    model = tt.training_model(Noisy(), None, device_iterations=3, output_mode="all", seed=seed)
    return [model(torch.ones(60, 10))[0] != 0 for _ in range(calls)]


def test_dropout_is_new_in_every_step_and_reproducible():
    first = dropped(1)
    steps = [step for call in first for step in call.chunk(3)]
    for number, step in enumerate(steps):
        assert 0.35 < step.float().mean() < 0.65
        for other in steps[:number]:
            assert not torch.equal(step, other)
    for again, once in zip(dropped(1), first, strict=True):
        assert torch.equal(again, once)
    assert not torch.equal(dropped(2)[0], first[0])


def test_the_module_s_mode_is_that_of_wrapping_and_can_be_changed():
    module = Noisy()
    model = tt.training_model(module, None)
    module.eval()
    x = torch.ones(60, 10)
    assert (model(x)[0] == 0).any()
    model.eval()
    assert not (model(x)[0] == 0).any()
    assert not module.training
    model.train()
    assert (model(x)[0] == 0).any()


def test_inference_uses_what_training_has_learnt():
    model, module, reference = training(lr=0.5)
    batch = digits(4)
    module.eval()
    inference = tt.inference_model(module)
    module.train()
    untrained = inference(batch[0])
    assert_close(untrained.numpy(), reference.eval()(batch[0]).detach().numpy())
    model(*batch)
    train_plainly(reference.train(), sgd(reference, 0.5), [batch])
    assert_close(inference(batch[0]).numpy(), reference.eval()(batch[0]).detach().numpy())
    assert model._dirty, "the host was not needed for this"


def test_halves_and_bfloats_train():
    for dtype in (torch.float16, torch.bfloat16):
        module = Regression(dtype=dtype)
        model = tt.training_model(module, sgd(module), device_iterations=20)
        x, y = (t.to(dtype) for t in line(160))
        out, loss = model(x, y)
        assert out.dtype == loss.dtype == dtype
        assert loss < 0.1
        assert module.linear.weight.dtype == dtype


def test_autocast_is_in_force():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.a(x)
                out = self.b(torch.relu(hidden))
                return hidden, nn.functional.mse_loss(out, y), torch.softmax(hidden, 1)

    model, module, reference = training(Cast)
    batch = line(8)
    hidden, loss, shares = model(*batch)
    expected = reference(*batch)
    assert [v.dtype for v in (hidden, loss, shares)] == [v.dtype for v in expected]
    assert hidden.dtype == torch.bfloat16
    train_plainly(reference, sgd(reference), [batch])
    found, expected = module.b.weight.detach(), reference.b.weight.detach()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-3)


@pytest.mark.cpu
def test_the_precision_of_products():
    for precision in (None, "highest"):
        model, *_ = training(Regression, precision=precision)
        model.compile(*line(4))
        program = str(program_of(model).engine.runner.traced.jaxpr)
        assert ("HIGHEST" in program) == (precision == "highest")


def test_a_later_call_leaves_the_result_of_an_earlier_one_alone():
    model, module, _ = training(Regression)
    out, _ = model(*line(4))
    kept = out.clone()
    model(*line(4, seed=1))
    assert torch.equal(out, kept)
    out.zero_()
    assert module.linear.weight.abs().sum() > 0


def test_history_and_step_count():
    model, *_ = training(device_iterations=3)
    model(*digits(12))
    model(*digits(12))
    assert list(model.history.steps) == [3, 4, 5]
    assert len(model.history.loss) == 3


def test_no_grad_stops_gradients():
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, y):
            with torch.no_grad():
                target = torch.tanh(self.teacher(x))
            out = self.student(x)
            return out, nn.functional.mse_loss(out, target)

    model, module, reference = training(Teacher)
    batch = line(6)
    model(*batch)
    train_plainly(reference, sgd(reference), [batch])
    assert_bits_equal(
        module.teacher.weight.detach().numpy(), reference.teacher.weight.detach().numpy()
    )
    assert_close(weights(module), weights(reference))


@pytest.mark.parametrize("rebinds", [False, True])
def test_buffers_are_updated_in_place_and_replaced(rebinds):
    class Counts(nn.Module):
        def __init__(self, rebinds):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.rebinds = rebinds

        def forward(self, x):
            if self.rebinds:
                self.seen = self.seen + 1
            else:
                self.seen.add_(1)
            return x * self.seen

    model = tt.inference_model(Counts(rebinds), device_iterations=3)
    assert torch.equal(model(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(model(torch.ones(3)), torch.tensor([4.0, 5.0, 6.0]))


def test_tensors_outside_of_the_module_are_constants():
    table = torch.arange(3.0)

    class Adds(nn.Module):
        def forward(self, x):
            return x + table + torch.ones(3) * torch.arange(3)

    model = tt.inference_model(Adds())
    assert torch.equal(model(torch.zeros(2, 3)), (2 * torch.arange(3.0)).expand(2, 3))
