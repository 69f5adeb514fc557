"""Kinds of modules that PyTorch has, in one model: what changes parameters, hooks, buffers, sharing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Scaled(nn.Module):
    def forward(self, x, *, factor):
        return x * factor


class Kinds(nn.Module):
    """Each line of `forward` is a kind."""

    def __init__(self):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.normed_before = nn.utils.weight_norm(nn.Linear(3, 3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(3, 3))
        self.spectral_before = nn.utils.spectral_norm(nn.Linear(3, 3))
        self.symmetric = nn.Linear(3, 3)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        self.shared = nn.Linear(3, 3)
        self.again = self.shared
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.shared.weight
        self.listed = nn.ParameterList([torch.randn(3, 3), torch.randn(3)])
        self.scaled = Scaled()
        self.scaled.register_forward_pre_hook(
            lambda m, args, kwargs: (args, {"factor": kwargs["factor"] + 1}), with_kwargs=True
        )
        self.scaled.register_forward_hook(
            lambda m, args, kwargs, out: out - kwargs["factor"], with_kwargs=True
        )
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x, y):
        x = self.normed(x) + self.normed_before(x)
        x = torch.tanh(self.spectral(x) + self.spectral_before(x))
        with parametrize.cached():
            x = self.symmetric(self.symmetric(x))
        x = torch.tanh(self.again(torch.tanh(self.shared(x))) + self.tied(x))
        x = x @ self.listed[0] + self.listed[1]
        x = self.scaled(x, factor=torch.tensor(2.0))
        self.count += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = torch.func.functional_call(
            self.shared, {n: p * 2 for n, p in self.shared.named_parameters()}, (x,)
        )
        return x / self.count, F.mse_loss(x / self.count, y)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_kinds_of_modules_train_as_in_pytorch():
    torch.manual_seed(0)
    module, reference = Kinds(), Kinds()
    reference.load_state_dict(module.state_dict())
    averaged = [torch.optim.swa_utils.AveragedModel(one) for one in (module.tied, reference.tied)]
    optimizer, plain = (
        torch.optim.SGD(one.parameters(), lr=0.001, momentum=0.5) for one in (module, reference)
    )
    model = tt.training_model(module, optimizer)
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        out, loss = model(x, y)
        plain.zero_grad()
        expected = reference(x, y)
        expected[1].backward()
        plain.step()
        assert_close([out.numpy(), loss.numpy()], [e.detach().numpy() for e in expected])
        averaged[0].update_parameters(module.tied)
        averaged[1].update_parameters(reference.tied)
    for one, other in ((module, reference), averaged):
        found, expected = (
            {k: v.detach().numpy() for k, v in m.state_dict().items()} for m in (one, other)
        )
        assert_close(found, expected)
    assert module.count == reference.count == 3


class Looking(nn.Module):
    """Sets attributes to tensors, as programs do to look at them afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.latest, self.seen, self.named = None, [], {"kept": 1}

    def forward(self, x):
        self.latest = self.linear(x)
        self.seen.append(self.latest)
        self.named["out"] = self.made = self.latest * 2
        return self.named["out"]


