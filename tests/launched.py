"""Scripts run under `tailrace launch`, in several processes, and what they say."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import tailrace as tr

HERE = Path(__file__).parent


def together(script, processes, devices, timeout=600, restarts=0, **options):
    """Run a script under `tailrace launch`; (exit code, what each process said, all output)."""
    source = Path(tr.__file__).parents[1]
    path = os.pathsep.join([str(source), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tailrace", "launch", "-n", str(processes)),
            *("--restarts", str(restarts), "--devices", str(devices)),
            *(str(script), json.dumps(options)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    said = [json.loads(line) for line in re.findall(r"RESULT (\{.*\})", done.stdout)]
    return done.returncode, sorted(said, key=lambda one: one["process"]), done.stdout + done.stderr


def free_port():
    """A port that is free now; another program may take it before a test does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def leaves(tree):
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)]


def arrays(lists):
    return [np.asarray(one, np.float32) for one in lists]
