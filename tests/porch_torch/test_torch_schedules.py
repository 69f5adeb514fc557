"""`scheduler=` and `max_grad_norm=`: each step of a call has the rate and gradients of PyTorch."""

import numpy as np
import pytest
import torch
from small_modules import Regression, seeded
from torch.optim import lr_scheduler as schedules

import tailrace as tr
import tailrace.torch as tt
from covering import covering
from oracles import assert_bits_equal, assert_close
from tailrace.torch.errors import UsageError

STEPS, ROWS = 20, 4


class ByRoot(schedules.LRScheduler):
    """A scheduler of a user's own."""

    def get_lr(self):
        return [base / (1 + self.last_epoch) ** 0.5 for base in self.base_lrs]


def sequential(optimizer):
    parts = [
        schedules.LinearLR(optimizer, 0.1, total_iters=4),
        schedules.ExponentialLR(optimizer, 0.9),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[5])


SCHEDULES = {
    "step": lambda o: schedules.StepLR(o, 3, 0.5),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 5),
    "sequential": sequential,
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "own": ByRoot,
    "two": lambda o: [schedules.StepLR(o, 4, 0.5), schedules.ExponentialLR(o, 0.95)],
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, 0.05, betas=(0.9, 0.99)),
}


def made(optimizer, schedule):
    """The same module, optimizer and schedule twice, and data; plain PyTorch trains the second."""
    found = []
    for _ in range(2):
        module = seeded(Regression)[0]
        own = OPTIMIZERS[optimizer](module.parameters())
        found.append((module, own, SCHEDULES[schedule](own) if schedule else None))
    rows = np.random.default_rng(0).normal(size=(STEPS, 2, ROWS, 3)).astype(np.float32)
    x = torch.from_numpy(rows)
    return *found, x, x.sum(-1, keepdim=True) * 3


def train_eagerly(module, optimizer, schedule, x, y, microbatches, norm=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(microbatches):
            (module(x[step, number], y[step, number])[1] / microbatches).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
        for one in schedule if isinstance(schedule, list) else [schedule] if schedule else []:
            one.step()


def calls(x, y, length, microbatches):
    for first in range(0, STEPS, length):
        part = slice(first, first + length)
        yield (
            x[part, :microbatches].reshape(-1, 3),
            y[part, :microbatches].reshape(-1, 1),
        )


def states(schedule):
    found = schedule if isinstance(schedule, list) else [schedule]
    return [(one.get_last_lr(), getattr(one, "last_epoch", None)) for one in found]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "length", "microbatches"),
    covering(list(SCHEDULES), list(OPTIMIZERS), [1, 4, 10], [1, 2]),
)
def test_steps_of_a_call_have_their_own_rates(schedule, optimizer, length, microbatches):
    ours, plain, x, y = made(optimizer, schedule)
    train_eagerly(*plain, x, y, microbatches)
    model = tt.training_model(
        ours[0],
        ours[1],
        scheduler=ours[2],
        device_iterations=length,
        accumulation=microbatches,
    )
    for call in calls(x, y, length, microbatches):
        model(*call)
    for one, other in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        assert_close(one.detach().numpy(), other.detach().numpy())
    assert states(ours[2]) == states(plain[2])
    for one, other in zip(ours[1].param_groups, plain[1].param_groups, strict=True):
        assert {n: v for n, v in one.items() if n != "params"} == {
            n: v for n, v in other.items() if n != "params"
        }


def test_the_middle_of_a_call_has_other_rates_than_its_start():
    """The rates of a whole call decide: with the first one alone the weights are far away."""
    ours, plain, x, y = made("sgd", "one cycle")
    train_eagerly(*plain[:2], None, x, y, 1)
    train_eagerly(*ours, x, y, 1)
    far = (ours[0].linear.weight - plain[0].linear.weight).abs().max()
    assert far > 0.05


def test_a_schedule_that_ends_early_is_as_it_was():
    ours, _, x, y = made("sgd", None)
    schedule = schedules.OneCycleLR(ours[1], 0.1, total_steps=12)
    model = tt.training_model(ours[0], ours[1], scheduler=schedule, device_iterations=10)
    first, second = calls(x, y, 10, 1)
    model(*first)
    before, rate = schedule.last_epoch, ours[1].param_groups[0]["lr"]
    with pytest.raises(UsageError, match="advanced once a step, and refuses the next one"):
        model(*second)
    assert (schedule.last_epoch, ours[1].param_groups[0]["lr"]) == (before, rate)
    assert before == 10


def test_a_call_that_a_guard_stops_advances_by_its_steps():
    ours, _, x, y = made("sgd", "step")
    x[12] = float("nan")
    guard = tr.stop_on_nonfinite()
    model = tt.training_model(
        ours[0], ours[1], scheduler=ours[2], device_iterations=10, observe=[guard]
    )
    first, second = calls(x, y, 10, 1)
    model(*first)
    with pytest.raises(tr.errors.NonFiniteError):
        model(*second)
    assert ours[2].last_epoch == 12
    assert ours[1].param_groups[0]["lr"] == 0.05 * 0.5**4


