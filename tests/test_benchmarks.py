"""Benchmarks run to their end, on little work: they use some things that no other test does."""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import MissingDependency

ROOT = Path(__file__).parent.parent
LIMIT_S = 300
FEW = ("--repeats", "1", "--no-record")

COMMANDS = {
    "accumulation": ("--steps", "50", *FEW),
    "feeds": ("--steps", "200", "--no-peers", "--no-memory", *FEW),
    "keras_fit": ("--steps", "500", "--rounds", "1", "--executions", "100"),
    "layers": ("--layers", "5"),
    "live": ("--steps", "200", *FEW),
    "observation": ("--steps", "50", "--no-peers", "--batch", "32", *FEW),
    "pipelines": ("--steps", "2", "--no-peers", *FEW),
    "records": ("--steps", "500", *FEW),
    "replicas": ("--steps", "20", *FEW),
    "tracing": (),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_to_its_end(name):
    # Devices of the tests are virtual ones; a benchmark asks for its own.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TAILRACE_DEVICES")
    }
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name]],
        cwd=ROOT,
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_benchmarks_import_is_there():
    """Those that are too large to run here, too."""
    gone = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrace"):
                try:
                    module = importlib.import_module(str(node.module))
                except MissingDependency:  # an extra that this environment does not have
                    continue
                names = [one.name for one in node.names if not hasattr(module, one.name)]
                names = [n for n in names if importlib.util.find_spec(f"{node.module}.{n}") is None]
                gone += [f"{path.name}: {node.module}.{name}" for name in names]
    assert not gone
