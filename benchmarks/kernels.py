"""What single reductions of taps take on a GPU: microseconds of their kernels, from the profiler.

    python -m benchmarks.kernels

Statistics, histograms, finiteness and digests of tensors of the sizes of GPT-2 small. Times of whole
calls would show the start of a call instead: most of these kernels take a few microseconds.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import report
from tailrace.taps import bit_digests, reductions

CALLS = 4
SIZES = {"2.4 M": (2_359_296, 8), "6.3 M": (6_291_456, 8), "38.6 M": (38_633_472, 1)}
"""Values of a tensor, and the number of tensors."""

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "statistics": lambda *values: reductions.pack_statistics(values),
    "histogram": lambda *values: reductions.histograms(values),
    "finiteness": lambda *values: reductions.all_finite(values),
    "digests": lambda *values: bit_digests.digest_many(
        values, [str(n) for n in range(len(values))], [None] * len(values)
    ),
    "a sum of each": lambda *values: [value.astype(jnp.float32).sum() for value in values],
}


def main() -> None:
    if jax.devices()[0].platform == "cpu":
        raise SystemExit("These are kernels of a GPU. Run this where JAX has one.")
    rows = []
    for size, (count, tensors) in SIZES.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            keys = jax.random.split(jax.random.key(0), tensors)
            values = [(jax.random.normal(key, (count,)) * 1e-3).astype(dtype) for key in keys]
            for name, function in REDUCTIONS.items():
                seconds, kernels = device_time(function, values)
                read = sum(value.nbytes for value in values)
                rows.append(
                    (
                        f"{name}, {tensors} x {size} {jnp.dtype(dtype).name}",
                        f"{seconds * 1e6:.1f}",
                        f"{kernels:.0f}",
                        f"{read / seconds / 1e12:.2f}",
                    )
                )
                print(*rows[-1], flush=True)
    table = report.markdown_table(("", "us", "kernels", "TB/s"), rows)
    command = "python -m benchmarks.kernels"
    report.publish("Kernels of taps", command, [table], path=report.RESULTS)


def device_time(function: Callable[..., Any], values: list[Any]) -> tuple[float, float]:
    """Seconds of the kernels of a call, and their number."""
    compiled = jax.jit(function)
    for _ in range(2):
        jax.block_until_ready(compiled(*values))
    took = kernel_times(lambda: jax.block_until_ready([compiled(*values) for _ in range(CALLS)]))
    return sum(kernel.seconds for kernel in took) / CALLS, len(took) / CALLS


class Kernel(NamedTuple):
    """A kernel or a copy that a GPU ran."""

    name: str
    start_s: float
    seconds: float


def kernel_times(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels and copies that the GPU runs meanwhile, from the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return [
            Kernel(event.name, event.start_ns / 1e9, event.duration_ns / 1e9)
            for plane in jax.profiler.ProfileData.from_file(path).planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]


def busy_s(kernels: Iterable[Kernel]) -> float:
    """The time in which at least one of them ran."""
    total, until = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda one: one.start_s):
        end = kernel.start_s + kernel.seconds
        total += max(0.0, end - max(until, kernel.start_s))
        until = max(until, end)
    return total


if __name__ == "__main__":
    main()
