"""The site: nothing public is missing from its reference, and what it quotes exists."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import types
import typing

import pytest

import tailrace as tr
from reference import NAMES, described, examples, is_installed, run_as_pasted
from reference import TEXT as REFERENCE

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
MODULES = {"callbacks", "data", "distributed", "errors", "optimizers"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
EXTERNAL = {
    "https://docs.wandb.ai",
    "https://github.com/pytorch/torchtitan",
    "https://maxtext.readthedocs.io",
    "https://ui.perfetto.dev",
}
"""Every address outside the site. Nothing is fetched here: open a new one before you add it."""
IDIOM = re.compile(
    r"\b(somebody|nobody|whoever|so many|for want of|told|mended|lies|stands|anew"
    r"|inside of|outside of)\b"
)
"""Words that a native reader stops at."""


def prose(page: pathlib.Path) -> str:
    """A page without its code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", sorted(set(tr.__all__) - MODULES))
def test_every_public_name_is_in_the_reference(name):
    if name in ("TailraceError", "DeviceError"):  # with all of tailrace.errors
        assert "automodule:: tailrace.errors" in REFERENCE
        return
    assert re.search(rf":: tailrace\.{name}$", REFERENCE, re.MULTILINE)


RESULTS = [
    ("batches", {"without", "rows", "iterate"}),
    ("open_run", {"is_ended", "interventions", "history", "records", "refresh"}),
    ("Trainer.replay", set()),
    ("Trainer.explain_step", {"grew_first"}),
    ("Trainer.explain", set()),
    ("Trainer.profile", {"tree", "treemap", "save"}),
    ("on_spike", set()),
    ("diff", set()),
    ("plan", {"check", "simulate", "draw"}),
    ("what_if", {"best"}),
]


@pytest.mark.parametrize(("name", "members"), RESULTS)
def test_what_a_function_returns_is_in_the_reference(name, members):
    function = inspect.unwrap(described(name))
    # Alone: parameters may have aliases that refer to themselves, such as `Select`.
    alone = types.SimpleNamespace(__annotations__={"return": function.__annotations__["return"]})
    returned = typing.get_type_hints(alone, function.__globals__)["return"]
    entry = f"autoclass:: {returned.__module__}.{returned.__qualname__}()\n"
    _, found, options = REFERENCE.partition(entry)
    assert found
    listed = re.match(r"   :members:(.*)\n", options)
    named = set(listed[1].strip().split(", ")) - {""} if listed else set()
    shown = named or (set(vars(returned)) if listed else set())
    assert members <= shown


NOT_DESCRIBED = {
    "Deferred",
    "Model",
    "Option",
    "Patience",
    "Returned",
    "Staged",
    "Staging",
    "Timetable",
    "Wanted",
    "_Phased",
}
"""What methods return that the engine calls, and bases of what is described."""


def returned_by(name):
    """The classes of ours that a name returns, or one of its methods and properties."""
    value = described(name)
    if inspect.isfunction(value):
        yield from ours_in(value)
    for member in vars(value).values() if isinstance(value, type) else ():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function) and not function.__name__.startswith("_"):
            yield from ours_in(function)


def ours_in(function):
    """The classes of ours in what a function is said to return."""
    try:
        waiting = [typing.get_type_hints(function).get("return")]
    except (
        NameError
    ):  # named for type checkers only: the pictures of a run, the trainer of a callback
        return
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if isinstance(kind, type) and kind.__module__.startswith("tailrace."):
            yield kind


def test_everything_that_is_returned_is_in_the_reference():
    installed = [name for name in NAMES if is_installed(name)]
    found = {id(described(name)) for name in installed}
    missing = {
        f"{name}: {kind.__qualname__}"
        for name in installed
        for kind in returned_by(name)
        if id(kind) not in found and kind.__name__ not in NOT_DESCRIBED
    }
    assert missing == set()


CALLED = [name for name in NAMES if f":: tailrace.{name}\n" in f"{REFERENCE}\n"]
"""The names that users call; what these return has parentheses in the reference."""
WITHOUT_ERRORS = {
    "keras.CrossReplicaOptimizer",
    "keras.LayerStageAssignment",
    "keras.MaybeOutfeed",
    "keras.NestedModelStageAssignment",
    "keras.Outfeed",
    "keras.OutfeedCallback",
    "torch.Block",
    "torch.BlockFunction",
    "torch.module_repr",
    "torch.register_container",
    "torch.remove_blocks",
    "training",
}
"""Names that have no rule of their own that a caller could break."""


@pytest.mark.parametrize("name", [n for n in CALLED if not n.startswith("compat.")])
def test_every_name_has_an_example_and_its_errors(name):
    """Those of `tailrace.compat` have the tables of the originals' errors on their pages."""
    assert examples(name)
    value = described(name)
    members = vars(value).values() if isinstance(value, type) else ()
    texts = [inspect.getdoc(one) or "" for one in (value, *filter(callable, members))]
    mentions = re.search(r"Raises:|Error\b|raises", "\n".join(texts))
    assert bool(mentions) != (name in WITHOUT_ERRORS)


@pytest.mark.parametrize("name", NAMES)
def test_properties_are_described_without_a_colon(name):
    """Text before a colon is shown as a type: Napoleon reads `type: description`."""
    for member in vars(described(name)).values():
        if isinstance(member, property):
            first = (member.__doc__ or "").partition("\n")[0]
            assert ":" not in re.sub("`[^`]*`", "", first)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("keras.", "compat."))])
def test_examples_of_the_reference_run_as_pasted(name, same_devices):
    for test in examples(name):
        run_as_pasted(test)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("keras.")])
def test_examples_of_keras_run_as_pasted(name, same_devices):
    for test in examples(name):
        code = "".join(example.source for example in test.examples)
        # Keras chooses its backend when it is imported: ours comes first.
        assert re.search(r"import (tailrace\.)?keras\b", code)[1], code
        run_as_pasted(test)


def test_an_example_of_keras_in_a_clean_interpreter():
    (test,) = examples("keras.CrossReplicaOptimizer")
    clean = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    code = "".join(example.source for example in test.examples)
    run = [sys.executable, "-c", f"{code}print(keras.backend.backend())"]
    done = subprocess.run(run, env=clean, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "jax", done.stderr


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
    assert pages - {"index"} == listed


def test_methods_that_a_trainer_inherits_are_in_the_reference():
    inherited = set(dir(tr.Trainer)) - set(vars(tr.Trainer)) - set(dir(object))
    methods = {name for name in inherited if not name.startswith("_")}
    assert methods  # those that look back
    assert {
        name for name in methods if f"automethod:: tailrace.Trainer.{name}\n" not in REFERENCE
    } == set()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_find_them(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(page)):
        if "://" not in target:
            aim = page.parent / target if target else page
            assert anchor in anchors(aim), f"{aim.name} has no heading for #{anchor}"


def test_addresses_outside_the_site_are_known():
    found = {
        address.rstrip("/")
        for page in PAGES
        for address in re.findall(r"https?://[^\s)>\]`\"']+", prose(page))
    }
    assert found == EXTERNAL


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_in_plain_english(page):
    if page.name != "originals_names.md":  # made of the messages in src
        assert IDIOM.findall(prose(page)) == []


def test_every_error_is_in_the_table_of_calls():
    page = (DOCS / "reference" / "errors.md").read_text()
    kinds = [kind for kind in vars(tr.errors).values() if isinstance(kind, type)]
    names = [kind.__name__ for kind in kinds if issubclass(kind, tr.TailraceError)]
    assert [name for name in names if not re.search(rf"`(tr\.)?{name}`", page)] == []
