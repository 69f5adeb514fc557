"""What is trained is what a module returns: found where it is plain, said by `loss=`, or refused."""

import dataclasses

import pytest
import torch
from eager import rows, same_as_eager
from small_modules import seeded
from torch import nn
from torch.nn import functional

import tailrace as tr
import tailrace.torch as tt


class Returning(nn.Module):
    """Two losses, and a function of them that says what is returned."""

    def __init__(self, what):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.what = what

    def forward(self, x):
        # Written by hand: no loss of torch.nn is in it.
        return self.what(self.first(x).pow(2).mean(), self.second(x).abs().mean())


@dataclasses.dataclass
class Both:
    """An output with two losses."""

    loss: torch.Tensor
    other: torch.Tensor


@dataclasses.dataclass
class Total:
    """A loss inside of another object."""

    total: torch.Tensor
    parts: dict


def train(what, of, loss=None):
    same_as_eager(lambda: Returning(what), rows(2), loss, of)


@pytest.mark.parametrize(
    ("what", "of"),
    [
        (Both, lambda out: out.loss),
        (lambda a, b: {"loss": a, "other": b}, lambda out: out["loss"]),
        (lambda a, b: (a.detach(), b), lambda out: out[1]),
        (lambda a, b: (a, b, 2 * a + b, (a + b).detach()), lambda out: out[2]),
        (lambda a, b: {"one": a, "same": a}, lambda out: out["one"]),
        (lambda a, b: (a, tt.identity_loss(b), a + 0 * b), lambda out: out[1]),
    ],
    ids=["attribute", "item", "only", "of all others", "twice", "marked"],
)
def test_a_loss_that_is_plain_is_found(what, of):
    train(what, of)


def test_a_product_of_all_values_is_not_the_sum_of_a_loss_function():
    # The trace takes the result of the loss function, which is none of the returned scalars.
    def make():
        def what(a, b):
            return functional.mse_loss(a, b, reduction="sum") / 7, a.detach()

        return Returning(what)

    same_as_eager(make, rows(2), 0, lambda out: out[0])


@pytest.mark.parametrize(
    ("loss", "of"),
    [
        (1, lambda out: out[1]),
        (-1, lambda out: out[1]),
        ("0", lambda out: out[0]),
        (lambda out: out[0] * 3 + out[1], lambda out: out[0] * 3 + out[1]),
    ],
    ids=["index", "from the end", "name", "function"],
)
def test_a_loss_is_said(loss, of):
    module, plain = seeded(lambda: Returning(lambda a, b: (a, b)))
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1), loss)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in rows(2):
        optimizer.zero_grad()
        of(model(*batch)), of(plain(*batch)).backward()
        optimizer.step()
    model.copy_weights_to_host()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_name_is_a_path():
    train(lambda a, b: Total(a, {"main": b}), lambda out: out.parts["main"], "parts.main")


@pytest.mark.parametrize(
    ("what", "loss", "text"),
    [
        (lambda a, b: (a, b), None, "none depends on all others: '0', '1'.*loss='total'"),
        (lambda a, b: (a.detach(), 1), None, "no scalar that has a gradient.*'0' .., no gradient"),
        (lambda a, b: {"loss": a.detach(), "x": b}, None, "has no gradient.*under torch.no_grad"),
        (lambda a, b: {"loss": torch.stack([a, b])}, None, r"has shape \[2\].*Reduce it"),
        (lambda a, b: {"a": a}, "total", "loss='total' gives nothing.*Returned: 'a'"),
        (lambda a, b: (a, b), 2, "loss=2 gives nothing"),
        (lambda a, b: (a, b), lambda out: 3.0, "the function given as loss= gives float"),
    ],
)
def test_a_loss_that_cannot_be_told_is_refused(what, loss, text):
    model = tt.training_model(Returning(what), None, loss)
    with pytest.raises(tr.TailraceError, match=text):
        model(*rows(1)[0])


def test_what_is_no_choice_is_refused_at_once():
    with pytest.raises(tr.TailraceError, match="a name, an index or a function.*loss=1.5"):
        tt.training_model(nn.Linear(1, 1), None, 1.5)
