"""Modules of TensorFlow's names: what is here, what is TensorFlow's on the host, what is neither."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.compat.originals.missing import UnknownImport, UnknownName, is_import
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.operations.table import OPERATIONS, names_under

PACKAGE = "tailrace.compat.tensorflow"


class Namespace(types.ModuleType):
    """A module of names: `tf.math`, `tf.nn`, `tf.data`.

    Args:
        path: its name in TensorFlow, without `tensorflow.`; an empty one is the top.
        names: things by name; a function without arguments in `late` makes one.
        late: likewise, made when asked for.
        on_host: whether other names are TensorFlow's own.
    """

    def __init__(
        self,
        path: str,
        names: Mapping[str, Any] | None = None,
        late: Mapping[str, Callable[[], Any]] | None = None,
        on_host: bool = False,
    ) -> None:
        super().__init__(f"{PACKAGE}.{path}")
        self.__path__ = []  # so that modules in it can be imported
        self._path, self._names, self._late = path, dict(names or {}), dict(late or {})
        self._on_host = on_host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Python asks modules for `__path__`, `__wrapped__` and their like, and takes any answer
            # for a yes.
            raise AttributeError(name)
        return look_up(self._path, name, self._names, self._late, self._on_host)

    def __dir__(self) -> list[str]:
        return sorted({*self._names, *self._late, *names_under(self._path)})


def look_up(
    path: str,
    name: str,
    names: Mapping[str, Any] = types.MappingProxyType({}),
    late: Mapping[str, Callable[[], Any]] = types.MappingProxyType({}),
    on_host: bool = False,
) -> Any:
    """A name of a module, or the error that says what there is instead."""
    full = f"{path}.{name}" if path else name
    if name in names:
        return names[name]
    if name in late:
        return late[name]()
    if full in OPERATIONS:
        return OPERATIONS[full]
    if any(operation.startswith(f"{full}.") for operation in OPERATIONS):
        return _module(full, on_host or name in host.MODULES)
    # After our own names: what a program computes with must never be TensorFlow's by accident.
    if on_host or (not path and (name in host.MODULES or name in host.NAMES)):
        return _from_host(full, path, name)
    raise unknown(path, name, [*names, *late])


_modules: dict[str, Namespace] = {}


def _module(full: str, on_host: bool) -> Namespace:
    # One object for a name, as Python has one of each module.
    return _modules.setdefault(full, Namespace(full, on_host=on_host))


def _from_host(full: str, path: str, name: str) -> Any:
    try:
        found = host.named(full)
    except AttributeError:
        raise unknown(path, name, []) from None
    # Modules in it may hold names that are operations here.
    return _module(full, True) if isinstance(found, types.ModuleType) else found


def unknown(path: str, name: str, known: list[str]) -> Exception:
    """The error about a name that is not here."""
    full = f"{path}.{name}" if path else name
    there = [*known, *names_under(path)]
    # Not for private names: Python and notebooks ask for many that nobody wrote.
    near = difflib.get_close_matches(name, there, n=3) if not name.startswith("_") else []
    everywhere = [op for op in OPERATIONS if op.rpartition(".")[2] == name]
    if everywhere:
        hint = f" It is tf.{everywhere[0]}."
    elif near:
        hint = f" Did you mean {', '.join(f'tf.{path}.{n}' if path else f'tf.{n}' for n in near)}?"
    else:
        hint = ""
    what = (
        "is not available in programs of the device"
        if host.has(full)
        else "is no name of TensorFlow"
    )
    text = (
        f"module {PACKAGE!r} has no attribute {full!r}: tf.{full} {what}.{hint} "
        f"keras.ops and jax.numpy have more operations."
    )
    return (UnknownImport if _imported() else UnknownName)(text)


def _imported() -> bool:
    """Whether a name was asked for by a statement `from ... import`."""
    # Past our own frames, to the statement of the program.
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None and is_import(frame)


# -- modules that are imported by their dotted names ----------------------------------------------


class _Modules:
    """The last of Python's finders: modules in a namespace, and Keras' own under TensorFlow's name."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: TensorLike = None) -> Any:
        """Find what the module around has under this name, if that is a module."""
        del path, target
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        around, _, name = fullname.rpartition(".")
        # The module around decides, so `import tf.x.y` and `tf.x.y` are the same object.
        found = getattr(importlib.import_module(around), name, None)
        if not isinstance(found, types.ModuleType):
            return None
        loader: Any = _Loader(found)
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)


class _Loader:
    """Returns an existing module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, getattr(module, "__spec__", None)

    def create_module(self, spec: object) -> types.ModuleType:
        """The module."""
        del spec
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run; the module keeps the name that it was made under."""
        module.__spec__ = self._spec


def find_modules() -> None:
    """Let modules of the namespaces be imported."""
    if _Modules not in sys.meta_path:
        # Last: modules that exist as files are found by Python's own finders first.
        sys.meta_path.append(_Modules)  # type: ignore[arg-type]
