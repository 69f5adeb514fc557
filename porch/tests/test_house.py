"""The house keeps its order: imports point one way, porches stay outside, everything is described."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tailrace as tr
from tailrace.jaxprs import internals

HERE = Path(tr.__file__).parent
FILES = sorted(HERE.rglob("*.py"))

ROOMS = [
    "errors",
    "_version",
    "messages",
    "spans",
    "seams",
    "jaxprs",
    "data",
    "devices",
    "feeds",
    "taps",
    "records",
    "program",
    "pipeline",
    "profiling",
    "runs",
    "page",
    "trainer",
]
"""From the data door to the observers' door. A room sees those before it; the rest are porches."""

PORCHES = ["keras", "torch", "compat", "cli"]

PRIMITIVES = {
    value.name
    for value in vars(internals.primitives).values()
    if isinstance(value, internals.Primitive)
}
"""The names that JAX has for operations."""

# Records come before programs, which fill them; runs come before training, whose trainer writes them.


def room_of(path):
    """The room, or file at the top, that a module belongs to."""
    first = path.relative_to(HERE).parts[0]
    return first.removesuffix(".py")


def imports_of(path, top_level_only=False):
    """(module, line) of every import in a file; those for type checkers only do not count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def shown(path):
    return str(path.relative_to(HERE))


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_imports_point_one_way(path):
    room = room_of(path)
    if room == "__init__":
        return
    wrong = []
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] != "tailrace" or len(parts) < 2 or parts[1] == room:
            continue
        there = parts[1]
        if there not in ROOMS and there not in PORCHES:
            continue  # a name of the package itself, `from tailrace import x`, is checked below
        if room in ROOMS and (there in PORCHES or ROOMS.index(there) > ROOMS.index(room)):
            wrong.append(f"line {line}: {room} imports {module}")
        if room in PORCHES and room != "compat" and there in PORCHES:
            wrong.append(f"line {line}: {room} imports {module}, another porch")
    assert not wrong, wrong


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_room_has_its_place(path):
    assert room_of(path) in [*ROOMS, *PORCHES, "__init__"]


def test_the_architecture_lists_the_rooms_in_order():
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    _, _, after = page.read_text(encoding="utf-8").partition("## The rooms, in order")
    listed = re.findall(r"^\| `(\w+)` \|", after.partition("\n## ")[0], re.MULTILINE)
    assert listed == [*ROOMS, *PORCHES]


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_private_parts_of_others_and_no_relative_imports(path):
    for module, line in imports_of(path):
        for private in ("jax._src", "keras.src", "torch._"):
            assert not f"{module}.".startswith(f"{private}."), f"line {line} imports {module}"
    relative = [n for n in ast.walk(ast.parse(path.read_text())) if getattr(n, "level", 0)]
    assert not relative


def test_below_jax_s_public_surface_only_one_file_reaches():
    deep = ("jax.extend", "jax.interpreters", "jax._src")
    found = {
        shown(path) for path in FILES for module, _ in imports_of(path) if module.startswith(deep)
    }
    assert found <= {"jaxprs/internals.py"}


def test_what_depends_on_the_platform_asks_the_devices_chosen():
    asking = {shown(path) for path in FILES if "jax.default_backend()" in path.read_text()}
    # One compares with JAX's preference, one asks where Keras' own `device_put` goes.
    assert asking == {"devices/devices.py", "keras/data/batch_source.py"}


# -- who reads equations --------------------------------------------------------------------------

READERS = ("internals.Jaxpr", "control.", "operations.", "own_equations.", "stretches.", "visitor.")
"""What a file imports from the room of jaxprs if it has equations in its hands."""


def reads_equations(path):
    found = [module.removeprefix("tailrace.jaxprs.") for module, _ in imports_of(path)]
    return any(module.startswith(READERS) for module in found)


def inside_of_equations(tree):
    """Lines that take an equation apart: its primitive, or a parameter by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("primitive", "primitives"):
            yield node.lineno
        inner = getattr(node, "value", None)
        if not isinstance(inner, ast.Attribute) or inner.attr != "params":
            continue
        by_name = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        if by_name or (isinstance(node, ast.Attribute) and node.attr in ("get", "items", "keys")):
            yield node.lineno


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) != "jaxprs"], ids=shown)
def test_equations_are_read_in_one_room(path):
    tree = ast.parse(path.read_text())
    assert not list(inside_of_equations(tree)), "see jaxprs/control.py and own_equations.py"
    wrong = [m for m, _ in imports_of(path) if m.startswith("tailrace.jaxprs.internals.primitives")]
    assert not wrong
    if not reads_equations(path):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in PRIMITIVES, f"line {node.lineno}: see jaxprs/operations.py"


