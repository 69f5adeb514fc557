"""Optimizer state in the host's memory: what it saves of the device's, and what it costs.

Adam on a stack of square layers, 8 microbatches a step. Measured: the compiled peak with and without
offload, the time of a step with and without, and the time that moving the state takes on its own.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks.kernels import busy_s, kernel_times
from benchmarks.report import (
    RESULTS,
    Contender,
    common_flags,
    markdown_table,
    measure,
    publish,
    timing_table,
)
from tailrace.program.memory.host_memory import HOST_MEMORY, obstacle


def main() -> None:
    parser = common_flags(__doc__, steps=2, repeats=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=65536, help="examples in a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="what overlaps with what, on a GPU")
    flags = parser.parse_args()
    width = flags.width
    dtype = jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32

    def loss_fn(params: Any, x: Any) -> Any:
        # Made on the device: the feed is not what is measured here.
        h = jnp.outer(jnp.linspace(0, 1, flags.rows), x).astype(dtype)
        for kernel in params:
            h = jnp.tanh(h @ kernel.astype(dtype)) + h
        return (h.astype(jnp.float32) ** 2).mean()

    random = np.random.default_rng(0)
    params = [np.float32(random.normal(size=(width, width)) / width) for _ in range(flags.layers)]
    batches = [random.normal(size=width).astype(np.float32) for _ in range(64)]
    data = tr.InfeedQueue(lambda: (batches[i % 64] for i in range(10**9)))

    def contender(offload: bool) -> tuple[Contender, Any]:
        trainer = tr.Trainer(
            loss_fn,
            optax.adam(1e-4),
            params,
            accumulation=flags.microbatches,
            offload_optimizer_state=offload,
            steps_per_execution=flags.steps,
        )
        explained = trainer.explain(batches[0])
        print(explained, file=sys.stderr, flush=True)
        name = "state in the host's memory" if offload else "state on the device"
        source = data.dataset
        run = lambda: trainer.fit(source, steps=flags.steps, progress=False)  # noqa: E731
        return Contender(name, run), explained

    (plain, before), (offloaded, after) = contender(False), contender(True)
    for one in (plain, offloaded):
        one.run()
    measure([plain, offloaded], flags.repeats)
    state = 2 * sum(kernel.nbytes for kernel in params)
    rows = [
        ["state", f"{state / 1e9:.3f} GB"],
        ["compiled peak, state on the device", f"{before.peak_bytes / 1e9:.3f} GB"],
        ["compiled peak, state in the host's memory", f"{after.peak_bytes / 1e9:.3f} GB"],
        ["saved, of the state", f"{(before.peak_bytes - after.peak_bytes) / state:.1%}"],
    ]
    transfer = moving_time(params)
    if transfer is not None:
        step, moved = plain.median / flags.steps, offloaded.median / flags.steps
        transfer, at_once = transfer
        rows += [
            ["moving the state in and out, alone", f"{transfer * 1e3:.1f} ms"],
            ["in and out at once, alone", f"{at_once * 1e3:.1f} ms"],
            ["a step, state on the device", f"{step * 1e3:.1f} ms"],
            ["a step, state in the host's memory", f"{moved * 1e3:.1f} ms"],
            ["of the larger of the two", f"{moved / max(step, transfer):.3f}"],
        ]
    if flags.profile:
        rows += [["of a step, by the profiler:", ""], *profiled(offloaded, flags.steps)]
    publish(
        f"Optimizer state off the device: Adam, {flags.layers} layers of {width} x {width}, "
        f"{flags.microbatches} microbatches of {flags.rows}",
        f"python -m benchmarks.offload --layers {flags.layers} --width {width} --rows {flags.rows}",
        [
            timing_table([plain, offloaded], plain, flags.steps, "step"),
            markdown_table(["", "measured"], rows),
            *after.decisions,
        ],
        path=None if flags.no_record else RESULTS,
    )


def profiled(contender: Contender, steps: int) -> list[list[str]]:
    """What a GPU does in a step: kernels, copies in and out, and how much of that at the same time."""
    found = kernel_times(contender.run)
    parts = {
        "kernels": [one for one in found if not one.name.startswith("Mem")],
        "copies in": [one for one in found if one.name == "MemcpyH2D"],
        "copies out": [one for one in found if one.name == "MemcpyD2H"],
    }
    copies = [*parts["copies in"], *parts["copies out"]]
    times = {name: busy_s(some) for name, some in parts.items()}
    times["copies"], times["all"] = busy_s(copies), busy_s([*parts["kernels"], *copies])
    times["kernels beside copies"] = times["kernels"] + times["copies"] - times["all"]
    return [[f"  {name}", f"{took / steps * 1e3:.1f} ms"] for name, took in times.items()]


def moving_time(params: Any) -> tuple[float, float] | None:
    """Seconds to move Adam's state to the device and then back, and both at the same time.

    None where there is no other memory.
    """
    device = jax.devices()[0]
    if obstacle(device, False) is not None:
        return None
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    here = jax.sharding.SingleDeviceSharding(device)
    state = [jax.device_put(kernel, there) for kernel in params for _ in range(2)]
    best = at_once = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        on_device = jax.block_until_ready(jax.device_put(state, here))
        jax.block_until_ready(jax.device_put(on_device, there))
        best = min(best, time.perf_counter() - started)
        started = time.perf_counter()
        jax.block_until_ready((jax.device_put(on_device, there), jax.device_put(state, here)))
        at_once = min(at_once, time.perf_counter() - started)
    return best, at_once


if __name__ == "__main__":
    main()
