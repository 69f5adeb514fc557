"""What the whole process of tests runs on; decided before JAX is imported.

    TAILRACE_TEST_PLATFORM   cpu (default), gpu, tpu: of both sides, ours and the plain program's
    TAILRACE_TEST_OPTIMIZE   1: programs are compiled as users compile them
    TAILRACE_TEST_CACHE      where compiled programs are kept; empty: nowhere

The variables that this file sets are inherited by the processes that tests start.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

PLATFORM = os.environ.get("TAILRACE_TEST_PLATFORM") or "cpu"
DEVICES = 8
"""How many virtual CPU devices there are; an accelerator has those it has."""

_JAX_NAMES = {"gpu": "cuda,cpu", "cpu": "cpu"}
"""JAX's names; a GPU's tests need the host beside it, and a GPU alone would be asked for."""

_TOO_FEW = re.compile(
    r"(devices, and there (is|are)|needs as many, and there (is|are)|Number of devices \d+ must be >=)"
)
"""What Tailrace and `jax.make_mesh` say."""


def prepare() -> None:
    """Choose platform, compiler options and cache; JAX must not have been imported."""
    os.environ["JAX_PLATFORMS"] = _JAX_NAMES.get(PLATFORM, f"{PLATFORM},cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tests start processes
    if PLATFORM == "gpu":
        _compute_alike()
    if PLATFORM == "cpu" and os.environ.get("TAILRACE_TEST_OPTIMIZE") != "1":
        _compile_quickly()
    _keep_compiled_programs()


def skip_without_devices(error: BaseException) -> None:
    """On an accelerator: a test that asks for more devices than there are is skipped.

    Never on the CPU, where there are as many as the tests need.
    """
    if PLATFORM != "cpu" and _TOO_FEW.search(str(error)):
        pytest.skip(f"more devices are needed: {error}")


def _compile_quickly() -> None:
    """Two thirds of the time of training's tests was XLA compiling programs that run for a millisecond.

    Both sides of each comparison are compiled alike. The quick tier of CI runs with XLA's defaults.
    """
    _add_flags("--xla_backend_optimization_level=1")
    if version("jax").startswith("0.10."):  # later ones have no other emitters
        _add_flags("--xla_cpu_use_fusion_emitters=false")  # half of the time that is left


def _compute_alike() -> None:
    """No TF32, no kernels chosen by a race, no atomic sums, no rounding left out: bits to compare.

    XLA drops conversions to float16 and back, where PyTorch and NumPy round.
    """
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    _add_flags("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
    _add_flags("--xla_allow_excess_precision=false")


def _add_flags(*flags: str) -> None:
    have = os.environ.get("XLA_FLAGS", "").split()  # a worker of xdist has its parent's
    os.environ["XLA_FLAGS"] = " ".join([*have, *(flag for flag in flags if flag not in have)])


def _keep_compiled_programs() -> None:
    root = os.environ.get("TAILRACE_TEST_CACHE", str(Path(__file__).parents[1] / ".cache" / "xla"))
    if not root:
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(root) / _machine()))
    # Of programs from the cache XLA's CPU loader prints its own tuning preferences as errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _machine() -> str:
    """JAX and the processor: machine code of another one is not loaded."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    except OSError:
        kinds = list(os.uname())
    digest = hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:12]
    return f"jax-{version('jax')}-{version('jaxlib')}-{digest}"
