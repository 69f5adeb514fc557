"""Outputs of one's own classes, losses that count and that do not, PyTorch that looks at values."""

import dataclasses
import logging
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from small_modules import line, seeded, train_plainly, training
from torch import nn
from torch.nn import functional

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close
from tailrace.base.messages import forget_notes


def values(module):
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


# -- classes of inputs and outputs --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    out: torch.Tensor
    more: list
    note: str = "kept"
    count: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Shown(OrderedDict):
    """Items that are attributes too, as the outputs of some libraries are."""

    loss: torch.Tensor | None = None
    out: torch.Tensor | None = None
    rest: tuple | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Packed:
    def __init__(self, out):
        self.parts = {"out": out}


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(3, 1), make

    def forward(self, x):
        return self.make(self.linear(x))


def test_outputs_in_a_dataclass():
    module, reference = seeded(lambda: Returns(lambda out: Found(out, [out * 2, 3])))
    x, _ = line(4)
    model = tt.inference_model(module)
    for _ in range(2):
        found = model(x)
        assert type(found) is Found
        assert (found.note, found.more[1]) == ("kept", 3)
        expected = reference(x)
        assert_close(found.out.numpy(), expected.out.detach().numpy())
        assert_close(found.more[0].numpy(), expected.more[0].detach().numpy())


def test_outputs_that_are_items_and_attributes():
    module, reference = seeded(lambda: Returns(lambda out: Shown(out.sum(), rest=(out, 1))))
    x, _ = line(4)
    found, expected = tt.inference_model(module)(x), reference(x)
    assert type(found) is Shown
    assert list(found) == ["loss", "rest"]
    assert found.out is None
    assert found.loss is found["loss"]
    assert found.rest is found["rest"]
    assert_close(found.loss.numpy(), expected.loss.detach().numpy())
    assert_close(found.rest[0].numpy(), expected.rest[0].detach().numpy())


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [{"a": p}]], ids=["alone", "inside"])
def test_outputs_of_a_class_that_nobody_knows(wrap):
    module, reference = seeded(lambda: Returns(lambda out: wrap(Packed(out))))
    found, expected = tt.inference_model(module)(line(4)[0]), reference(line(4)[0])
    if isinstance(found, list):
        found, expected = found[0]["a"], expected[0]["a"]
    assert type(found) is Packed
    assert_close(found.parts["out"].numpy(), expected.parts["out"].detach().numpy())


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [{"a": p}]], ids=["alone", "inside"])
def test_inputs_of_a_class_that_nobody_knows_are_refused(wrap):
    model = tt.inference_model(nn.Identity())
    with pytest.raises(tr.TailraceError, match=r"'data'.*tt.register_container\(UserDict"):
        model(wrap(UserDict(x=line(4)[0])))


def test_constants_that_are_arrays_or_no_numbers():
    class Scales(nn.Module):
        def forward(self, x, by, but=0.0):
            return x * torch.as_tensor(by)

    model, x = tt.inference_model(Scales()), torch.ones(2)
    for _ in range(2):
        assert torch.equal(model(x, np.array([1.0, 2.0]), float("nan")), torch.tensor([1.0, 2.0]))
    with pytest.raises(tr.TailraceError, match=r"constant of the program.*torch.from_numpy\(by\)"):
        model(x, np.array([1.0, 3.0]), float("nan"))


def test_inputs_in_a_dataclass():
    class Takes(nn.Module):
        def forward(self, given):
            return given.out * 2 + given.more[0]

    model = tt.inference_model(Takes())
    x, _ = line(4)
    assert_close(model(Found(x, [x])).numpy(), (3 * x).numpy())
    assert_close(model(Found(x + 1, [x])).numpy(), (3 * x + 2).numpy())
    with pytest.raises(tr.TailraceError, match="Shape mismatch for given.out"):
        model(Found(x[:, :2], [x]))
    with pytest.raises(tr.TailraceError, match="Value mismatch for given.note"):
        model(Found(x, [x], "other"))


# -- losses -------------------------------------------------------------------------------------


