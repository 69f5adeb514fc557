"""The porch keeps the order of the house: names are described, examples run, backends are checked."""

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import tailrace.keras as tk

CONTRACT = [
    "MaybeOutfeed",
    "MaybeOutfeedQueue",
    "Outfeed",
    "OutfeedCallback",
    "OutfeedOptimizer",
    "OutfeedOptimizerMode",
    "PipelineStage",
    "Strategy",
    "adopt",
]


@pytest.mark.parametrize("name", CONTRACT)
def test_the_names_of_the_contract_are_there_and_described(name):
    assert inspect.getdoc(getattr(tk, name))


@pytest.mark.parametrize("name", [name for name in dir(tk) if not name.startswith("_")])
def test_every_public_name_has_an_example(name):
    value = getattr(tk, name)
    ours = getattr(value, "__module__", "").startswith("tailrace")
    if ours and callable(value) and not inspect.ismodule(value):
        assert ">>>" in (inspect.getdoc(value) or ""), f"tk.{name} has no example"


def modules():
    return [info.name for info in pkgutil.walk_packages(tk.__path__, "tailrace.keras.")]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert not failed


def imported(code, **environment):
    clean = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**clean, "JAX_PLATFORMS": "cpu", **environment},
        timeout=600,
        check=False,
    )


def test_the_backend_is_chosen_or_refused():
    chosen = imported("import tailrace.keras, keras; print(keras.backend.backend())")
    assert chosen.stdout.strip().endswith("jax"), chosen.stderr
    refused = imported("import keras, tailrace.keras", KERAS_BACKEND="numpy")
    assert "tailrace.keras runs Keras on its JAX backend" in refused.stderr
