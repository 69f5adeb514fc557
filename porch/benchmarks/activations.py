"""Activations in the host's memory: what it saves of the device's, what it costs, and its rivals.

A stack of square layers with a residual each, written out layer by layer and as a loop over layers.
Rivals are JAX's own ways, by hand: computing each layer again from its input, and sending what a
policy of `jax.checkpoint` names to the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import tailrace as tr
from benchmarks.report import RESULTS, Contender, common_flags, markdown_table, measure, publish

HERE, THERE = "device", "pinned_host"


def main() -> None:
    parser = common_flags(__doc__, steps=1, repeats=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16384, help="examples in a microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    flags = parser.parse_args()
    width = flags.width
    dtype = jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32
    policies = jax.checkpoint_policies
    dots = policies.offload_dot_with_no_batch_dims(HERE, THERE)
    inputs = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src=HERE,
        offload_dst=THERE,
    )

    def layer(h: Any, kernel: Any) -> Any:
        return jnp.tanh(checkpoint_name(h, "input") @ kernel.astype(dtype)) + h

    def loss(layers: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def loss_fn(params: Any, x: Any) -> Any:
            # Made on the device: the feed is not what is measured here.
            h = layers(params, jnp.outer(jnp.linspace(0, 1, flags.rows), x).astype(dtype))
            return (h.astype(jnp.float32) ** 2).mean()

        return loss_fn

    def written_out(one: Callable[..., Any] = layer) -> Callable[[Any, Any], Any]:
        def layers(params: Any, h: Any) -> Any:
            for kernel in params:
                h = one(h, kernel)
            return h

        return layers

    def in_a_loop(policy: Any = None) -> Callable[[Any, Any], Any]:
        def one(h: Any, kernel: Any) -> Any:
            return layer(h, kernel), None

        step = one if policy is None else jax.checkpoint(one, policy=policy, prevent_cse=False)
        return lambda params, h: jax.lax.scan(step, h, params)[0]

    random = np.random.default_rng(0)
    kernels = [np.float32(random.normal(size=(width, width)) / width) for _ in range(flags.layers)]
    batches = [random.normal(size=width).astype(np.float32) for _ in range(64)]
    source = lambda: (batches[i % 64] for i in range(10**9))  # noqa: E731
    again = jax.checkpoint(layer, policy=policies.save_only_these_names("input"))
    whole = jax.checkpoint(written_out(), policy=dots)
    ways = {
        "written out, on the device": (written_out(), kernels, False),
        "written out, offload_activations=True": (written_out(), kernels, True),
        "by hand: each layer again": (written_out(again), kernels, False),
        "by hand: products sent to the host": (whole, kernels, False),
        "a loop, on the device": (in_a_loop(), np.stack(kernels), False),
        "a loop, offload_activations=True": (in_a_loop(), np.stack(kernels), True),
        "by hand: the loop's carry sent": (in_a_loop(inputs), np.stack(kernels), False),
    }
    if jax.default_backend() == "cpu":  # where nothing can be sent
        ways = {name: way for name, way in ways.items() if "sent" not in name}

    contenders, peaks = [], []
    for name, (layers, params, offload) in ways.items():
        trainer = tr.Trainer(
            loss(layers),
            optax.sgd(1e-4),
            params,
            accumulation=flags.microbatches,
            offload_activations=offload,
            steps_per_execution=flags.steps,
        )
        explained = trainer.explain(batches[0])
        print(name, explained, sep="\n", file=sys.stderr, flush=True)
        peaks.append(explained.peak_bytes)
        contenders.append(
            Contender(name, lambda t=trainer: t.fit(source, steps=flags.steps, progress=False))
        )
    for one in contenders:
        one.run()
    measure(contenders, flags.repeats)
    count = flags.steps * flags.microbatches
    rows = [
        [one.name, f"{peak / 1e9:.3f}", f"{one.median / count * 1e3:.1f}"]
        for one, peak in zip(contenders, peaks, strict=True)
    ]
    publish(
        f"Activations off the device: {flags.layers} layers of {width} x {width}, microbatches of "
        f"{flags.rows}, {flags.microbatches} a step",
        f"python -m benchmarks.activations --layers {flags.layers} --width {width} "
        f"--rows {flags.rows}",
        [markdown_table(["", "compiled peak, GB", "ms a microbatch"], rows)],
        path=None if flags.no_record else RESULTS,
    )


if __name__ == "__main__":
    main()
