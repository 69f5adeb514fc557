"""The quick tier has a case of every file, and its exceptions are tests that exist."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

from covering import covering
from quick import slow_functions

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("test_*.py"))


def functions(path: Path) -> set[str]:
    """Test functions, also those of classes, and state machines of hypothesis (`Name = ...`)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names = [x.name for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {f"{node.name}::{name}" for name in names if name.startswith("test_")}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found |= {f"{name}::runTest"} if name.startswith("Test") else set()
    return {f"{path.name}::{name}" for name in found}


def test_names_of_files_are_unique():
    names = [path.name for path in FILES]
    assert len(names) == len(set(names)), "slow.txt names files without their folders"


def test_every_file_has_a_quick_case():
    without = [
        str(path.relative_to(HERE)) for path in FILES if not functions(path) - slow_functions()
    ]
    assert not without, f"nothing of these is in the quick tier; shorten tests/slow.txt: {without}"


def test_every_exception_exists():
    known = set().union(*(functions(path) for path in FILES))
    assert not slow_functions() - known, "these are not there any more: shorten slow.txt, long.txt"


def test_the_first_case_of_each_function_is_marked(request):
    """The selection itself, on the items of this session."""
    from quick import function_of

    first: dict[str, bool] = {}
    for item in request.session.items:
        marked = item.get_closest_marker("quick") is not None
        assert not (marked and item.get_closest_marker("exhaustive"))
        first.setdefault(function_of(item), marked)
    mine = "test_quick.py::test_the_first_case_of_each_function_is_marked"
    assert first[mine]
    assert not any(first.get(name) for name in slow_functions())


def test_a_covering_part_of_a_product_has_every_pair():
    axes = ["abcd", (1, 2, 3), (True, False), (5, 6)]
    cases = covering(*axes)
    assert len(cases) == 48
    usual = [case.values for case in cases if not case.marks]
    assert len(usual) < 16
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in usual} == set(itertools.product(first, second))
