"""Examples in docstrings and in the guide run, and figures are what their script makes."""

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import tailrace.pipeline

DOCS = Path(__file__).parents[2] / "docs"
ROOMS = ["tailrace.pipeline.schedule", "tailrace.pipeline.drawing"]
MODULES = [
    info.name
    for room in ROOMS
    for info in pkgutil.iter_modules(importlib.import_module(room).__path__, f"{room}.")
] + ["tailrace.pipeline.balance_cuts"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_plan_needs_no_jax():
    """Read from the source: what the plan's modules import."""
    for name in MODULES:
        source = Path(importlib.import_module(name).__file__).read_text()
        assert "import jax" not in source
        assert "from jax" not in source


def test_the_guide():
    text = (DOCS / "guides" / "schedules.md").read_text(encoding="utf-8")
    # The pipeline room has every name that the guide uses of the whole house.
    text = text.replace(">>> import tailrace as tr", ">>> import tailrace.pipeline as tr")
    test = doctest.DocTestParser().get_doctest(text, {}, "schedules.md", None, 0)
    assert len(test.examples) > 20
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_figures_are_up_to_date():
    spec = importlib.util.spec_from_file_location("make_figures", DOCS / "make_figures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = [name for name in script.FIGURES if name.startswith("schedule_")]
    assert len(names) == 6
    assert script.main([*names, "--check"]) == 0


def test_public_names():
    for name in tailrace.pipeline.__all__:
        assert getattr(tailrace.pipeline, name) is not None
