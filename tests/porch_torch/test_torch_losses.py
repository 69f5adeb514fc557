"""The loss is found, wherever it is, and there must be exactly one."""

import pytest
import torch
from small_modules import line, training
from torch import nn
from torch.nn import functional

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close


class Loss(nn.Module):
    """A linear layer, and whatever loss a test asks for."""

    def __init__(self, loss):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.linear(x), y)


def trained(loss, expected=None):
    """Train a step with `loss`, and in plain PyTorch with `expected`; weights must agree."""
    model, module, reference = training(lambda: Loss(loss))
    x, y = line(4)
    out = model(x, y)
    found = (expected or loss)(reference.linear(x), y)
    found.sum().backward()
    with torch.no_grad():
        reference.linear.weight -= 0.1 * reference.linear.weight.grad
    assert_close(module.linear.weight.detach().numpy(), reference.linear.weight.detach().numpy())
    return out


def nll(out, y):
    return functional.l1_loss(out, y)


def test_the_loss_need_not_be_returned():
    def unreturned(out, y):
        functional.mse_loss(out, y)
        return out

    assert trained(unreturned, functional.mse_loss).shape == (4, 1)


def test_a_model_may_return_the_loss_only():
    assert trained(functional.mse_loss).shape == ()


def test_what_follows_the_loss_does_not_count():
    trained(lambda out, y: functional.mse_loss(out, y) * 5, functional.mse_loss)


def test_a_loss_by_hand_is_marked():
    def by_hand(out, y):
        return tt.identity_loss((out - y).abs() * 2, reduction="mean")

    trained(by_hand)


def test_every_element_of_a_loss_without_reduction_counts():
    def unreduced(out, y):
        return tt.identity_loss((out - y) ** 2, reduction="none")

    assert trained(unreduced).shape == (4, 1)


def test_losses_that_feed_into_one():
    def total(out, y):
        return tt.identity_loss(nll(out, y) + 5 * functional.mse_loss(out, y), reduction="mean")

    trained(total)

    def inner(out, y):
        return tt.identity_loss(tt.identity_loss(nll(out, y), "none") * 3, "sum")

    trained(inner)


def test_no_loss():
    model, *_ = training(lambda: Loss(lambda out, y: (out - y).mean()))
    with pytest.raises(tr.TailraceError, match="Couldn't find a loss in graph"):
        model(*line(4))


def test_two_losses():
    def two(out, y):
        return nll(out, y) + functional.mse_loss(out, y) * 5

    model, *_ = training(lambda: Loss(two))
    with pytest.raises(tr.TailraceError, match="Multiple independent losses found in graph"):
        model(*line(4))


def test_outside_of_a_model_it_only_reduces():
    x = torch.tensor([1.0, 2.0])
    assert tt.identity_loss(x, "sum") == 3
    assert tt.identity_loss(x, "mean") == 1.5
    assert torch.equal(tt.identity_loss(x, "none"), x)
    with pytest.raises(tr.TailraceError, match="Unsupported reduction type!") as raised:
        tt.identity_loss(x, "median")
    assert isinstance(raised.value, AssertionError)  # which ported programs expect
