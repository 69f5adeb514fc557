"""One program in this process, with data supplied: `python -m benchmarks.originals.one PROGRAM ...`.

The program is run as if it had been called itself. The last line printed is JSON: what its models
reported at the end of `fit` and `evaluate`.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import runpy
import sys
from typing import Any

MARK = "originals:"
"""What the line with the result begins with."""

_reported: dict[str, Any] = {}


def main() -> None:
    """Run the program that the command line names."""
    import tailrace.compat  # noqa: F401  (the devices are asked for before anything uses JAX)
    from benchmarks.originals import data

    if images := os.environ.get("ORIGINALS_IMAGES"):
        data.TRAIN, data.TEST = map(int, images.split())
    data.supply()
    _watch_keras()
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(pathlib.Path(program).parent)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        print(f"\n{MARK} {json.dumps(_reported)}", flush=True)


def _watch_keras() -> None:
    """Keep what models report."""
    keras = sys.modules["keras"]

    def kept(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = method(self, *args, **kwargs)
            history = getattr(out, "history", None)
            if history:
                _reported[name] = {key: _number(values[-1]) for key, values in history.items()}
            return out

        return called

    keras.Model.fit = kept("fit", keras.Model.fit)


def _number(value: Any) -> Any:
    try:
        return round(float(value), 5)
    except (TypeError, ValueError):
        return None


if __name__ == "__main__":
    main()
