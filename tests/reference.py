"""The pages of the reference: the names that they describe, and the examples of those."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil
import re

import jax
import pytest

PAGES = pathlib.Path(__file__).parents[1] / "docs" / "reference"
TEXT = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
NAMES = re.findall(r"^\.\. auto(?:function|class|method):: tailrace\.([\w.]+)", TEXT, re.MULTILINE)

LIBRARIES = {
    "keras": "keras",
    "torch": "torch",
    "compat.ipu.distributed": "keras",
    "compat.ipu.ipu_strategy": "keras",
    "compat.ipu.keras": "keras",
    "compat.ipu_tensorflow_addons": "keras",
    "compat.popdist.poptorch": "torch",
    "compat.poptorch": "torch",
    "compat.tensorflow": "keras",
}
"""What names that begin like this need besides JAX."""


def library(name: str) -> str | None:
    """The library that a name of the reference needs."""
    found = (lib for start, lib in LIBRARIES.items() if f"{name}.".startswith(f"{start}."))
    return next(found, None)


def is_installed(name: str) -> bool:
    """Whether the library that a name needs is there."""
    needed = library(name)
    return needed is None or importlib.util.find_spec(needed) is not None


def described(name: str) -> object:
    """What a directive of the reference describes; a skip if its library is not installed."""
    needed = library(name)
    if not is_installed(name):
        pytest.skip(f"{needed} is not installed")
    if needed is not None:
        importlib.import_module(f"tailrace.{needed}")  # before Keras, which then runs on JAX
    if name.startswith("compat."):  # a package may have a function of the name of one of its files
        importlib.import_module(".".join(["tailrace", *name.split(".")[:2]]))
    try:
        return pkgutil.resolve_name(f"tailrace:{name}")
    except AttributeError:  # a module that nothing has imported yet
        return pkgutil.resolve_name(f"tailrace.{name}")


def examples(name: str) -> list[doctest.DocTest]:
    """The examples of a name and of its members, each in an empty namespace, as a reader pastes it."""
    found = doctest.DocTestFinder().find(described(name), name, module=False, globs={})
    return [test for test in found if test.examples]


def run_as_pasted(test: doctest.DocTest) -> None:
    """Run an example; it must show what it says."""
    with jax.numpy_dtype_promotion("standard"):
        done = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert done.failed == 0
