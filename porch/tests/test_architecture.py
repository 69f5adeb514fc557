"""docs/architecture.md names files that exist, in its text and in its picture."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tailrace"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
NAMED = re.compile(r"`([\w./]+(?:\.pyi?|/)|(?:tests|pipeline)/\w+)`")


def test_every_path_of_the_architecture_exists():
    named = set(NAMED.findall(ARCHITECTURE.read_text(encoding="utf-8")))
    assert len(named) > 80
    missing = [n for n in named if not (SOURCE / n).exists() and not (ROOT / n).exists()]
    assert not missing


def test_every_file_in_the_picture_of_the_architecture_exists():
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    named = re.findall(r">([\w/]+\.py)<", picture)
    assert len(named) > 20
    files = [f"/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*.py")]
    assert not [name for name in named if not any(f.endswith(f"/{name}") for f in files)]


def test_the_drawn_figures_are_up_to_date():
    path = ROOT / "docs" / "make_figures.py"
    spec = importlib.util.spec_from_file_location("make_figures", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["architecture", "dataflow", "--check"]) == 0


def test_file_names_in_docstrings_exist():
    ours = ("src", "tests", "docs", "examples", "benchmarks")
    there = {path.name for folder in ours for path in (ROOT / folder).rglob("*.py")}
    stale = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\b\w+\.py\b", path.read_text(encoding="utf-8"))
        if name not in there and name != "script.py"  # a user's
    }
    assert not stale
