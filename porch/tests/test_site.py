"""The site: nothing public is missing from its reference, and what it quotes exists."""

import pathlib
import re

import pytest

import tailrace as tr

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
MODULES = {"callbacks", "data", "distributed", "errors", "optimizers"}


@pytest.mark.parametrize("name", sorted(set(tr.__all__) - MODULES))
def test_every_public_name_is_in_the_reference(name):
    if name in ("TailraceError", "DeviceError"):  # with all of tailrace.errors
        assert "automodule:: tailrace.errors" in REFERENCE
        return
    assert re.search(rf":: tailrace\.{name}$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("porch", ["keras", "torch"])
def test_every_name_of_the_front_ends_is_in_the_reference(porch):
    source = (ROOT / "src" / "tailrace" / porch / "__init__.py").read_text()
    names = re.findall(r"\b(\w+) as \1\b", source)
    assert len(names) > 10
    missing = [name for name in names if f":: tailrace.{porch}.{name}\n" not in REFERENCE]
    assert not missing


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([\w/]+)$", index, re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    pages -= {"index"} | {page for page in pages if page.startswith("reference/")}
    assert pages == listed


def test_messages_of_the_troubleshooting_page_exist():
    quoted = re.findall(
        r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    source = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # sentences go over several lines
        for path in (ROOT / "src" / "tailrace").rglob("*.py")
    )
    assert len(quoted) > 8
    assert [message for message in quoted if message not in source] == []