def test_equations_taken_apart_are_noticed():
    for text in (
        "eqn.params['length']",
        "loop.params.get('jaxpr')",
        "eqn.primitive.name",
        "{**x.params.items()}",
    ):
        assert list(inside_of_equations(ast.parse(text))), text
    assert not list(inside_of_equations(ast.parse("state.params[name], state.params")))
    assert {"select_n", "scan", "dot_general"} <= PRIMITIVES
    assert sum(map(reads_equations, FILES)) > 20


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module begins with what it is"


def test_no_drawers_for_everything():
    # Those that stand for modules of another system have that system's names.
    names = {path.stem for path in FILES if room_of(path) != "compat"}
    assert not names & {"utils", "util", "helpers", "misc", "common"}


def test_long_files_say_why():
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > 500:
            assert "one thing" in text[:1500], f"{shown(path)} is long and does not say why"


# -- what importing costs -----------------------------------------------------------------------

ALLOWED = {
    "absl",
    "jax",
    "jaxlib",
    "ml_dtypes",
    "numpy",
    "opt_einsum",
    "optax",
    "tailrace",
}
"""Distributions that `import tailrace` may load besides the standard library."""


def loaded_by(code):
    """The top-level modules that are loaded after `code` ran in a fresh interpreter."""
    printed = code + "\nimport sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", printed],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return set(done.stdout.split())


def test_importing_is_light():
    core = {m for m in loaded_by("import optax, jax.extend, jax.experimental") if m[0] != "_"}
    ours = {m for m in loaded_by("import tailrace") if m[0] != "_"}
    foreign = ours - core - set(sys.stdlib_module_names) - ALLOWED
    assert not foreign, foreign
    heavy = {
        "keras",
        "torch",
        "tensorflow",
        "matplotlib",
        "mlxtend",
        "grain",
        "starlette",
        "uvicorn",
        "zarr",
        "xarray",
        "tensorboardX",
        "tensorboard",
        "rich",
        "pandas",
        "sklearn",
        "PIL",
    }
    assert not ours & heavy


# -- what is public -----------------------------------------------------------------------------


def public_names():
    return tr.__all__


CONTRACT = [
    "Accumulation",
    "Callback",
    "DeviceError",
    "InfeedQueue",
    "LossScale",
    "OutfeedQueue",
    "PipelineSchedule",
    "TailraceError",
    "Tap",
    "Trainer",
    "batches",
    "compile",
    "configure",
    "counter",
    "cross_replica_mean",
    "cross_replica_sum",
    "data",
    "dataset_benchmark",
    "diff",
    "every",
    "infeed_benchmark",
    "key",
    "microbatch",
    "observe",
    "open_run",
    "optimizers",
    "plan",
    "print_tensor",
    "repeat",
    "step",
    "stop_on_nonfinite",
    "trace",
    "while_loop",
]
"""The names of the contract that are there so far."""


@pytest.mark.parametrize("name", CONTRACT)
def test_the_names_of_the_contract_are_there(name):
    assert hasattr(tr, name)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_described(name):
    value = getattr(tr, name)
    if not (inspect.ismodule(value) or inspect.isclass(value) or callable(value)):
        return
    assert inspect.getdoc(value), f"tr.{name} has no docstring"
    if inspect.isclass(value):
        for member, found in vars(value).items():
            if not member.startswith("_") and (callable(found) or isinstance(found, property)):
                assert inspect.getdoc(found), f"tr.{name}.{member} has no docstring"


@pytest.mark.parametrize("name", public_names())
def test_public_things_come_from_here(name):
    value = getattr(tr, name)
    home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "tailrace")
    assert home.split(".")[0] == "tailrace", f"tr.{name} leaks from {home}"


def test_every_error_is_a_tailrace_error():
    for name, value in vars(tr.errors).items():
        if inspect.isclass(value) and value.__module__ == "tailrace.errors":
            assert issubclass(value, tr.TailraceError), name
            assert name in tr.errors.__doc__, f"{name} is not in the tree at the top"


def test_public_signatures_are_annotated():
    for name in public_names():
        value = getattr(tr, name)
        function = value.__init__ if inspect.isclass(value) else value
        if not inspect.isfunction(function) or function.__module__ == "enum":
            continue
        for parameter in inspect.signature(function).parameters.values():
            bare = parameter.annotation is inspect.Parameter.empty
            if parameter.name not in ("self", "args", "kwargs", "_") and not name.endswith("Error"):
                assert not bare, f"tr.{name}: {parameter.name} has no annotation"


# -- examples in docstrings ---------------------------------------------------------------------


def modules():
    found = ["tailrace"]
    for info in pkgutil.walk_packages([str(HERE)], "tailrace."):
        parts = info.name.split(".")
        if parts[-1] != "__main__" and (parts[1] in ROOMS or parts[1] == "cli"):
            found.append(info.name)
    return found


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name):
    from tailrace.devices import devices

    module = importlib.import_module(name)
    chosen = devices._chosen
    try:
        with jax.numpy_dtype_promotion("standard"):
            failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    finally:
        devices._chosen = chosen
    assert not failed
