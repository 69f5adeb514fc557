"""The porch keeps the order of the house: versions that go together, light imports, descriptions."""

import doctest
import importlib
import inspect
import logging
import os
import pkgutil
import subprocess
import sys

import jax
import pytest
import torch

import tailrace.compat.poptorch
import tailrace.torch as tt
from tailrace import errors
from tailrace.torch.torchax import loading, versions


def modules():
    for package in (tt, tailrace.compat.poptorch):
        yield package.__name__
        yield from (i.name for i in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name, same_devices):
    with jax.numpy_dtype_promotion("standard"):
        failed, _ = doctest.testmod(
            importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
        )
    assert not failed


@pytest.mark.parametrize("package", [tt, tailrace.compat.poptorch], ids=["tt", "poptorch"])
def test_every_public_name_is_described(package):
    for name, value in vars(package).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value) and value.__module__.startswith("tailrace"):
            for member, found in vars(value).items():
                if not member.startswith("_") and inspect.isfunction(found):
                    assert inspect.getdoc(found), f"{name}.{member}"


@pytest.mark.parametrize("name", [name for name in dir(tt) if not name.startswith("_")])
def test_every_public_name_has_an_example(name):
    value = getattr(tt, name)
    ours = getattr(value, "__module__", "").startswith("tailrace")
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    if ours and callable(value) and not inspect.ismodule(value) and not is_error:
        assert ">>>" in (inspect.getdoc(value) or ""), f"tt.{name} has no example"


def test_names_of_the_contract():
    names = "training_model inference_model OutputMode DataLoader optim Block BeginBlock"
    for name in (*names.split(), "print_tensor", "identity_loss"):
        assert hasattr(tt, name)


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_does_not_start_jax_nor_torchax():
    code = (
        "import sys, tailrace as tr, tailrace.torch as tt\n"
        "assert 'torchax' not in sys.modules\n"
        "print(len(tr.configure(devices=3, platform='cpu')))"
    )
    assert python(code) == "3"


def test_importing_torchax_leaves_no_traces():
    code = (
        "import logging, os, torch, jax\n"
        "before = dict(os.environ)\n"
        "from tailrace.torch.torchax.loading import environment\n"
        "env = environment()\n"
        "assert env is environment()\n"
        "assert dict(os.environ) == before\n"
        "assert not logging.getLogger().handlers\n"
        "assert torch.backends.mha.get_fastpath_enabled()\n"
        "try: torch.ops.aten.add.no_such_overload\n"
        "except AttributeError: print('as before')"
    )
    assert python(code) == "as before"


def test_missing_overloads_are_placeholders_while_torchax_is_imported():
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.prod.no_such_overload
    with loading._placeholders():
        one, other = (torch.ops.aten.prod.no_such_overload for _ in range(2))
        assert "aten.prod.no_such_overload" in repr(one)
        assert one != other
        assert torch.ops.aten.add.Tensor is not one
        with pytest.raises(AttributeError):
            _ = torch.ops.aten.prod.__no_such_dunder__
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.prod.no_such_overload
    assert logging.getLogger().handlers is not None


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu"])
def test_pairs_that_go_together(torch_version):
    versions.check_pair(torch_version, "0.0.13")


@pytest.mark.parametrize(
    ("torch_version", "torchax_version"),
    [("2.10.0", "0.0.13"), ("2.14.0", "0.0.13"), ("2.13.0", "0.0.12"), ("2.13.0", "0.1.0")],
)
def test_other_pairs_are_refused(torch_version, torchax_version):
    with pytest.raises(
        errors.OptionError, match="torch >=2.11,<2.14 together with torchax"
    ) as caught:
        versions.check_pair(torch_version, torchax_version)
    assert f"Received: torch {torch_version}, torchax {torchax_version}" in str(caught.value)


def test_missing_packages_are_named():
    for pair, name in (((None, None), "torch"), (("2.13.0", None), "torchax")):
        with pytest.raises(errors.MissingDependency, match=f"needs the package '{name}'"):
            versions.check_pair(*pair)


NEIGHBOURS = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import data

KINDS = [
    torch.Tensor, nn.Parameter, nn.Module, nn.Linear, nn.utils.clip_grad, torch.optim.Optimizer,
    torch.optim.AdamW, lr_scheduler.LRScheduler, data.DataLoader, torch.autograd.Function,
    torch.amp.GradScaler, torch.Generator,
]
# PyTorch itself wraps the step of a class when it makes the first optimizer of it.
torch.optim.AdamW(nn.Linear(1, 1).parameters())


def now():
    return {(kind.__name__, name): value for kind in KINDS for name, value in vars(kind).items()}


def differs():
    then, found = BEFORE, now()
    return sorted(key for key in then.keys() | found if then.get(key) is not found.get(key))


BEFORE = now()
import tailrace.torch as tt

print(differs())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.linear(x), y)


net = Net()
optimizer = torch.optim.AdamW(net.parameters())
scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
model = tt.training_model(net, optimizer, scheduler=scheduler, max_grad_norm=1.0)
loader = tt.DataLoader(model, data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
for batch in loader:
    model(*batch)
net.state_dict(), optimizer.state_dict()
print(differs())
model.destroy()
print(differs())
"""


def test_classes_of_pytorch_are_put_back():
    """While a model trains, reading `.grad` of a parameter says that it stays None; nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", NEIGHBOURS], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "[('Parameter', 'grad')]", "[]"], done.stderr
