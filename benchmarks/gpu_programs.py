"""The kernels of trainers' programs on a GPU, on a machine without one.

    pip install "jax[cuda13]"
    python -m benchmarks.gpu_programs [--layers 2] [--only plain,statistics] [--counted]

XLA compiles for a device that it is told about. What it fuses, which copies it makes and how many bytes
each kernel reads and writes is then known without a GPU; the time of a kernel is not, and kernels of
products are not chosen by timing. Attention is that of XLA, because cuDNN's is compiled on the device.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import re
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import optax
from jax.experimental import topologies

import tailrace as tr
from benchmarks.lengths import gpt_model, gpt_tokens
from tailrace.devices import devices
from tailrace.program.running.loop_state import Numbers
from tailrace.taps import gpu_kernels

LENGTH = 10
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150000000000  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"  dnn_version_info { major: 9 minor: 12 }  runtime_version { major: 13 minor: 0 }
"""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "statistics": {"observe": [tr.Tap("grad/*")]},
    "every 10th": {"observe": [tr.Tap("grad/*", mode=tr.every(10))]},
    "histograms": {"observe": [tr.Tap("grad/*", mode=tr.every(10), reduce="histogram")]},
    "guard": {"observe": [tr.stop_on_nonfinite(["loss", "grad/*"])]},
    "activations": {"observe": [tr.Tap(re.compile(r"(activation|cotangent)/block_\d+(/\w+)?$"))]},
    "fingerprints": {"fingerprint": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", default="", help="comma-separated parts of the names to compile")
    parser.add_argument("--counted", action="store_true", help="the loop whose length is data")
    given = parser.parse_args()
    params, loss_fn = gpt_model(given.layers, 768, 1024)
    data, there = gpt_tokens(8, 1024), imagined_device()
    for name, options in CASES.items():
        if given.only and not any(part in name for part in given.only.split(",")):
            continue
        trainer = tr.Trainer(
            loss_fn, optax.adamw(1e-4), params, steps_per_execution=LENGTH, **options
        )
        started = time.perf_counter()
        text = compiled_text(trainer, data, there, given.counted)
        print(f"{name}: compiled in {time.perf_counter() - started:.1f} s")
        print_kernels(text)


def imagined_device() -> jax.sharding.Sharding:
    """A place on a GPU that is not there; what Tailrace and Pallas ask of a GPU is answered."""
    from jax._src.pallas.triton import pallas_call_registration as registration

    found = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H200
    )
    info = type("Info", (), {"compute_capability": 90})
    registration.gpu_info_lib = type("Infos", (), {"get_gpu_info": staticmethod(lambda: info)})
    devices.platform = lambda: "gpu"
    gpu_kernels.compiles = lambda _: True
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def compiled_text(trainer: tr.Trainer, data: Any, there: Any, counted: bool) -> str:
    """The compiled program of an execution, as text."""
    engine = trainer.engine
    engine.use(data)
    runner = engine.runner  # from here on, what users do not see
    runner.capacity = LENGTH if counted else None
    executable = runner._new_executable(runner._loop, LENGTH, counted, engine.sight.period)
    blocks = runner._block_forms(executable)
    arguments = executable._arguments(engine.loop_state, blocks, Numbers(0, 0))

    def form(value: Any) -> jax.ShapeDtypeStruct:
        weak = bool(getattr(getattr(value, "aval", None), "weak_type", False))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=there, weak_type=weak)

    jitted = executable._program.jitted(executable._donated)
    return jitted.lower(*jax.tree.map(form, arguments)).compile().as_text()


# -- reading the text -----------------------------------------------------------------------------

FREE = {
    *("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "opt-barrier"),
    *("while", "conditional"),
}
"""Operations that launch no kernel themselves."""

WIDTHS = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1, "s64": 8, "u64": 8}


def print_kernels(text: str, most: int = 12) -> None:
    """The kernels of each computation that launches some: their number, and the bytes they move."""
    fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    for name, lines in computations(text).items():
        counts: collections.Counter[str] = collections.Counter()
        moved: collections.Counter[str] = collections.Counter()
        shapes: dict[str, str] = {}
        for line in lines:
            found = re.match(r"(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)", line)
            if found is None:
                continue
            result, shape, operation, operands = found.groups()
            shapes[result] = shape
            if operation in FREE:
                continue
            kind = operation
            if operation == "fusion":
                kind = re.sub(r"[\d._]+$", "", result)
            elif operation == "custom-call":
                kind = re.search(r'custom_call_target="([^"]+)"', line)[1]
            names = re.findall(r"%([\w.\-]+)", operands)
            counts[kind] += 1
            moved[kind] += size(shape) + sum(size(shapes.get(one, "")) for one in names)
        if name in fused or counts.total() < 4:
            continue
        # One is enough for another schedule of the loop, and other addresses of temporary arrays.
        starts = sum("-start(" in line for line in lines)
        print(
            f"  {name}: {counts.total()} kernels, {moved.total() / 1e9:.2f} GB, "
            f"{starts} asynchronous operations"
        )
        for kind, count in moved.most_common(most):
            print(f"    {counts[kind]:5} {count / 1e9:8.3f} GB  {kind}")


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a program."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        begin = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line)
        if begin:
            lines = found.setdefault(begin[1], [])
        else:
            lines.append(line.strip())
    return found


def size(shape: str) -> int:
    """The bytes of a shape, or of a tuple of them."""
    parts = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(
        WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in parts
    )


if __name__ == "__main__":
    main()