def test_a_skipped_step_has_had_its_rate():
    """As in a loop of PyTorch that leaves out `optimizer.step()` and steps the scheduler."""
    ours, plain, x, y = made("adam", "step")
    x[2] = float("nan")
    guard = tr.stop_on_nonfinite(on_nonfinite="skip", limit=1)
    model = tt.training_model(
        ours[0], ours[1], scheduler=ours[2], device_iterations=10, observe=[guard]
    )
    for call in calls(x, y, 10, 1):
        model(*call)
    module, optimizer, schedule = plain
    for step in range(STEPS):
        optimizer.zero_grad()
        module(x[step, 0], y[step, 0])[1].backward()
        if step != 2:
            optimizer.step()
        schedule.step()
    assert_close(ours[0].linear.weight.detach().numpy(), module.linear.weight.detach().numpy())


def test_rates_in_tensors_stay_in_them():
    ours, plain, x, y = made("adam", None)
    rate = torch.tensor(0.05)
    ours[1].param_groups[0]["lr"] = rate
    model = tt.training_model(
        ours[0], ours[1], scheduler=schedules.StepLR(ours[1], 3, 0.5), device_iterations=10
    )
    for call in calls(x, y, 10, 1):
        model(*call)
    train_eagerly(plain[0], plain[1], schedules.StepLR(plain[1], 3, 0.5), x, y, 1)
    assert_close(ours[0].linear.weight.detach().numpy(), plain[0].linear.weight.detach().numpy())
    assert ours[1].param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05 * 0.5**6)


def test_refused_schedules():
    ours, plain, x, y = made("sgd", "step")
    module, optimizer, schedule = ours
    plateau = schedules.ReduceLROnPlateau(optimizer)
    with pytest.raises(tr.errors.OptionError, match="ReduceLROnPlateau needs a metric"):
        tt.training_model(module, optimizer, scheduler=plateau)
    with pytest.raises(tr.errors.OptionError, match="made for another one"):
        tt.training_model(module, optimizer, scheduler=plain[2])
    with pytest.raises(tr.errors.OptionError, match="must be a scheduler .* got float"):
        tt.training_model(module, optimizer, scheduler=0.1)
    model = tt.training_model(module, optimizer, scheduler=schedule, device_iterations=10)
    first, second = calls(x, y, 10, 1)
    model(*first)
    with pytest.raises(UsageError, match="train on with another one"):
        model.set_optimizer(plain[1])
    schedule.step()
    with pytest.raises(UsageError, match=r"StepLR.step\(\) was called besides"):
        model(*second)


def test_a_number_that_becomes_zero_in_a_call_is_refused():
    ours, _, x, y = made("sgd", None)

    class Ending(schedules.LRScheduler):
        def get_lr(self):
            for group in self.optimizer.param_groups:
                group["momentum"] = 0.9 if self.last_epoch < 5 else 0.0
            return self.base_lrs

    model = tt.training_model(ours[0], ours[1], scheduler=Ending(ours[1]), device_iterations=10)
    with pytest.raises(UsageError, match="in step 5 of this call, momentum"):
        model(*next(iter(calls(x, y, 10, 1))))
    assert ours[1].param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_norm_of_gradients_is_clipped_as_by_pytorch(optimizer, microbatches):
    ours, plain, x, y = made(optimizer, None)
    train_eagerly(*plain, x, y, microbatches, norm=0.5)
    model = tt.training_model(
        *ours[:2], max_grad_norm=0.5, device_iterations=10, accumulation=microbatches
    )
    for call in calls(x, y, 10, microbatches):
        model(*call)
    for one, other in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        assert_close(one.detach().numpy(), other.detach().numpy())


def test_refused_norms():
    module = seeded(Regression)[0]
    with pytest.raises(tr.errors.OptionError, match="greater than 0. Received: max_grad_norm=-1"):
        tt.training_model(module, max_grad_norm=-1)
    optimizer = tt.optim.SGD(module.parameters(), lr=0.1, max_grad_norm=1.0)
    with pytest.raises(tr.errors.OptionError, match="given to the model or to its optimizer"):
        tt.training_model(module, optimizer, max_grad_norm=2.0)


@pytest.mark.cpu
def test_the_table_of_a_long_call_may_be_sharded():
    """With more than 1024 numbers it is held in shards, like any large tensor of an optimizer."""

    def trained(**options):
        module = seeded(Regression)[0]
        optimizer = OPTIMIZERS["adam"](module.parameters())
        model = tt.training_model(
            module,
            optimizer,
            scheduler=schedules.ExponentialLR(optimizer, 0.9),
            device_iterations=80,
            replicas=2,
            **options,
        )
        x = torch.from_numpy(np.random.default_rng(1).normal(size=(640, 3)).astype(np.float32))
        model(x, x.sum(-1, keepdim=True))
        return module.linear.weight.detach().numpy()

    assert_bits_equal(trained(shard_optimizer_state=True), trained())