class Lossy(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(3, 1), loss

    def forward(self, x, y):
        return self.loss(self.linear(x), y)


def notes_of(loss, caplog):
    forget_notes()
    with caplog.at_level(logging.WARNING, logger="tailrace"):
        training(lambda: Lossy(loss))[0](*line(4))
    return caplog.text


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: functional.mse_loss(out, y) + 0.1 * out.mean(),
        lambda out, y: (out, functional.mse_loss(out, y) / 4),
        lambda out, y: functional.mse_loss(out, y, reduction="none").mean(),
    ],
    ids=["sum", "quotient", "mean"],
)
def test_what_follows_the_loss_is_noted(loss, caplog):
    assert "does not count" in notes_of(loss, caplog)


@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        lambda out, y: (functional.mse_loss(out, y).clone(), out * 2),
        lambda out, y: torch.exp(functional.mse_loss(out, y).detach()),
        lambda out, y: tt.identity_loss(functional.mse_loss(out, y) / 4),
    ],
    ids=["loss", "copy", "for-show", "marked"],
)
def test_nothing_is_noted_of_a_loss_that_counts(loss, caplog):
    assert "does not count" not in notes_of(loss, caplog)


def metric_without_gradients(out, y):
    with torch.no_grad():
        error = functional.l1_loss(out, y)
    return functional.mse_loss(out, y), error


def metric_of_detached_values(out, y):
    loss = functional.mse_loss(out, y)
    return loss, functional.l1_loss(out.detach(), y), functional.l1_loss(loss.detach(), y.sum())


@pytest.mark.parametrize("loss", [metric_without_gradients, metric_of_detached_values])
def test_a_metric_is_no_second_loss(loss):
    model, module, reference = training(lambda: Lossy(loss))
    x, y = line(4)
    model(x, y)
    model.copy_weights_to_host()
    reference(x, y)[0].backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_close(values(module), values(reference))


# -- parts of PyTorch that look at values -------------------------------------------------------


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**sizes, batch_first=True), 1, enable_nested_tensor=False
        )
        self.both = nn.Transformer(
            **sizes, num_encoder_layers=1, num_decoder_layers=1, batch_first=True
        )

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out = self.encoder(x, mask=mask)
        out = self.both(out, x, src_mask=mask, tgt_mask=mask)
        return out, functional.mse_loss(out, y)


def test_transformers_with_causal_masks():
    model, module, reference = training(Causal)
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    out, _ = model(x, y)
    model.copy_weights_to_host()
    assert_close(out.numpy(), reference(x, y)[0].detach().numpy())
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [(x, y)])
    assert_close(values(module), values(reference))


def test_distributions_are_not_checked_inside_and_are_outside():
    class Samples(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            made = torch.distributions.Normal(self.mean + x, functional.softplus(x))
            return made.rsample(), made.log_prob(x)

    x, _ = line(4)
    sample, logs = tt.inference_model(Samples())(x)
    expected = torch.distributions.Normal(x, functional.softplus(x))
    assert torch.isfinite(sample).all()
    assert sample.std() > 0
    assert_close(logs.numpy(), expected.log_prob(x).numpy())
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(0.0, -torch.ones(1))


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (lambda x, scale: x[x > 0].sum() * scale, r"A mask as an index, x\[mask\].*torch.where"),
        (lambda x, scale: torch.bincount(x.long().flatten()), r"bincount does that.*one_hot"),
        (lambda x, scale: x.nonzero() * scale, r"nonzero does that.*torch\.where\(mask"),
        (lambda x, scale: x * x.sum().item() * scale, "item does that.*tt.print_tensor"),
        (lambda x, scale: (f"{x.sum():.2f}", scale), "__format__ does that.*tt.print_tensor"),
        (lambda x, scale: functional.one_hot(x.long()) * scale, "Give it the number of classes"),
        (lambda x, scale: x if x.sum() > 0 else scale, "Python cannot branch.*Use torch.where"),
        (
            lambda x, scale: torch.distributions.Normal(x, scale, validate_args=True).rsample(),
            "torch.distributions.distribution.Distribution.__init__ of PyTorch does",
        ),
    ],
    ids=[
        "mask",
        *["bincount", "nonzero", "item", "format", "one-hot", "branch", "inside-torch"],
    ],
)
def test_errors_say_what_to_do(between, text):
    class Around(nn.Module):
        def forward(self, x, scale):
            return between(x, scale)

    with pytest.raises(tr.TailraceError, match=text):
        tt.inference_model(Around())(torch.randn(4, 4), torch.ones(4, 4))
