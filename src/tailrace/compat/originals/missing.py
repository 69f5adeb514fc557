"""Errors for names that are not here: a sentence each, never a bare AttributeError.

Modules of `tailrace.compat` end with

    __getattr__, __dir__ = missing_from(__name__)

`hasattr` and `getattr` with a default work as always, and so does `except ImportError`. A statement
`from ... import name` shows the sentence too, for which it has to be an ImportError: Python would
replace an AttributeError by another one.
"""

from __future__ import annotations

import difflib
import dis
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.compat.originals.names import Name, all_names, names_in
from tailrace.errors import TailraceError

_PACKAGE = "tailrace.compat."
_PAGE = "docs/guides/originals_names.md"


class UnknownName(TailraceError, AttributeError):
    """A name that neither the original had, nor Tailrace."""


class RefusedName(UnknownName, NotImplementedError):
    """A name of the original that is not here."""


class UnknownImport(TailraceError, ImportError):
    """The import of a name that neither the original had, nor Tailrace."""


class RefusedImport(UnknownImport, NotImplementedError):
    """The import of a name of the original that is not here."""


def missing_from(
    module: str, late: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module.

    Args:
        module: its `__name__`.
        late: names that are loaded when they are asked for, and where they are: a module, or
            `"module:attribute"`.
    """
    places = late or {}

    def __getattr__(name: str) -> Any:
        if name in places:
            return _load(places[name])
        # The frame that asks tells an import statement from an attribute: they need different errors.
        raise _error(module, name, list(places), is_import(sys._getframe(1)))

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *places})

    return __getattr__, __dir__


def _load(place: str) -> Any:
    module, _, attributes = place.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split(".") if attributes else ():
        found = getattr(found, attribute)
    return found


def is_import(frame: types.FrameType) -> bool:
    """Whether a frame is at a `from ... import name`."""
    # By its bytecode: Python calls `__getattr__` in the same way for both.
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


def _error(module: str, name: str, late: list[str], importing: bool) -> TailraceError:
    holder = module.removeprefix(_PACKAGE)
    entry = all_names().get(f"{holder}.{name}")
    if entry is not None and entry.verdict == "refused":
        return (RefusedImport if importing else RefusedName)(refusal(entry))
    text = f"module {module!r} has no attribute {name!r}."
    # Python, notebooks and type checkers ask modules for private names; they want no advice.
    if not name.startswith("_"):
        near = difflib.get_close_matches(name, {*names_in(holder), *late} - {name}, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        text = f"{text}{hint} {_PAGE} lists every name of the original."
    return (UnknownImport if importing else UnknownName)(text)


def refusal(entry: Name) -> str:
    """What is said about a name that is not here."""
    return f"{entry.full} is not available. {entry.sentence}"


class _RefusedModules:
    """The last of Python's finders: modules of the originals that no other finder knows."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        """Refuse a module of the originals; know nothing of others."""
        del path, target
        if fullname.startswith(_PACKAGE):
            entry = all_names().get(fullname.removeprefix(_PACKAGE))
            if entry is not None and entry.verdict == "refused":
                raise RefusedImport(refusal(entry))


# At the end: asked only about modules that do not exist, so it can hide no real one.
sys.meta_path.append(_RefusedModules)  # type: ignore[arg-type]
