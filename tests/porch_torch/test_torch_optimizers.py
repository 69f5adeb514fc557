"""Optimizers on the device compute what PyTorch's own compute, and follow their numbers."""

import copy
import math

import numpy as np
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
)
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close

STEPS = 50

CASES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.3}),
    "SGD maximize": (torch.optim.SGD, {"lr": 0.001, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam decay": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "RMSprop centered": (
        torch.optim.RMSprop,
        {"lr": 0.005, "centered": True, "momentum": 0.5, "weight_decay": 0.01},
    ),
}


VARIANTS = ("SGD nesterov", "SGD maximize", "Adam decay", "RMSprop")


def weights(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in VARIANTS else [])
        for name in CASES
    ],
)
def test_fifty_steps_equal_pytorch(name):
    kind, options = CASES[name]
    module, reference = seeded(SeedModel)
    model = tt.training_model(module, kind(module.parameters(), **options), device_iterations=25)
    plain = kind(reference.parameters(), **options)
    for call in range(2):
        batch = digits(25 * 4, seed=call)
        model(*batch)
        train_plainly(reference, plain, cut(batch, 25))
    assert_close(weights(module), weights(reference))
    ours, theirs = model.optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        found = {k: v.numpy() for k, v in ours[number].items()}
        expected = {k: np.asarray(v) for k, v in state.items() if v is not None}
        assert_close(found, expected)


def test_ours_are_pytorch_s_with_more_options():
    for kind in ("SGD", "Adam", "AdamW", "RMSprop"):
        assert issubclass(getattr(tt.optim, kind), getattr(torch.optim, kind))
    module, reference = seeded(SeedModel)
    ours = tt.optim.Adam(module.parameters(), lr=0.01, loss_scaling=128.0, max_grad_norm=0.5)
    model = tt.training_model(module, ours, device_iterations=3)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    batch = digits(12)
    for x, y in cut(batch, 3):
        plain.zero_grad()
        reference(x, y)[1].backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert norm > 0.5
        plain.step()
    _, loss = model(*batch)
    assert_close(weights(module), weights(reference))
    assert loss < 10, "a returned loss is not scaled"
    assert model.history.loss[-1] == loss


def test_parameter_groups():
    def groups(module, kind):
        return kind(
            [
                {"params": module.fc1.parameters(), "lr": 0.2, "momentum": 0.9},
                {"params": [module.fc2.weight], "weight_decay": 0.1},
            ],
            lr=0.05,
        )

    module, reference = seeded(SeedModel)
    model = tt.training_model(module, groups(module, tt.optim.SGD), device_iterations=5)
    batch = digits(20)
    model(*batch)
    train_plainly(reference, groups(reference, torch.optim.SGD), cut(batch, 5))
    assert_close(weights(module), weights(reference))
    np.testing.assert_array_equal(module.fc2.bias.detach(), reference.fc2.bias.detach())


def lamb_by_the_book(p, grads, lr, betas, eps, decay, most, corrected=True):
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        mh = m / (1 - betas[0] ** t) if corrected else m
        vh = v / (1 - betas[1] ** t) if corrected else v
        u = mh / (np.sqrt(vh) + eps) + decay * p
        norms = min(np.linalg.norm(p), most), np.linalg.norm(u)
        p = p - lr * (norms[0] / norms[1] if all(norms) else 1.0) * u
    return p


class Sum(nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x):
        return tt.identity_loss((self.w * x[0]).sum(), reduction="none")


@pytest.mark.parametrize(("most", "corrected"), [(65500.0, True), (0.7, False)])
def test_lamb(most, corrected):
    module = Sum()
    optimizer = tt.optim.LAMB(
        module.parameters(), lr=0.1, max_weight_norm=most, bias_correction=corrected
    )
    model = tt.training_model(module, optimizer, device_iterations=6)
    grads = torch.randn(6, 3)
    start = module.w.detach().numpy().astype(np.float64)
    model(grads)
    found = lamb_by_the_book(start, grads.numpy(), 0.1, (0.9, 0.999), 1e-8, 0.01, most, corrected)
    assert_close(module.w.detach().numpy(), found.astype(np.float32))
    with pytest.raises(tr.TailraceError, match="LAMB updates weights on the device only"):
        optimizer.step()


FURTHER = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05, "weight_decay": 0.01, "maximize": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "lambd": 0.01, "t0": 5, "weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "RAdam, short": (torch.optim.RAdam, {"lr": 0.02, "betas": (0.8, 0.9)}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.03}),
}


@pytest.mark.parametrize("name", FURTHER)
def test_the_other_optimizers_of_pytorch(name):
    kind, options = FURTHER[name]
    module, reference = seeded(Sum)
    optimizer, plain = (kind(one.parameters(), **options) for one in (module, reference))
    model = tt.training_model(module, optimizer, device_iterations=9)
    grads = torch.randn(18, 3, generator=torch.Generator().manual_seed(1))
    for half, rate in (
        (grads[:9], 0.04),
        (grads[9:], 0.01),
    ):  # the first counts where state is made
        for one in (optimizer, plain):
            one.param_groups[0]["lr"] = rate
        model(half)
        for grad in half:
            reference.w.grad = grad.clone()
            plain.step()
    assert_close(weights(module), weights(reference))
    ours, theirs = (one.state_dict()["state"][0] for one in (optimizer, plain))
    assert ours.keys() == theirs.keys()
    assert_close({k: v.numpy() for k, v in ours.items()}, {k: v.numpy() for k, v in theirs.items()})


