"""The reference of the originals' names: complete, and its examples run as pasted."""

import ast
import dataclasses
import enum
import importlib.util
import inspect
import re
import textwrap

import pytest

from reference import NAMES, described, examples, is_installed, run_as_pasted
from tailrace.compat.ipu.graph.seeding import reseed
from tailrace.compat.originals.lookup import look_up
from tailrace.compat.originals.names import all_names

OURS = [name for name in NAMES if name.startswith("compat.")]
REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

HAS_FRONT_ENDS = all(importlib.util.find_spec(name) for name in ("keras", "torch", "torchax"))
HERE = [
    entry
    for entry in all_names().values()
    if entry.verdict != "refused" and not entry.holder.startswith("poptorch.") and entry.holder
]


@pytest.fixture(autouse=True)
def _the_seed_of_every_test():
    yield
    reseed(0)


@pytest.fixture(scope="module")
def entries():
    """What the reference describes, by identity."""
    if not HAS_FRONT_ENDS:
        pytest.skip("Keras and PyTorch are not installed")
    return {id(described(name)) for name in NAMES}


def is_our_own(value):
    """Whether a name leads to a class or a function of ours, which is no exception."""
    home = getattr(value, "__module__", None) or ""
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    known = isinstance(value, type) or inspect.isroutine(value)
    return known and home.startswith("tailrace") and not is_error


def test_every_name_of_the_originals_is_in_the_reference(entries):
    ours = [entry.full for entry in HERE if is_our_own(look_up(entry))]
    assert len(ours) > 120
    missing = [full for full in ours if id(look_up(all_names()[full])) not in entries]
    assert missing == []


# -- what a description must have --------------------------------------------------------------


def shown():
    """(name, object) of every entry, and of the public methods of classes."""
    for name in filter(is_installed, OURS):
        value = described(name)
        yield name, value
        for member, found in vars(value).items() if isinstance(value, type) else ():
            function = getattr(found, "__func__", found)
            if not member.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{member}", function


def section(value, title):
    """The lines of a section of a docstring, such as "Args:"."""
    _, _, after = (inspect.getdoc(value) or "").partition(f"\n{title}:\n")
    return after.split("\n\n")[0]


def parameters(value):
    """The names that a call takes; none for those whose class is another library's."""
    function = vars(value).get("__init__") if isinstance(value, type) else value
    if function is None or (isinstance(value, type) and issubclass(value, enum.Enum)):
        return []
    found = inspect.signature(function).parameters.items()
    return [name for name, one in found if name not in ("self", "cls") and one.kind not in REST]


def test_every_argument_is_described():
    missing = []
    for full, value in shown():
        listed = section(value, "Args") or section(value, "Attributes")
        missing += [
            f"{full}({name}=)"
            for name in parameters(value)
            if not re.search(rf"^    \*{{0,2}}{name}: ", listed, re.MULTILINE)
        ]
    assert missing == []


def raised(value):
    """The names of the errors that a function raises itself."""
    function = vars(value).get("__init__") if isinstance(value, type) else value
    if not inspect.isfunction(function) or dataclasses.is_dataclass(value):
        return set()
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    found = (node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    calls = (exc.func for exc in found if isinstance(exc, ast.Call))
    return {call.id.lstrip("_") for call in calls if isinstance(call, ast.Name)}


def test_every_error_is_described():
    # Of these two, one says that a method is yours to write, the other lets a program compile again.
    apart = {"NotImplementedError", "NeedsNumber"}
    missing = [
        f"{full}: {error}"
        for full, value in shown()
        for error in raised(value) - apart
        if f"    {error}: " not in f"\n{section(value, 'Raises')}"
    ]
    assert missing == []


def test_every_name_has_an_example():
    values = {name: described(name) for name in filter(is_installed, OURS)}
    errors = {n for n, v in values.items() if isinstance(v, type) and issubclass(v, BaseException)}
    without = {n for n, v in values.items() if ">>>" not in (inspect.getdoc(v) or "")}
    assert without - errors == set()


def test_every_operation_has_a_line():
    pytest.importorskip("keras")
    import tailrace.compat.tensorflow.compat.v1  # noqa: F401  (fills the table with the losses)
    from tailrace.compat.tensorflow.operations.table import OPERATIONS

    assert len(OPERATIONS) > 250
    assert [path for path, function in OPERATIONS.items() if not inspect.getdoc(function)] == []


# -- the examples run -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_examples_run_as_pasted(name, same_devices):
    for test in examples(name):
        run_as_pasted(test)
