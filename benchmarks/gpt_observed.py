"""GPT-2 small on a GPU: what it costs to look, to guard, and to train with `tr.Trainer` at all.

    python -m benchmarks.gpt_observed [--only NAME,...] [--profile]

bfloat16, batch 8 x 1024, AdamW, 10 steps an execution; ratios to the hand-written scan of ten steps,
in neighbouring runs. `--profile` then tells what each runs on the GPU that `tr.Trainer` alone does not.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks import report
from benchmarks.kernels import kernel_times
from benchmarks.lengths import gpt_model, gpt_tokens
from benchmarks.report import Contender

LENGTH = 10


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=60, repeats=7)
    parser.add_argument("--profile", action="store_true", help="kernels, by the profiler")
    given = parser.parse_args(arguments)
    large = jax.devices()[0].platform != "cpu"
    sizes, batch = ((12, 768, 1024), 8) if large else ((2, 128, 64), 2)
    params, loss_fn = gpt_model(*sizes)
    tokens = gpt_tokens(batch, sizes[2])
    elements = [tokens[i % len(tokens)] for i in range(given.steps)]
    optimizer = optax.adamw(1e-4)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    loop = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs), donate_argnums=0)
    held = [(jax.tree.map(jnp.array, params), optimizer.init(params))]
    blocks = [np.stack(elements[i : i + LENGTH]) for i in range(0, given.steps, LENGTH)]

    def by_scan() -> Any:
        losses = []
        for block in blocks:
            held[0], part = loop(held[0], block)
            losses.append(part)
        return np.concatenate([np.asarray(part) for part in losses])

    trainers = []

    def by_trainer(**options: Any) -> Any:
        trainer = tr.Trainer(loss_fn, optimizer, params, steps_per_execution=LENGTH, **options)
        trainers.append(trainer)
        return lambda: trainer.fit(elements, steps=given.steps, progress=False).loss

    scopes = re.compile(r"(activation|cotangent)/block_\d+(/attention|/mlp)?$")
    cases = {
        "tr.Trainer": {},
        "statistics of gradients": {"observe": [tr.Tap("grad/*")]},
        "statistics, every 10th": {"observe": [tr.Tap("grad/*", mode=tr.every(10))]},
        "histograms, every 10th": {
            "observe": [tr.Tap("grad/*", mode=tr.every(10), reduce="histogram")]
        },
        "stop_on_nonfinite": {"observe": [tr.stop_on_nonfinite(["loss", "grad/*"])]},
        "statistics of activations": {"observe": [tr.Tap(scopes)]},
        "fingerprints": {"fingerprint": True},
    }
    contenders = [Contender("hand-written scan", by_scan)]
    for name, options in cases.items():
        if not given.only or any(part in name for part in given.only.split(",")):
            contenders.append(Contender(name, by_trainer(**options)))
    for contender in contenders:
        contender.run()
    report.settle(trainers)
    for contender in contenders:  # the first execution of a new program takes longer
        contender.run()
    report.measure(contenders, given.repeats)
    command = f"python -m benchmarks.gpt_observed --steps {given.steps} --repeats {given.repeats}"
    part = report.timing_table(contenders, contenders[0], given.steps, "step")
    plain = next((one for one in contenders if one.name == "tr.Trainer"), None)
    if plain is not None:
        rows = [(one.name, f"{one.ratio_to(plain):.4f}") for one in contenders[1:]]
        part += "\n\n" + report.markdown_table(("", "of tr.Trainer"), rows)
    path = None if given.no_record else report.RESULTS
    report.publish("GPT-2 small, observed", command, [part], path=path)
    if given.profile and plain is not None:
        print_profile(contenders, plain, given.steps)


def print_profile(contenders: list[Contender], plain: Contender, steps: int) -> None:
    """Kernels of a step by kind: those that take longer, or are more, than those of `plain`."""
    base = _by_kind(plain, steps)
    for contender in contenders:
        found = base if contender is plain else _by_kind(contender, steps)
        total, number = (sum(pair[k] for pair in found.values()) for k in (0, 1))
        print(f"\n{contender.name}: {total:.1f} us and {number:.1f} kernels a step")
        changes = {
            kind: [found.get(kind, (0.0, 0.0))[k] - base.get(kind, (0.0, 0.0))[k] for k in (0, 1)]
            for kind in {*found, *base}
        }
        largest = sorted(changes.items(), key=lambda item: -abs(item[1][0]))[:14]
        for kind, (longer, more) in largest:
            if abs(longer) >= 1 or abs(more) >= 1:
                print(f"  {longer:+9.1f} us {more:+7.1f} kernels  {kind}")


def _by_kind(contender: Contender, steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds and number a step, of kernels whose names differ in numbers only."""
    found: dict[str, tuple[float, float]] = {}
    for name, _, seconds in kernel_times(contender.run):
        kind = re.sub(r"\d+", "", name)[:60]
        took, number = found.get(kind, (0.0, 0.0))
        found[kind] = took + seconds * 1e6 / steps, number + 1 / steps
    return found


if __name__ == "__main__":
    main()
