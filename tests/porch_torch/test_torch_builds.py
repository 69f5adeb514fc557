"""`rewrites=` and `compiler_options=` of PyTorch models: in each program, and kept in files."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tailrace.torch as tt
from oracles import assert_close
from tailrace.errors import OptionError
from tailrace.jaxprs.boundaries import keeps_barriers
from tailrace.program.compiling.compiled_programs import forget_programs

NAME = "xla_cpu_parallel_codegen_split_count"
OFF = {"rewrites": {"boundaries": False}, "compiler_options": {NAME: 2}}
X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)

pytestmark = pytest.mark.cpu


class Residual(nn.Module):
    """Five residual layers, and their loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return x, tt.identity_loss(x**2, reduction="mean")


def training(**options):
    torch.manual_seed(0)
    module = Residual()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    return tt.training_model(module, sgd, **options), module


@pytest.fixture
def programs(monkeypatch):
    """What a function returns, the boundaries in what it compiles, and the options of each program."""
    keeps_barriers()
    found = []
    plain = jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **kwargs):
        found.append((self.as_text(), dict(compiler_options or {})))
        return plain(self, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)

    def look(run):
        forget_programs()
        found.clear()
        result = run()
        text = "".join(text for text, _ in found)
        count = text.count("stablehlo.case") + text.count("stablehlo.optimization_barrier")
        return result, count, [options for _, options in found]

    return look


def trained(**options):
    model, module = training(**options)
    loss = model(torch.from_numpy(X))[1]
    model.copy_weights_to_host()
    return [loss.numpy(), *(p.detach().numpy() for p in module.parameters())]


def inferred(**options):
    torch.manual_seed(0)
    return [out.numpy() for out in tt.inference_model(Residual(), **options)(torch.from_numpy(X))]


@pytest.mark.parametrize("run", [trained, inferred])
def test_in_training_and_inference(run, programs):
    on, more, _ = programs(run)
    off, fewer, passed_on = programs(lambda: run(**OFF))
    assert_close(on, off)
    assert more > fewer
    assert passed_on
    assert all(options[NAME] == "2" for options in passed_on)


def test_what_there_is_not_is_refused():
    with pytest.raises(OptionError, match="rewrites= has the names 'boundaries'"):
        training(rewrites={"boundary": True})
    with pytest.raises(OptionError, match="options that this XLA has.*xla_nothing"):
        training(compiler_options={"xla_nothing": 1})


def test_a_loaded_model_is_built_as_the_saved_one(tmp_path, programs):
    model, _ = training(**OFF)
    model(torch.from_numpy(X))
    model.save(tmp_path / "model.npz")

    def go_on():
        again, _ = training()
        again.load(tmp_path / "model.npz")
        again(torch.from_numpy(X))

    _, without, passed_on = programs(go_on)
    assert [options[NAME] for options in passed_on] == ["2"] * len(passed_on)
    _, with_them, _ = programs(trained)
    assert with_them > without