def test_a_new_optimizer_with_state_from_the_beginning_goes_on():
    module = Sum()
    model = tt.training_model(module, torch.optim.Adagrad(module.parameters(), lr=0.1))
    model(torch.ones(1, 3))
    model.set_optimizer(torch.optim.Adagrad(module.parameters(), lr=0.1))
    model(torch.ones(1, 3))
    assert model.optimizer.state_dict()["state"][0]["step"] == 2


def test_the_tensorflow_variant_of_rmsprop():
    module = Sum()
    optimizer = tt.optim.RMSprop(
        module.parameters(), lr=0.1, alpha=0.9, momentum=0.5, eps=1e-3, use_tf_variant=True
    )
    grads = torch.randn(5, 3)
    p, square, buffer = module.w.detach().numpy().astype(np.float64), np.ones(3), np.zeros(3)
    for g in grads.numpy():
        square = 0.9 * square + 0.1 * g * g
        buffer = 0.5 * buffer + 0.1 * g / np.sqrt(square + 1e-3)
        p = p - buffer
    tt.training_model(module, optimizer, device_iterations=5)(grads)
    assert_close(module.w.detach().numpy(), p.astype(np.float32))


def test_uncorrected_adamw():
    module = Sum()
    optimizer = tt.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0, bias_correction=False)
    grads = torch.ones(1, 3)
    before = module.w.detach().clone()
    tt.training_model(module, optimizer)(grads)
    expected = before - 0.1 * 0.1 / (math.sqrt(0.001) + 1e-8)
    assert_close(module.w.detach().numpy(), expected.numpy())


def test_schedulers_drive_without_compiling_again():
    module, reference = seeded(SeedModel)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, plain)]
    model = tt.training_model(module, optimizer, device_iterations=2)
    for call in range(4):
        batch = digits(8, seed=call)
        model(*batch)
        train_plainly(reference, plain, cut(batch, 2))
        for scheduler in schedulers:
            scheduler.step()
    assert_close(weights(module), weights(reference))
    runner = program_of(model).engine.runner
    assert runner.executions == 4
    assert len(runner.executables) == 1


def test_set_optimizer_changes_numbers_or_the_program():
    module, reference = seeded(SeedModel)
    first = torch.optim.SGD(module.parameters(), lr=0.5)
    model = tt.training_model(module, first)
    batch = digits(4)
    model(*batch)
    engine = program_of(model)
    model.set_optimizer(torch.optim.SGD(module.parameters(), lr=0.01))
    model(*batch)
    assert program_of(model) is engine
    model.set_optimizer(torch.optim.Adam(module.parameters(), lr=0.02))
    model(*batch)
    assert program_of(model) is not engine
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.5), [batch])
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.01), [batch])
    train_plainly(reference, torch.optim.Adam(reference.parameters(), lr=0.02), [batch])
    assert_close(weights(module), weights(reference))


def test_training_goes_on_in_plain_pytorch_and_back():
    module, reference = seeded(SeedModel)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    batches = [digits(4, seed=n) for n in range(6)]
    model = tt.training_model(module, optimizer)
    for batch in batches[:2]:
        model(*batch)
    model.destroy()
    train_plainly(module, optimizer, batches[2:4])
    for batch in batches[4:]:
        model(*batch)
    train_plainly(reference, plain, batches)
    assert_close(weights(module), weights(reference))


def test_a_loaded_optimizer_state_is_used():
    module, reference = seeded(SeedModel)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    batches = [digits(4, seed=n) for n in range(4)]
    train_plainly(reference, plain, batches[:2])
    module.load_state_dict(reference.state_dict())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    model = tt.training_model(module, optimizer)
    for batch in batches[2:]:
        model(*batch)
    train_plainly(reference, plain, batches[2:])
    assert_close(weights(module), weights(reference))


def test_state_and_accumulators_may_be_halves():
    module = Regression()
    optimizer = tt.optim.SGD(
        module.parameters(),
        lr=0.05,
        momentum=0.5,
        accum_type=torch.float16,
        velocity_accum_type=torch.float16,
    )
    model = tt.training_model(module, optimizer, accumulation=2, device_iterations=20)
    _, loss = model(*line(160))
    assert loss < 0.1
    assert model.tensors()["accumulated/linear.weight"].dtype == np.float16
    assert model.tensors()["optimizer/momentum_buffer/linear.weight"].dtype == np.float16


def test_what_is_refused():
    module = Regression()
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        tt.training_model(module, torch.optim.LBFGS(module.parameters()))
    with pytest.raises(AssertionError, match="Accumulation types must be either torch.float32"):
        tt.optim.SGD(module.parameters(), lr=0.1, accum_type=torch.float64)
    with pytest.raises(tr.TailraceError, match="updates that model's parameters"):
        tt.training_model(module, torch.optim.SGD(Regression().parameters(), lr=0.1))
    with pytest.raises(tr.TailraceError, match="loss_scaling multiplies the loss"):
        tt.optim.Adam(module.parameters(), loss_scaling=0.0)
