"""Modules are recognised by what is loaded; what they rely on of their libraries is probed."""

import re
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.base.seams import Package
from tailrace.errors import ProgramError, VersionError
from tailrace.trainer.modules import equinox_seams, flax_seams
from tailrace.trainer.modules.binding import Plain
from tailrace.trainer.modules.recognition import bind

SEAMS = [*flax_seams.SEAMS, *equinox_seams.SEAMS]


def test_training_loads_no_library_of_modules():
    code = (
        "import sys, numpy, optax, tailrace as tr\n"
        "loss = lambda p, x: ((p['params']['w'] * x) ** 2).mean()\n"
        "start = {'params': {'w': numpy.ones(3, 'f4')}}\n"
        "tr.Trainer(loss, optax.sgd(0.1), start).tensors(numpy.ones(3, 'f4'))\n"
        "print({'flax', 'equinox'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    "params",
    [
        mlp(),
        [np.ones(2, "f4")],
        np.float32(1),
        {"params": np.ones(2, "f4")},  # an array of that name, no collection
        {"params": {"w": np.ones(2, "f4")}, "scale": np.ones(2, "f4")},
    ],
)
def test_trees_of_arrays_are_left_alone(params):
    binding, loss = bind(mlp_loss, params, None)
    assert isinstance(binding, Plain)
    assert binding.params is params
    assert loss is mlp_loss


def test_a_tree_of_modules_is_a_model_too():
    x, y = regression(1)[0]
    parts = {
        "nnx": [nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))],
        "equinox": [eqx.nn.Linear(3, n, key=jax.random.key(n)) for n in (3, 1)],
    }

    def loss(model, x, y):
        first, second = model
        if isinstance(first, eqx.Module):
            first, second = jax.vmap(first), jax.vmap(second)
        return ((second(first(x))[:, 0] - y) ** 2).mean()

    for kind, weight in (("nnx", "kernel"), ("equinox", "weight")):
        trainer = tr.Trainer(loss, optax.sgd(0.1), parts[kind])
        names = trainer.tensors((x, y)).names
        assert {f"grad/1/{weight}", "activation/0", "activation/1"} <= set(names)
        assert_bits_equal(trainer.model[1].bias[...], parts[kind][1].bias[...])


class Nnx(nnx.Module):
    pass


class Equinox(eqx.Module):
    pass


class Linen(nn.Module):
    pass


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (Nnx, "'params', the NNX class Nnx. Give an instance of it: Nnx(..., rngs=nnx.Rngs(0))."),
        (
            Equinox,
            "'params', the Equinox class Equinox. Give an instance of it: Equinox(..., key=key).",
        ),
        (
            Linen(),
            "'params', a Linen module, Linen. Linen modules hold no values: give the variables "
            "that model.init(key, x) returns",
        ),
        (
            Linen,
            "'params', the Linen class Linen. Linen modules hold no values: give the variables that "
            "Linen(...).init(key, x) returns",
        ),
        ({"head": Linen()}, "'head', a Linen module, Linen."),
        ({"head": int}, "'head', a type. Give the arrays only"),
    ],
)
def test_what_holds_no_values_is_named(params, text):
    with pytest.raises(
        ProgramError, match=re.escape(f"params is a tree of arrays. Received: {text}")
    ):
        tr.Trainer(mlp_loss, optax.sgd(0.1), params)


# -- seams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.name}, {seam.used_for}")
def test_every_seam_is_as_known(seam):
    assert seam.probe()


@pytest.mark.parametrize(
    ("seams", "owner", "name", "text"),
    [
        (flax_seams, nnx, "iter_modules", "Flax 9.0: the classes of modules have changed"),
        (flax_seams, nnx, "to_pure_dict", "Flax 9.0: merge of plain values has changed"),
        (equinox_seams, eqx, "field", "Equinox 9.0: the classes of modules have changed"),
        (
            equinox_seams,
            eqx.nn.State,
            "tree_flatten",
            "Equinox 9.0: the tree of a State has changed",
        ),
    ],
)
def test_a_change_is_one_sentence(monkeypatch, seams, owner, name, text):
    package = Package(seams.PACKAGE.title, seams.PACKAGE.name, "9.0", seams.PACKAGE.newest)
    monkeypatch.setattr(seams, "PACKAGE", package)
    seams.check.cache_clear()
    equinox_seams.scoped_class.cache_clear()
    monkeypatch.delattr(owner, name)
    with pytest.raises(VersionError, match=f"does not know {text}; use {package.name}<9.0"):
        seams.check()