class Counting(nn.Module):
    """Counts calls in a number, and keeps a table for the longest input."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.longest, self.table = nn.Linear(3, 2), 0, 0, None

    def forward(self, x):
        self.calls += 1
        if len(x) > self.longest:
            self.longest, self.table = len(x), torch.arange(len(x))[:, None]
        return self.linear(x) * self.calls + self.table


def test_numbers_that_forward_changes_are_put_back(caplog):
    module = Counting()
    model, x = tt.inference_model(module), torch.randn(4, 3)
    expected = copy.deepcopy(module)(x).detach().numpy()
    for _ in range(2):
        assert_close(model(x).numpy(), expected)
    assert (module.calls, module.longest, module.table) == (0, 0, None)
    assert "changes the attribute 'calls' from 0 to 1. It is traced once, and every" in caplog.text
    assert "What changes from call to call is an argument of the call, or a buffer" in caplog.text


def test_attributes_that_forward_sets_are_put_back(caplog):
    module = Looking()
    seen = module.seen
    model, x = tt.inference_model(module), torch.randn(4, 3)
    assert_close(model(x).numpy(), 2 * module.linear(x).detach().numpy())
    assert (module.latest, seen, module.named) == (None, [], {"kept": 1})
    assert module.seen is seen
    assert not hasattr(module, "made")
    assert "sets the attribute 'latest' to a tensor that has a value only inside" in caplog.text
    assert_close(copy.deepcopy(module)(x).detach().numpy(), model(x).numpy())


class Carrying(nn.Module):
    """State that lasts from call to call, outside of a buffer."""

    def __init__(self):
        super().__init__()
        self.state = torch.zeros(3)

    def forward(self, x):
        self.state = torch.tanh(x.mean(0) + self.state)
        return self.state


def test_state_outside_of_buffers_is_refused():
    with pytest.raises(tr.TailraceError, match="Attribute state is used and then reassigned"):
        tt.inference_model(Carrying())(torch.randn(4, 3))


class Clipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_parameters_that_forward_changes_are_refused():
    with pytest.raises(tr.TailraceError, match=r"Parameter linear.weight is changed in place"):
        tt.inference_model(Clipping())(torch.randn(4, 3))


def test_lazy_modules_run_once_before():
    module = nn.Sequential(nn.LazyLinear(2))
    for wrap in (tt.inference_model, tt.training_model):
        with pytest.raises(tr.TailraceError, match=r"'0.weight' of Sequential gets its shape when"):
            wrap(module)
    x = torch.randn(4, 3)
    module(x)
    assert_close(tt.inference_model(module)(x).numpy(), module(x).detach().numpy())


def test_hooks_of_an_optimizers_step_are_noted(caplog):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return tt.identity_loss((self.w * x).sum(), "none")

    module = Loss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = tt.training_model(module, optimizer)
    model(torch.ones(1, 3))
    assert "Hooks of the step" not in caplog.text
    optimizer.register_step_post_hook(lambda *_: None)
    model(torch.ones(1, 3))
    assert "Hooks of the step of SGD" in caplog.text


class Writing(nn.Module):
    """Writes through every kind of view, and by every kind of index."""

    def forward(self, x):
        x = x.clone()
        first, second = x.chunk(2)
        first.add_(1)
        x.split(1, 1)[1].mul_(3)
        x.unbind(0)[3].zero_()
        second.view(-1)[::2].neg_()
        x.detach().add_(1)
        x[[0, 2]] += 1
        x[[1, 3], [0, 1]] = 5.0
        x[[True, False, False, True]] *= 2
        x[x.new_tensor([1, 1]).long(), 0] = 7.0
        return x


def test_writes_through_views_and_lists():
    x = torch.randn(4, 3)
    assert_close(tt.inference_model(Writing())(x).numpy(), Writing()(x).numpy())


class Detaching(nn.Module):
    """What is written through a detached tensor has the gradient of what was there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, y):
        out = self.linear(x)
        out.detach().mul_(2)
        return F.mse_loss(out, y)


class Matrices(nn.Module):
    """Functions of square matrices, whose shapes leave open what is a row of vectors."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 3) + 3 * torch.eye(3))

    def forward(self, x, y):
        a = self.a
        found = torch.linalg.solve(a, x[:3]) + torch.linalg.solve(a, x[:3], left=False)
        found = found + torch.linalg.solve(a, x[0]) + torch.linalg.solve_ex(a, x[:3]).result
        found = found + torch.linalg.solve(a.expand(2, 3, 3), x[:2]).sum()
        found = found + torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x[:3], left=False)
        found = found + torch.linalg.householder_product(
            a.tril(-1), 2 / (1 + a.tril(-1).norm(dim=0))
        )
        patches = F.unfold(found[None, None], (2, 2), padding=1)
        return F.mse_loss(F.fold(patches, (3, 3), (2, 2), padding=1)[0, 0], y)


@pytest.mark.parametrize("make", [Detaching, Matrices])
def test_gradients(make):
    torch.manual_seed(0)
    module = make()
    reference = copy.deepcopy(module)
    x, y = torch.randn(4, 3), torch.randn((4, 2) if make is Detaching else (3, 3))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = reference(x, y)
    expected.backward()
    plain.step()
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert_close(model(x, y).numpy(), expected.detach().numpy())
    found, wanted = (
        {n: p.detach().numpy() for n, p in one.named_parameters()} for one in (module, reference)
    )
    assert_close(found, wanted)


def test_parametrizations_are_removed_after_training():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = parametrizations.weight_norm(nn.Linear(3, 2))

        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    module = Normed()
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model(torch.randn(4, 3), torch.randn(4, 2))
    weight = module.linear.weight.detach().clone()
    parametrize.remove_parametrizations(module.linear, "weight")
    assert type(module.linear) is nn.Linear
    assert torch.equal(module.linear.weight, weight)


NAMED = (
    *(lambda a: torch.max(a, 1), lambda a: a.sort(), lambda a: a.topk(2), lambda a: a.kthvalue(2)),
    *(lambda a: a.median(1), lambda a: a.cummax(0), lambda a: a.aminmax(dim=1), torch.frexp),
    *(torch.linalg.qr, torch.linalg.eigh, torch.linalg.svd, torch.svd, torch.linalg.slogdet),
    *(torch.slogdet, torch.linalg.lu, torch.linalg.lu_factor, torch.linalg.inv_ex),
    *(torch.linalg.cholesky_ex, lambda a: torch.linalg.solve_ex(a, a)),
    lambda a: torch.linalg.lstsq(a, a),
)


class Named(nn.Module):
    def forward(self, a):
        self.kinds = [type(function(a)) for function in NAMED]
        return a


def test_results_have_pytorchs_names():
    a = torch.randn(3, 3)
    a = a @ a.T + torch.eye(3)
    found, expected = Named(), Named()
    tt.inference_model(found)(a)
    expected(a)
    assert found.kinds == expected.kinds
