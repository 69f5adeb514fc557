"""Modules that the tests of the PyTorch front end share, and plain PyTorch to compare with."""

import copy

import torch
from torch import nn

import tailrace.torch as tt


def program_of(model):
    """The program of a model. It is not public: how often one is made, how a call is divided and what
    is compiled cannot be seen from outside, and must not be."""
    return model._program


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


class SeedModel(nn.Module):
    """The classifier of the seed, smaller."""

    def __init__(self, features=12, hidden=8, classes=4):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)
        self.relu = nn.ReLU()
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels=None):
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.log_softmax(self.fc2(x))
        if self.training:
            return x, self.loss(x, labels)
        return x


class Regression(nn.Module):
    """One linear layer and a squared error."""

    def __init__(self, features=3, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(features, 1, dtype=dtype)

    def forward(self, x, y):
        out = self.linear(x)
        return out, nn.functional.mse_loss(out, y)


def digits(rows, features=12, classes=4, seed=0):
    """Rows of data for `SeedModel`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, features, generator=generator)
    return x, torch.randint(0, classes, (rows,), generator=generator)


def line(rows, features=3, seed=0):
    """Rows of data for `Regression`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    return x, x.sum(1, keepdim=True)


def seeded(make, seed=0):
    """A module with the same weights each time, and a copy of it."""
    torch.manual_seed(seed)
    module = make()
    return module, copy.deepcopy(module)


def train_plainly(module, optimizer, batches, microbatches=1, replicas=1, reduction="mean"):
    """PyTorch's own loop: losses of all microbatches, and gradients of the last step."""
    losses = []
    per_step = microbatches * replicas
    for step in range(len(batches) // per_step):
        optimizer.zero_grad()
        for batch in batches[step * per_step : (step + 1) * per_step]:
            loss = module(*batch)[1]
            scale = per_step if reduction == "mean" else 1
            (loss / scale).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def cut(tensors, pieces):
    """The microbatches of a call, in order."""
    parts = [t.chunk(pieces) for t in tensors]
    return list(zip(*parts, strict=True))


def training(make=SeedModel, lr=0.1, optimizer=None, **options):
    """(model, module, reference module): a wrapped module and its copy."""
    module, reference = seeded(make)
    made = optimizer(module) if optimizer else torch.optim.SGD(module.parameters(), lr=lr)
    return tt.training_model(module, made, **options), module, reference
