"""The code in README.md and docs/ runs: every `python` block and cell, one namespace to a page."""

import doctest
import pathlib
import re

import jax
import pytest

from tailrace.devices import devices

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:python|\{code-cell\} python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROMISE = re.compile(r"^print\(.*\)  # ((?:[-\d(\[]|True|False|float).*)$", re.MULTILINE)
NAMED_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: pathlib.Path) -> list[tuple[int, str]]:
    """The code of a page, each block with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start(1)].count("\n") + 1, m.group(1)) for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page, monkeypatch, capsys):
    found = blocks(page)
    if not found:
        pytest.skip("no code")
    # A page may choose its devices; the next test gets those of the configuration back.
    monkeypatch.setattr(devices, "_chosen", devices._chosen)
    namespace = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for line, code in found:
            if code.lstrip().startswith(">>>"):
                test = doctest.DocTestParser().get_doctest(code, namespace, page.name, None, line)
                runner = doctest.DocTestRunner()
                assert runner.run(test, clear_globs=False).failed == 0
                namespace.update(test.globs)
            else:
                # Blank lines in front, so that a traceback names the line of the page.
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for promise in (p for _, code in found for p in PROMISE.findall(code)):
        _, wanted, printed = printed.partition(promise.partition(":")[0])
        assert wanted, f"a comment promises {promise!r}, and it was not printed (in this order)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    missing = [target for target in inside if not (page.parent / target).exists()]
    assert not missing


def test_every_guarantee_has_its_test():
    named = NAMED_TEST.findall((ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (ROOT / "tests" / path).read_text(encoding="utf-8")
    ]
    assert not missing
