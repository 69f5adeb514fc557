"""The reference of the originals' names: complete, and its examples run as pasted."""

import ast
import dataclasses
import enum
import importlib.util
import inspect
import re
import textwrap

import pytest

from reference import NAMES, described, examples, run_as_pasted
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


def shown(name):
    """(name, object) of an entry, and of its public methods."""
    value = described(name)
    yield name, value
    if isinstance(value, type):
        for member, found in vars(value).items():
            function = getattr(found, "__func__", found)
            if not member.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{member}", function


def section(text, title):
    """The lines of a section of a docstring, such as "Args:"."""
    _, _, after = text.partition(f"\n{title}:\n")
    return after.split("\n\n")[0]


def parameters(value):
    """The names that a call takes; none for those whose class is another library's."""
    function = value
    if isinstance(value, type):
        function = vars(value).get("__init__")
        if function is None or issubclass(value, enum.Enum):
            return []
    found = inspect.signature(function).parameters
    return [
        name for name, one in found.items() if name not in ("self", "cls") and one.kind not in REST
    ]


@pytest.mark.parametrize("name", OURS)
def test_every_argument_is_described(name):
    for full, value in shown(name):
        text = inspect.getdoc(value) or ""
        assert text, f"{full} has no description"
        listed = section(text, "Args") or section(text, "Attributes")
        missing = [
            parameter
            for parameter in parameters(value)
            if not re.search(rf"^    \*{{0,2}}{parameter}: ", listed, re.MULTILINE)
        ]
        assert not missing, f"{full}: {missing}"


def raised(value):
    """The names of the errors that a function raises itself."""
    function = vars(value).get("__init__") if isinstance(value, type) else value
    if not inspect.isfunction(function) or dataclasses.is_dataclass(value):
        return set()
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    found = (node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    calls = (exc.func for exc in found if isinstance(exc, ast.Call))
    return {call.id for call in calls if isinstance(call, ast.Name)}


@pytest.mark.parametrize("name", OURS)
def test_every_error_is_described(name):
    for full, value in shown(name):
        listed = section(inspect.getdoc(value) or "", "Raises")
        wanted = {error.lstrip("_") for error in raised(value)} - {"NotImplementedError"}
        missing = {error for error in wanted if f"{error}: " not in listed}
        assert missing <= {"NeedsNumber"}, full  # a program is then compiled for the number


@pytest.mark.parametrize("name", OURS)
def test_every_name_has_an_example(name):
    value = described(name)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    is_method = inspect.isfunction(value) and "." in value.__qualname__
    if not is_error and not is_method:
        assert ">>>" in (inspect.getdoc(value) or "")


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
