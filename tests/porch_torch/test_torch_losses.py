"""The loss is found, wherever it is, and there must be exactly one."""

import pytest
import torch
from small_modules import line, seeded, train_plainly, training
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


def test_a_loss_by_hand_that_is_returned_needs_no_mark():
    trained(lambda out, y: (out - y).mean())


def test_no_loss():
    model, *_ = training(lambda: Loss(lambda out, y: out - y))
    with pytest.raises(tr.TailraceError, match="no scalar that has a gradient.*'0' \\[4, 1\\]"):
        model(*line(4))


def test_a_sum_of_losses_that_is_returned_needs_no_mark():
    trained(lambda out, y: nll(out, y) + functional.mse_loss(out, y) * 5)


def test_two_losses():
    def two(out, y):
        return nll(out, y), functional.mse_loss(out, y)

    model, *_ = training(lambda: Loss(two))
    with pytest.raises(tr.TailraceError, match="of which none depends on all others.*loss="):
        model(*line(4))


def test_outside_of_a_model_it_only_reduces():
    x = torch.tensor([1.0, 2.0])
    assert tt.identity_loss(x, "sum") == 3
    assert tt.identity_loss(x, "mean") == 1.5
    assert torch.equal(tt.identity_loss(x, "none"), x)
    with pytest.raises(tr.TailraceError, match="Unsupported reduction type!") as raised:
        tt.identity_loss(x, "median")
    assert isinstance(raised.value, AssertionError)  # which ported programs expect


class Discriminator(nn.Module):
    """Sees real and generated rows in one step; the two losses are added up."""

    def __init__(self, marked):
        super().__init__()
        self.marked = marked
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2))
        self.head = nn.Linear(8, 1)

    def forward(self, real, fake):
        scores = [self.head(self.body(one)) for one in (real, fake)]
        loss = nn.functional.binary_cross_entropy_with_logits
        total = loss(scores[0], torch.ones(4, 1)) + loss(scores[1], torch.zeros(4, 1))
        return scores[0], tt.identity_loss(total, reduction="none") if self.marked else total


@pytest.mark.parametrize("marked", [True, False])
def test_a_discriminator_adds_up_two_losses_of_one_module(marked):
    module, plain = seeded(lambda: Discriminator(marked))
    real, fake = torch.randn(12, 3), torch.randn(12, 3)
    model = tt.training_model(
        module, torch.optim.SGD(module.parameters(), 0.1), device_iterations=3
    )
    model(real, fake)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    train_plainly(plain, optimizer, list(zip(real.split(4), fake.split(4), strict=True)))
    for name, value in plain.state_dict().items():
        assert_close(module.state_dict()[name].numpy(), value.numpy())
