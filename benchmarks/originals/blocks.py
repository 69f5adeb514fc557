"""The code blocks of a document, one after the other: `python -m benchmarks.originals.blocks DOCUMENT`.

    python -m benchmarks.originals.blocks README.md --beside examples/tutorials/.../inspecting_tensors

Imports are changed by the one table. All blocks of a document are one program, as its reader types
them, with what the document leaves to the reader (`contexts`); a block that fails is counted, and the
next one runs. `--beside` has modules that the document imports.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import tempfile
import textwrap
import traceback
from typing import Any

from benchmarks.originals.contexts import context_of

_MARKDOWN = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_RST = re.compile(r"^\.\. code-block:: python\n\n((?:  .*\n|\n)+)", re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The Python blocks of a document in Markdown or reStructuredText.

    >>> blocks("```python\\nx = 1\\n```\\n")
    ['x = 1\\n']
    """
    found = [(m.start(), m[2]) for m in _MARKDOWN.finditer(text)]
    found += [(m.start(), m[1]) for m in _RST.finditer(text)]
    return [textwrap.dedent(block) for _, block in sorted(found)]


def main() -> None:
    """Run the blocks of a document."""
    import tailrace.compat  # noqa: F401  (the devices are asked for before anything uses JAX)
    from benchmarks.originals import data
    from benchmarks.originals.imports import changed

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("document", type=pathlib.Path)
    parser.add_argument("--beside", type=pathlib.Path, help="modules that it imports")
    options = parser.parse_args()
    data.TRAIN = 48_000  # some read more than there are digits: they come again
    data.supply()
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        for path in sorted(options.beside.glob("*.py")) if options.beside else ():
            (home / path.name).write_text(changed(path.read_text()).text)
        sys.path.insert(0, scratch)
        good, count = run(options.document.read_text(), home)
    print(f"{options.document.name}: {good} of {count} blocks run.")


def run(text: str, home: pathlib.Path) -> tuple[int, int]:
    """Run the blocks of a document: how many ran, and how many there are.

    Args:
        text: the document.
        home: where the blocks are written, so that their source can be rewritten.
    """
    from benchmarks.originals.imports import changed

    names: dict[str, Any] = {"__name__": "__main__"}
    found, context = blocks(text), context_of(text)
    good = 0
    for number in context.order(len(found)):
        if number in context.skipped:
            print(f"block {number}: {context.skipped[number]}")
            continue
        block = found[number]
        if number in context.filled:
            block = block.replace("= ...", f"= {context.filled[number]}")
        path = home / f"block_{number}.py"
        try:
            path.write_text(changed(context.before.get(number, "") + block).text)
            exec(compile(path.read_text(), path, "exec"), names)
            good += 1
        except Exception as error:
            traceback.print_exc()
            print(f"block {number}: {type(error).__name__}: {error}", flush=True)
    return good, len(found)


if __name__ == "__main__":
    main()
