"""The house keeps its order: imports point one way, porches stay outside, everything is described."""

import ast
import doctest
import enum
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
    "base",
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


# -- files import each other one way ------------------------------------------------------------

TWO_WAYS = [
    # TensorFlow's own: what is in `tf` is in `tf.compat.v1`, which is in `tf`.
    {
        "tailrace.compat.tensorflow",
        "tailrace.compat.tensorflow.compat.v1",
        "tailrace.compat.tensorflow.python",
    },
]
"""The only files that need each other; there is no lower file that their names could move to."""


def module_of(path):
    parts = ("tailrace", *path.relative_to(HERE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(text, known):
    """Our modules that a file imports: anywhere in it, for type checkers too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in full]
        else:
            continue
        # The package itself has a home for each public name, and imports nothing but that.
        yield from (name for name in names if name in known and name != "tailrace")


def knots(edges):
    """Sets of files each of which leads to each other one."""
    reached = {}
    for start in edges:
        found, waiting = set(), [start]
        while waiting:
            for there in edges[waiting.pop()] - found:
                found.add(there)
                waiting.append(there)
        reached[start] = found
    looped = {start for start, found in reached.items() if start in found}
    return {frozenset(b for b in looped if b in reached[a] and a in reached[b]) for a in looped}


def test_imports_between_files_point_one_way():
    texts = {module_of(path): path.read_text() for path in FILES}
    edges = {
        name: {there for there in imported_modules(text, texts) if there != name}
        for name, text in texts.items()
        if name != "tailrace"
    }
    assert {frozenset(accepted) for accepted in TWO_WAYS} == knots(edges)


def test_knots_are_found():
    known = {"tailrace", "tailrace.a", "tailrace.b", "tailrace.c.d"}
    text = (
        "import x\ndef f():\n    from tailrace.c import d\nif TYPE_CHECKING:\n    import tailrace.b"
    )
    assert set(imported_modules(text, known)) == {"tailrace.b", "tailrace.c.d"}
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert knots(edges) == {frozenset("abc")}


BY_NAME = {
    "__init__.py",  # `_HOMES`: importing the package loads nothing that a program does not use
    "cli/doctor.py",  # the probes of front ends, of which none imports another
    "cli/targets.py",  # the user's own module, named on the command line
    "compat/originals/lookup.py",  # a name of an original, looked up as a program does
    "compat/originals/missing.py",  # the namespaces of the originals, each name loaded when asked
    "compat/tensorflow/namespaces.py",  # that of TensorFlow, likewise
}
"""Files that import by a string, with what is named."""


def imports_by_string(text):
    """Lines that import a module whose name is not that of another library, written out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            (name, *_) = node.args
            first = name.values[0] if isinstance(name, ast.JoinedStr) else name
            written = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if not written or first.value.startswith("tailrace"):
                yield node.lineno


def test_no_imports_by_string():
    found = {shown(path) for path in FILES if list(imports_by_string(path.read_text()))}
    foreign = {"trainer/checkpoints/orbax_files.py"}  # one of two names of another library
    assert found == BY_NAME | foreign
    assert list(imports_by_string("importlib.import_module('tailrace.a')")) == [1]
    assert not list(imports_by_string("importlib.import_module('torchax.view')"))


TUNED = ("program/running/dispatch_lengths", "trainer/fitting/pace", "keras/programs/pacing")
TUNED += ("torch/programs/portions", "keras/programs/executions", "feeds/benchmark/measure")


@pytest.mark.parametrize("name", TUNED)
def test_what_a_dispatch_takes_is_tuned_in_one_table(name):
    body = ast.parse((HERE / f"{name}.py").read_text()).body
    assert not [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]


UNCLEAR = re.compile(r"\b(lies|stands|told|so many|somebody)\b")
"""Words that engineers do not use of programs: a value is somewhere, a callback is called."""


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_the_text_is_an_engineer_s_english(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    found = [f"line {number}: {line.strip()}" for number, line in lines if UNCLEAR.search(line)]
    assert not found, found


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_room_has_its_place(path):
    assert room_of(path) in [*ROOMS, *PORCHES, "__init__", "__main__"]


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
    assert asking == {"devices/devices.py", "keras/data/copied_batches.py"}


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


MOST_FILES = 20
"""More in one room than can be read at a glance. Sixteen parted what is known of jaxprs."""


def test_rooms_are_small():
    rooms = {path.parent for path in FILES}
    sizes = {shown(room): sum(path.parent == room for path in FILES) - 1 for room in rooms}
    assert not {room: size for room, size in sizes.items() if size > MOST_FILES}


def test_no_drawers_for_everything():
    # Those that stand for modules of another system have that system's names.
    names = {path.stem for path in FILES if room_of(path) != "compat"}
    assert not names & {"utils", "util", "helpers", "misc", "common"}


def test_long_files_say_why():
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > 500:
            assert "one thing" in text[:1500], f"{shown(path)} is long and does not say why"


# -- classes ------------------------------------------------------------------------------------

OVERRIDING = {
    # Each is what a user of the original, of Keras or of `tr.Callback` derives from: the base has a
    # method that works, and documents that it may be replaced.
    "compat/ipu": {
        "ALSOptimizer",
        "CrossReplicaOptimizer",
        "GradientAccumulationOptimizerV2",
        "GradientCaptureTape",
        "IPUStrategyV1",
        "IpuOptimizer",
        "KerasOptimizer",
        "MapGradientOptimizer",
        "OptaxOptimizer",
        "PopDistStrategy",
        "_Settings",
    },
    "compat/poptorch": {"Block", "_InferenceExecutor", "_TrainingExecutor"},
    "keras": {
        "CrossReplicaOptimizer",
        "GradientAccumulationOptimizer",
        "MapGradientOptimizer",
        "PastFit",  # a fit that runs again: these two read, and write nothing
        "PastTraining",
    },
    "trainer/callbacks": {"CSVLogger", "EarlyStopping", "OnSpike", "TensorBoard"},
    # Two ways to do one thing, of which the second was written as a change of the first.
    # `CapturedForward` takes the place of a traced one until that goes.
    "torch": {"CapturedForward", "StagedInferenceProgram"},
}
"""Classes that replace a working method of a concrete class of ours, by folder. Let it shrink: an
abstract class with two children, or an object that is given what differs, reads better."""


def own_methods(node):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name: one for one in node.body if isinstance(one, kinds)}


def is_to_be_filled(function):
    """Whether a method is abstract, says only what it is for, or refuses to be called."""
    if any("abstract" in ast.unparse(one) for one in function.decorator_list):
        return True
    rest = function.body[ast.get_docstring(function) is not None :]
    return not rest or "NotImplementedError" in ast.unparse(rest[0])


def is_abstract(node):
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return bool({"ABC", "Protocol"} & set(bases))


def overriding_classes(texts):
    """(module, class) of those that replace a working public or private method of a concrete one."""
    classes, names = {}, {}
    for module, text in texts.items():
        names[module] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    names[module][alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.ClassDef):
                classes[module, node.name] = node
    for (module, name), node in classes.items():
        waiting, seen = [(module, base) for base in node.bases], set()
        while waiting:
            where, base = waiting.pop()
            holder, _, called = ast.unparse(base).split("[")[0].rpartition(".")
            if holder:  # of a module that was imported
                found = (".".join(names[where].get(holder, ())), called)
            else:
                found = (where, called) if (where, called) in classes else names[where].get(called)
            if found not in classes or found in seen or found == (module, name):
                continue
            seen.add(found)
            above = classes[found]
            waiting += [(found[0], further) for further in above.bases]
            working = {k for k, f in own_methods(above).items() if not is_to_be_filled(f)}
            replaced = {k for k in own_methods(node) if k in working and not k.startswith("__")}
            if replaced and not is_abstract(above):
                yield module, name


def test_concrete_classes_are_not_overridden():
    texts = {module_of(path): path.read_text() for path in FILES}
    found = set(overriding_classes(texts))
    known = {
        (module, name)
        for module, name in found
        for folder, accepted in OVERRIDING.items()
        if module.startswith(f"tailrace.{folder.replace('/', '.')}.") and name in accepted
    }
    assert found == known, "see OVERRIDING"
    assert {name for _, name in found} == {name for part in OVERRIDING.values() for name in part}


def test_overriding_is_noticed():
    base = "class A:\n    def f(self):\n        return 1\n    def g(self):\n        'For others.'\n"
    child = "from tailrace.a import A as Z\nclass B(Z):\n    def {}(self): return 2\n"
    texts = {"tailrace.a": base, "tailrace.b": child.format("f"), "tailrace.c": child.format("g")}
    assert set(overriding_classes(texts)) == {("tailrace.b", "B")}
    abstract = {**texts, "tailrace.a": base.replace("class A", "class A(ABC)")}
    assert not set(overriding_classes(abstract))


# -- tests go through what is public --------------------------------------------------------------

MOST_PRIVATE = 13
"""How often tests reach into private parts of ours. Let it shrink.

What is left: where something that must not happen cannot be seen from outside (reads ahead, blocks that
stay on the device, copies, compilations), and settings of front ends without a public name.
"""

NOT_OURS = (
    "cls",
    "importlib",
    "inspect",
    "jax",
    "keras",
    "np",
    "os",
    "self",
    "super",
    "sys",
    "torch",
)
DOCUMENTED = ("_Popart", "_asdict", "_fields", "_make", "_replace", "_repr_html_", "_repr_svg_")
"""Underscored names that are an interface: of PopTorch, of named tuples, of notebooks."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def private_parts(text):
    """Lines that reach into what is private to an object or a module of ours."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if re.split(r"\W", ast.unparse(node.value))[0] not in NOT_OURS:
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            if any(isinstance(w, str) and is_private(w.split(".")[-1]) for w in words):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrace."):
            yield from (node.lineno for alias in node.names if is_private(alias.name))


def test_tests_go_through_what_is_public():
    files = sorted(Path(__file__).parent.rglob("*.py"))
    found = {path.name: len(list(private_parts(path.read_text()))) for path in files}
    assert sum(found.values()) <= MOST_PRIVATE, {k: v for k, v in found.items() if v}


def test_private_parts_are_noticed():
    for text in ("a._b", "a.b()._c.d", "patch.setattr(a, '_b', 1)", "from tailrace.a import _b"):
        assert list(private_parts(text)), text
    for text in ("a.b", "jax._b", "self._b", "x._replace()", "patch.setattr(a, 'b', 1)", "a.__b__"):
        assert not list(private_parts(text)), text


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
        timeout=600,
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
    "mark",
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
def test_every_public_name_has_an_example(name):
    value = getattr(tr, name)
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    if inspect.ismodule(value) or is_error or not callable(value):
        return
    assert ">>>" in (inspect.getdoc(value) or ""), f"tr.{name} has no example"


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


def test_every_public_enum_says_what_may_be_chosen():
    enums = [kind for name in public_names() if is_enum(kind := getattr(tr, name))]
    assert len(enums) >= 3
    for kind in enums:
        first = next(iter(kind))
        assert kind(f" {first.upper()}") is first
        for bad in ("foo", None, 3, ["a"]):
            with pytest.raises(tr.TailraceError) as caught:
                kind(bad)
            assert isinstance(caught.value, ValueError)
            assert all(repr(str(member)) in str(caught.value) for member in kind)
            assert str(caught.value).endswith(f"Received: {bad!r}.")


def is_enum(value):
    return inspect.isclass(value) and issubclass(value, enum.Enum)


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
def test_examples_in_docstrings(name, same_devices):
    module = importlib.import_module(name)
    with jax.numpy_dtype_promotion("standard"):
        failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
