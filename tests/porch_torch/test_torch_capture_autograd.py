"""What autograd knows is kept: each module has a backward that differs from that of its values."""

import pytest
import torch
from eager import rows, same_as_eager
from torch import nn
from torch.utils.checkpoint import checkpoint

import tailrace as tr
import tailrace.torch as tt


class Wrong(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.clamp(0, 1) * factor, y.exp()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * 7 * x * ctx.factor, second * 3, None


class Noisy(torch.autograd.Function):
    """Draws in forward, and has a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x) * 0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Case(nn.Module):
    """Two layers, and a function of the first one and x."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return {"loss": self.function(self, x).pow(2).mean()}


def custom(m, x):
    first, second = Wrong.apply(m.first(x), m.second(x), 2.0)
    return first + second


def noisy(m, x):
    return Noisy.apply(m.first(x))


def no_grad(m, x):
    with torch.no_grad():
        target = m.first(x).tanh() * 3
        parts = m.second(x).chunk(2, -1)
    return m.first(x) - target + m.second(x) + torch.cat(parts, -1)


def detached(m, x):
    h = m.first(x)
    return h + (h.round() - h).detach() + torch.detach(m.second(x))


def checkpointed(m, x):
    return checkpoint(lambda x: m.second(m.first(x).detach() + m.first(x)), x, use_reentrant=False)


def buffer_of_gradients(m, x):
    # What goes into a buffer has no gradient, also where it is read again in the same step.
    with torch.no_grad():
        m.kept.add_(m.first(x).mean(0))
    return m.first(x) * m.kept


def statistics(m, x):
    h = nn.functional.batch_norm(m.first(x), m.kept, torch.ones(4), training=True)
    return h * m.second(x) + m.kept


def gradient_inside(m, x):
    return torch.func.grad(lambda x: m.first(x).tanh().sum())(x)


def mapped(m, x):
    return torch.func.vmap(lambda row: m.first(row).sin())(x)


def filled(m, x):
    out = torch.zeros(8, 4)
    out[:, :2] = m.first(x)[:, :2]
    out[:, 2:].copy_(m.second(x)[:, 2:])
    return out


@pytest.mark.parametrize(
    "function",
    [
        custom,
        noisy,
        no_grad,
        detached,
        checkpointed,
        buffer_of_gradients,
        statistics,
        gradient_inside,
        mapped,
        filled,
    ],
)
def test_gradients_are_those_of_eager(function):
    same_as_eager(lambda: Case(function), rows())


def test_a_parameter_without_a_gradient_stays():
    def make():
        case = Case(lambda m, x: m.second(m.first(x)))
        case.second.requires_grad_(False)
        return case

    same_as_eager(make, rows())


def under_no_grad(m, x):
    h = m.first(x)
    with torch.no_grad():
        h.mul_(2)
    return h


def through_detach(m, x):
    h = m.first(x)
    h.detach().mul_(2)
    return h


def through_data(m, x):
    h = m.first(x)
    h.data.mul_(2)
    return h


def hooked(m, x):
    h = m.first(x)
    h.register_hook(lambda gradient: gradient * 3)
    return h


def asked_for(m, x):
    h = m.first(x)
    (gradient,) = torch.autograd.grad(h.sum(), m.first.weight, create_graph=True)
    return h + gradient.sum()


def stopped_inside(m, x):
    return torch.func.grad(lambda x: (m.first(x) * m.second(x).detach()).sum())(x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (under_no_grad, "keeps no record of: under torch.no_grad"),
        (through_detach, "keeps no record of"),
        (through_data, "keeps no record of"),
        (hooked, "register_hook on a tensor, and the hook would not run"),
        (asked_for, "asks for gradients within forward"),
        (stopped_inside, "stops gradients within a transformation of torch.func"),
    ],
)
def test_what_cannot_be_kept_is_refused(function, text):
    model = tt.training_model(Case(function), None, "loss")
    with pytest.raises(tr.TailraceError, match=f"(?s){text}") as raised:
        model(*rows(1)[0])
    assert "test_torch_capture_autograd.py:" in str(raised.value)
