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


def modules():
    return [info.name for info in pkgutil.iter_modules(tk.__path__, "tailrace.keras.")]


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
        timeout=120,
        check=False,
    )


def test_the_backend_is_chosen_or_refused():
    chosen = imported("import tailrace.keras, keras; print(keras.backend.backend())")
    assert chosen.stdout.strip().endswith("jax"), chosen.stderr
    refused = imported("import keras, tailrace.keras", KERAS_BACKEND="numpy")
    assert "tailrace.keras runs Keras on its JAX backend" in refused.stderr
