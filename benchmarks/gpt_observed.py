"""GPT-2 small on a GPU: what it costs to look, to guard, and to train with `tr.Trainer` at all.

    python -m benchmarks.gpt_observed [--only NAME,...]

bfloat16, batch 8 x 1024, AdamW, 10 steps an execution; ratios to the hand-written scan of ten steps,
in neighbouring runs.
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
from benchmarks.lengths import gpt_model, gpt_tokens
from benchmarks.report import Contender

LENGTH = 10


def main(arguments: list[str] | None = None) -> None:
    given = report.common_flags(__doc__, steps=60, repeats=7).parse_args(arguments)
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


if __name__ == "__main__":
    main()
