"""The one table by which imports of a program are changed.

>>> print(changed("import tensorflow as tf").text)
from tailrace.compat import tensorflow as tf
>>> print(changed("from tensorflow.python.ipu import loops").text)
from tailrace.compat.ipu import loops
>>> print(changed("import tensorflow.keras as keras").text)
import tailrace.compat.tensorflow.keras as keras
>>> print(changed("import popdist.tensorflow").text)
from tailrace.compat import popdist; import tailrace.compat.popdist.tensorflow
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping

TABLE = {
    "tensorflow.python.ipu": "tailrace.compat.ipu",
    "tensorflow": "tailrace.compat.tensorflow",
    "keras": "tailrace.compat.tensorflow.keras",
    "ipu_tensorflow_addons": "tailrace.compat.ipu_tensorflow_addons",
    "poptorch": "tailrace.compat.poptorch",
    "popdist": "tailrace.compat.popdist",
    "popart": "tailrace.compat.popart",
}
"""What a module becomes, the longest name first; its submodules follow it."""

PLAIN = {
    "tensorflow.python.ipu.distributed.popdist_strategy": "benchmarks.originals.plain.ipu",
    "tensorflow.python.ipu.scopes": "benchmarks.originals.plain.ipu",
    "tensorflow.python.ipu": "benchmarks.originals.plain.ipu",
    "tensorflow.keras": "keras",
    "keras.optimizer_v2": "benchmarks.originals.plain.optimizer_v2",
    "ipu_tensorflow_addons.keras.layers": "benchmarks.originals.plain.layers",
    "poptorch": "benchmarks.originals.plain.poptorch",
    "popdist.poptorch": "benchmarks.originals.plain.poptorch",
    "popdist.tensorflow": "benchmarks.originals.plain.anything",
    "popdist": "benchmarks.originals.plain.popdist",
    "popart": "benchmarks.originals.plain.anything",
}
"""The same for a plain program: TensorFlow, Keras and PyTorch themselves, and stand-ins."""


@dataclasses.dataclass(frozen=True)
class Changed:
    """A program with its imports changed.

    Attributes:
        text: the program.
        lines: how many of its lines differ.
    """

    text: str
    lines: int


def changed(text: str, table: Mapping[str, str] = TABLE) -> Changed:
    """A program with its imports changed by a table; all other lines stay as they are."""
    lines = text.splitlines()
    count = 0
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        after = _statement(node, table)
        if after is None:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        indent = lines[first][: node.col_offset]
        # The lines that a statement took stay lines, so that tracebacks show the right ones.
        lines[first:last] = [indent + after, *[""] * (last - first - 1)]
        count += last - first
    return Changed("\n".join(lines), count)


def module(name: str, table: Mapping[str, str] = TABLE) -> str | None:
    """What a module becomes; None if it stays.

    >>> module("tensorflow.keras.layers"), module("numpy")
    ('tailrace.compat.tensorflow.keras.layers', None)
    """
    for old, new in table.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def _statement(node: ast.Import | ast.ImportFrom, table: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Import):
        parts = [_import(alias, table) for alias in node.names]
        if all(module(alias.name, table) is None for alias in node.names):
            return None
        return "; ".join(parts)
    if node.level or node.module is None:
        return None
    # `from tensorflow.python import ipu` names the module in two parts.
    parts = [_from(node.module, alias, table) for alias in node.names]
    same = [f"from {node.module} import {_named(alias)}" for alias in node.names]
    return None if parts == same else "; ".join(parts)


def _from(source: str, alias: ast.alias, table: Mapping[str, str]) -> str:
    whole = table.get(f"{source}.{alias.name}")
    if whole is not None:
        home, _, name = whole.rpartition(".")
        shown = alias.asname or alias.name
        renamed = name if name == shown else f"{name} as {shown}"
        return f"from {home} import {renamed}" if home else f"import {renamed}"
    return f"from {module(source, table) or source} import {_named(alias)}"


def _import(alias: ast.alias, table: Mapping[str, str]) -> str:
    new = module(alias.name, table)
    if new is None:
        return f"import {_named(alias)}"
    home, _, name = new.rpartition(".")
    if "." in alias.name:
        if alias.asname:
            return f"import {new} as {alias.asname}"
        top = alias.name.split(".")[0]
        return f"{_import(ast.alias(top), table)}; import {new}"
    if alias.asname is None and name == alias.name:
        return f"from {home} import {name}"
    return f"from {home} import {name} as {alias.asname or alias.name}"


def _named(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
