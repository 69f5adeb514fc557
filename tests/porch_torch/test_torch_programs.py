"""Modules and training loops as PyTorch users write them, each against PyTorch's own loop."""

import copy

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close

STEPS = 4
S = torch.optim.lr_scheduler


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 8, generator=generator)
    return x, torch.randint(0, 4, (6,), generator=generator)


class Base(nn.Module):
    """A body, whose result has four classes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def body(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x, y):
        out = self.body(x)
        return out, F.cross_entropy(out.float(), y)


class Buffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def body(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
                self.count += 1
        return super().body((x - self.mean) / (1 + self.count))


class Norms(Base):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleDict(
            {
                "slow": nn.BatchNorm1d(8, momentum=0.01),
                "still": nn.BatchNorm1d(8).eval(),
                "plain": nn.BatchNorm1d(8, affine=False, track_running_stats=False),
            }
        )

    def body(self, x):
        for norm in self.norms.values():
            x = norm(x)
        return super().body(x)


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8, padding_idx=0)
        self.up.weight = nn.Parameter(self.table.weight[1:9].detach().clone())
        self.again = nn.Linear(8, 8)
        self.again.weight = self.up.weight

    def body(self, x):
        picked = self.table((x.abs() * 3).long() % 9).sum(1)
        return self.down(self.again(torch.tanh(self.up(x) + picked)) @ self.up.weight.t())


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.offset = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8) * n) for n in (1, 2)])

    def body(self, x):
        with torch.no_grad():
            scale = self.scales[1] * x.std()
        penalty = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        out = super().body(x * self.scales[0] * scale + self.offset.detach())
        return out + 0.01 * penalty


class Views(Base):
    def body(self, x):
        h = self.up(x).clone()
        half = h.view(6, 2, 4)[:, 0]
        half *= 2
        half[:, 1:].add_(1)
        h[h < 0] = 0.1
        h.select(1, 3).copy_(x[:, 0])
        h.index_put_((torch.tensor([0, 0]),), torch.ones(2, 8), accumulate=True)
        h[:, ::2] -= h[:, 1::2]
        return self.down(h)


class Hooks(Base):
    def __init__(self):
        super().__init__()
        self.up.register_forward_hook(lambda module, given, out: torch.tanh(out) + given[0])
        self.down.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        self.register_forward_hook(lambda module, given, out: (out[0] + given[0].mean(), out[1]))


class Checkpointed(Base):
    def body(self, x):
        from torch.utils.checkpoint import checkpoint, checkpoint_sequential

        x = checkpoint(lambda h: torch.tanh(self.up(h)), x, use_reentrant=False)
        return checkpoint_sequential(nn.Sequential(nn.ReLU(), self.down), 2, x, use_reentrant=False)


class Parametrized(Base):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(2, 8, num_layers=2, bidirectional=True, batch_first=True)

    def body(self, x):
        out, (hidden, _) = self.cell(x.view(6, 4, 2))
        return self.down(torch.relu(hidden[0] + hidden[-1] + out[:, -1, :8]))


class Still(Base):
    def body(self, x):
        x = F.dropout(x, 0.5, training=False)
        x = F.dropout(x, 0.0) + nn.Dropout(0.9).eval()(x)
        return super().body(F.alpha_dropout(x, 0.5, training=False))


class Autocast(Base):
    precision = jnp.bfloat16

    def body(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.up(x)
            assert h.dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(h.float())
        return self.down(h)


class Inspecting(Base):
    """Reads modules and parameters by name, and changes attributes that are not tensors."""

    calls = 0

    def body(self, x):
        self.calls += 1
        named = dict(self.named_parameters())
        x = F.linear(x, named["up.weight"], self.get_parameter("up.bias"))
        x = x + self.state_dict()["up.bias"].detach() * sum(1 for _ in self.children())
        return F.linear(torch.relu(x), self.down.weight, self.down.bias)


class Spectral(Base):
    def body(self, x):
        spectrum = torch.fft.rfft(self.up(x))
        attended = torch.einsum("bi,bj->bij", x, spectrum.abs().mean(1, keepdim=True))
        values, index = x.sort(dim=1, descending=True)
        mixed = attended.squeeze(-1).gather(1, index) + values.cumsum(1)
        return self.down(torch.where(mixed > 0, mixed, mixed.exp() - 1))


MODULES = (
    *(Base, Buffers, Norms, Tied, Frozen, Views, Hooks, Checkpointed, Parametrized, Recurrent),
    *(Still, Autocast, Inspecting, Spectral),
)


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.05, momentum=0.9)


def arrays(make, *trees):
    """The values of trees of tensors, in the precision that a module computes in."""
    dtype = getattr(make, "precision", None)

    def array(tensor):
        value = tensor.detach().numpy().copy()
        return value.astype(dtype) if dtype and value.dtype.kind == "f" else value

    return [[array(leaf) for leaf in leaves_of(tree)] for tree in trees]


def leaves_of(tree):
    return list(tree.values() if isinstance(tree, dict) else tree)


def compare(make, optimizer=sgd, schedule=None):
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    optimizers = [optimizer(one) for one in (module, plain)]
    schedules = [schedule(one) if schedule else None for one in optimizers]
    model = tt.training_model(module, optimizers[0])
    for step in range(STEPS):
        batch = rows(step)
        out, loss = model(*batch)
        optimizers[1].zero_grad()
        expected = plain(*batch)
        expected[1].backward()
        optimizers[1].step()
        for one, value in zip(schedules, (loss, expected[1]), strict=True):
            if isinstance(one, S.ReduceLROnPlateau):
                one.step(value.item())
            elif one is not None:
                one.step()
        assert_close(*arrays(make, [out, loss], expected))
    assert_close(*arrays(make, module.state_dict(), plain.state_dict()))
    module.eval()
    plain.eval()
    assert_close(*arrays(make, tt.inference_model(module)(*rows()), plain(*rows())))


@pytest.mark.parametrize("make", MODULES)
def test_modules(make):
    compare(make)


class Packed(Base):
    def body(self, x):
        lengths = torch.tensor([4, 4, 3, 2, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(6, 4, 2), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


def test_packed_sequences_are_refused_by_name():
    text = "aten::_pack_padded_sequence has no lowering.*Compute on the padded batch"
    with pytest.raises(tr.TailraceError, match=text):
        tt.training_model(Packed())(*rows())


def groups(kind, **options):
    def made(module):
        several = [
            {"params": module.up.parameters(), "lr": 0.1, "weight_decay": 0.1},
            {"params": [module.down.weight], "lr": 0.01},
            {"params": [module.down.bias]},
        ]
        return kind(several, lr=0.02, **options)

    return made


OPTIMIZERS = {
    "nesterov": (groups(torch.optim.SGD, momentum=0.9, nesterov=True), lambda o: S.StepLR(o, 2)),
    "damped": (
        groups(torch.optim.SGD, momentum=0.9, dampening=0.5, maximize=True),
        lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1, 1), S.ExponentialLR(o, 0.5)], [2]),
    ),
    "amsgrad": (
        groups(torch.optim.Adam, amsgrad=True),
        lambda o: S.OneCycleLR(o, [0.1, 0.05, 0.02], total_steps=STEPS + 1),
    ),
    "adamw": (
        groups(torch.optim.AdamW, betas=(0.8, 0.9)),
        lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    ),
    "rmsprop": (
        groups(torch.optim.RMSprop, centered=True, momentum=0.5),
        lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_schedules(name):
    compare(Base, *OPTIMIZERS[name])


def test_halves_of_a_module_are_trained_apart():
    torch.manual_seed(0)
    module = Base()
    plain = copy.deepcopy(module)
    kinds = (lambda m: torch.optim.SGD(m.up.parameters(), 0.1), lambda m: sgd(m.down))
    for kind in kinds:
        model, optimizer = tt.training_model(module, kind(module)), kind(plain)
        for step in range(2):
            model(*rows(step))
            plain.zero_grad()
            plain(*rows(step))[1].backward()
            optimizer.step()
        model.destroy()
    assert_close(*arrays(Base, module.state_dict(), plain.state_dict()))
