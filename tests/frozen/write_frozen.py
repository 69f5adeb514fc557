"""Writes the files of `frozen_cases.py` by whatever code is importable, for tests of later code.

    PYTHONPATH=<a work tree>/src python tests/frozen/write_frozen.py NAME [CASE ...]

makes `tests/frozen/NAME/CASE.tar.xz`: `left/`, the directories of the training that was killed;
`end.npz`, the end of the same training that was not; `facts.json`, what both were made on. A form of
checkpoints that is to stay readable gets a NAME of its own; archives are never written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import machine  # noqa: E402


def facts() -> dict[str, str]:
    """What equal bits depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = sorted({line for line in lines if line.startswith(("flags", "model name"))})
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "processor": hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:12],
        "cores": str(os.cpu_count()),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def start() -> None:
    """As the tests start JAX."""
    machine.prepare()
    import tailrace as tr

    tr.configure(devices=machine.DEVICES)


def train(case: str, folder: Path, killed: bool) -> None:
    """In a process of its own: the training, to its end or until it is killed."""
    start()
    import numpy as np
    from frozen_cases import CASES

    run, after = CASES[case]
    end = run(folder / "left", after if killed else None)
    np.savez(folder / "end.npz", **end)
    (folder / "facts.json").write_text(json.dumps(facts(), indent=1))


def write(name: str, case: str) -> Path:
    """The archive of one case."""
    with tempfile.TemporaryDirectory() as folder:
        for part, killed in (("killed", True), ("whole", False)):
            (Path(folder) / part / "left").mkdir(parents=True)
            command = [sys.executable, __file__, "--train", case, f"{folder}/{part}", str(killed)]
            status = subprocess.run(command).returncode
            if status not in ((0, -9) if killed else (0,)):
                raise SystemExit(f"{case}, {part}: ended with {status}")
        archive = HERE / name / f"{case}.tar.xz"
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(f"{folder}/killed/left", "left")
            tar.add(f"{folder}/whole/end.npz", "end.npz")
            tar.add(f"{folder}/whole/facts.json", "facts.json")
    return archive


def main(arguments: list[str]) -> None:
    """See the module docstring."""
    if arguments[0] == "--train":
        train(arguments[1], Path(arguments[2]), arguments[3] == "True")
        return
    from frozen_cases import CASES

    for case in arguments[1:] or list(CASES):
        archive = write(arguments[0], case)
        print(f"{archive.relative_to(HERE)}: {archive.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
