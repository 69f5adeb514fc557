"""Compares every program that two work trees compile: equal lowered text is a proof of equal bits.

    git worktree add ../base main
    python scripts/compare_programs.py ../base .

runs the trainings of `tests/frozen/frozen_cases.py` on the sources of both trees, each case in a
process of its own, and compares the lowered text of all that they compile, in order. It prints a line a
case, writes the texts that differ to `build/programs`, and ends with 1 if there are any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FROZEN = ROOT / "tests" / "frozen"
DIFFERENT = ROOT / "build" / "programs"


def record(case: str, write_to: Path) -> None:
    """In a process of its own: run a case, and write the text of each program, in order."""
    sys.path[:0] = [str(FROZEN), str(FROZEN.parent)]
    from write_frozen import start

    start()
    import jax
    from frozen_cases import CASES

    texts: list[str] = []
    lower = jax.stages.Lowered.compile

    def compile_(self, *args, **kwargs):
        texts.append(self.as_text())
        return lower(self, *args, **kwargs)

    jax.stages.Lowered.compile = compile_
    with tempfile.TemporaryDirectory() as folder:
        CASES[case][0](Path(folder), None)
    write_to.write_text(json.dumps(texts))


def programs(tree: Path, case: str) -> list[str]:
    """The texts of what a work tree compiles for a case."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    with tempfile.TemporaryDirectory() as folder:
        write_to = Path(folder) / "programs.json"
        command = [sys.executable, __file__, "--record", case, str(write_to)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(write_to.read_text())


def compare(case: str, base: Path, head: Path) -> bool:
    """Whether both compile the same; prints what differs."""
    ours, theirs = programs(head, case), programs(base, case)
    different = [n for n, pair in enumerate(zip(theirs, ours, strict=False)) if len(set(pair)) > 1]
    if len(ours) == len(theirs) and not different:
        print(f"{case:16} {len(ours):3} programs, equal", flush=True)
        return True
    DIFFERENT.mkdir(parents=True, exist_ok=True)
    for n in different:
        for name, texts in (("base", theirs), ("head", ours)):
            (DIFFERENT / f"{case}.{n}.{name}.mlir").write_text(texts[n])
    numbers = ", ".join(map(str, different)) or "none of the first"
    print(f"{case:16} {len(theirs)} and {len(ours)} programs; different: {numbers}", flush=True)
    return False


def main(arguments: list[str]) -> int:
    """See the module docstring."""
    if arguments[0] == "--record":
        record(arguments[1], Path(arguments[2]))
        return 0
    base, head, *cases = arguments
    sys.path[:0] = [str(FROZEN), str(FROZEN.parent)]
    from frozen_cases import CASES

    same = [compare(case, Path(base), Path(head)) for case in cases or CASES]
    print(f"{sum(same)} of {len(same)} cases compile the same programs.")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
