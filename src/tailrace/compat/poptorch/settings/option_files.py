"""Files of options: a setter a line, with literal arguments. They are parsed, and never executed.

deviceIterations(4)
Training.gradientAccumulation(2)  # a comment
outputMode(poptorch.OutputMode.All)
TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
"""

from __future__ import annotations

import ast
import contextlib
import enum
import inspect
import os
from collections.abc import Iterator
from typing import Any

from tailrace.base.files import parse_json, read_bytes
from tailrace.base.paths import in_words
from tailrace.compat.poptorch import enums
from tailrace.compat.poptorch.settings import locations, strategies
from tailrace.compat.poptorch.settings.containers import OptionsDict
from tailrace.errors import TailraceError


class ConfigFileError(TailraceError):
    """A line of an options file, or a name in JSON, cannot be read."""


class _Unreadable(TailraceError):
    """A part of a line that is no setter and no literal."""


_MADE = {
    name: getattr(place, name)
    for place, names in {
        locations: ["TensorLocationSettings"],
        strategies: [
            "ParallelPhasedExecution",
            "Phase",
            "PipelinedExecution",
            "SerialPhasedExecution",
            "ShardedExecution",
            "Stage",
        ],
    }.items()
    for name in names
}
"""What a file may make: plain descriptions."""

# Public methods that change no single option: a file must not load further files, or unfreeze.
_NOT_SETTERS = frozenset(
    {"clone", "defaultOutputMode", "freeze", "from_json", "loadFromFile", "native", "set", "toDict"}
)


def read_text(path: object) -> str:
    """The text of an options file."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigFileError(f"An options file is given by its path. Received: {path!r}")
    try:
        return read_bytes(path, ConfigFileError, description=True).decode()
    except OSError as error:
        reason = in_words(error, reading=True)
        raise ConfigFileError(f"The options file {str(path)!r} cannot be read: {reason}") from error
    except ValueError as error:  # no UTF-8, or a path that is none
        raise ConfigFileError(
            f"The options file {str(path)!r} cannot be read: {error}. Give a file of text in UTF-8."
        ) from error


def read_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that holds options."""
    try:
        found = parse_json(text)
    except (ValueError, TypeError) as error:
        raise ConfigFileError(f"Options are read from JSON, and this is none: {error}") from error
    if not isinstance(found, dict):
        raise ConfigFileError(
            f'The JSON of options is an object, such as {{"deviceIterations": 4}}. Received: {found!r}'
        )
    return found


@contextlib.contextmanager
def calling(setter: str) -> Iterator[None]:
    """What a setter says to arguments that it does not take, as a sentence about it."""
    try:
        yield
    except TailraceError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigFileError(f"{setter} does not take these arguments: {error}") from error


def read_line(options: OptionsDict, line: str, number: int, source: object) -> None:
    """Call the setter that a line names."""
    where = f"line {number} of {source}"
    try:
        # An expression: a statement, such as an import, does not even parse.
        tree = ast.parse(line, mode="eval").body
    except SyntaxError as error:
        raise ConfigFileError(f"SyntaxError at {where}: {error.msg}\n> options.{line}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or too deeply nested
        raise ConfigFileError(f"{where} cannot be parsed: {error}\n> options.{line[:80]}") from None
    try:
        if not isinstance(tree, ast.Call):
            raise _Unreadable(ast.unparse(tree))
        with calling(f"The setter at {where}"):
            _set(options, tree)
    except _Unreadable as error:
        raise ConfigFileError(
            f"A line of an options file is one call of a setter of poptorch.Options with literal "
            f"arguments, such as deviceIterations(4). Received at {where}: {error}\n> options.{line}"
        ) from None


def named_setter(options: OptionsDict, path: str) -> Any:
    """A setter of options or of one of their parts, by its dotted name."""
    try:
        return _setter(options, path)
    except _Unreadable:
        raise ConfigFileError(
            f"Options are set by the setters of poptorch.Options, such as deviceIterations or "
            f"Training.gradientAccumulation. Received: {path}"
        ) from None


def _setter(options: OptionsDict, path: str) -> Any:
    *parts, name = path.split(".")
    target = options
    for part in parts:
        # Only attributes of the object itself: `getattr` would also walk through `__class__` and
        # further.
        target = vars(target).get(part)
        if target is None:
            raise _Unreadable(path)
    # Looked up on the class: an attribute of the object could hold any function.
    found = getattr(type(target), name, None)
    own = getattr(found, "__module__", "").startswith("tailrace.compat.poptorch")
    # The `set` of options themselves takes any value; that of `_Popart` is a setter, without effect.
    is_other = name.startswith("_") or (name in _NOT_SETTERS and path != "_Popart.set")
    if not own or not inspect.isfunction(found) or is_other:
        raise _Unreadable(path)
    return found.__get__(target)


def _set(options: OptionsDict, call: ast.Call) -> Any:
    """Call a setter; several may be chained."""
    inner = call.func
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Call):
        target, path = _set(options, inner.value), inner.attr
    else:
        target, path = options, _dotted(inner)
    args, kwargs = _arguments(call)
    return _setter(target, path)(*args, **kwargs)


def _arguments(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    # `**options`: an expression that only executing it could resolve.
    if any(keyword.arg is None for keyword in call.keywords):
        raise _Unreadable(ast.unparse(call))
    named = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return [_value(argument) for argument in call.args], named


def _value(node: ast.expr) -> Any:
    """A literal, a member of one of the enumerations, or a description that a file may make."""
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Attribute):
        return _member(_dotted(node))
    if isinstance(node, ast.Call):
        return _made(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        raise _Unreadable(ast.unparse(node)) from None


def _member(path: str) -> Any:
    """poptorch.OutputMode.All, or torch.float16."""
    match path.split("."):
        case ["poptorch", kind, name]:
            found = getattr(enums, kind, None)
            if isinstance(found, enum.EnumMeta) and name in found.__members__:
                return found[name]
        # By name: nothing else of PyTorch can be reached from a file.
        case ["torch", "float" | "float16" | "float32" | "half" as name]:
            import torch

            return getattr(torch, name)
    raise _Unreadable(path)


def _made(call: ast.Call) -> Any:
    args, kwargs = _arguments(call)
    inner = call.func
    if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Call):
        made = _made(inner.value)
        method = getattr(type(made), inner.attr, None)
        # As for setters: only plain methods of the class.
        if inner.attr.startswith("_") or not inspect.isfunction(method):
            raise _Unreadable(ast.unparse(call))
        return method(made, *args, **kwargs)
    package, _, name = _dotted(inner).partition(".")
    if package != "poptorch" or name not in _MADE:
        raise _Unreadable(ast.unparse(call))
    return _MADE[name](*args, **kwargs)


def _dotted(node: ast.expr) -> str:
    """A dotted name, such as Training.gradientAccumulation."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _Unreadable(ast.unparse(node))
