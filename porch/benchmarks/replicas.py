"""Replica scaling on virtual CPU devices: reported as it is, because they share the same cores."""

from __future__ import annotations

import os

import jax
import numpy as np
import optax

import tailrace as tr
from benchmarks.report import RESULTS, Contender, common_flags, measure, publish, timing_table


def main() -> None:
    flags = common_flags(__doc__, steps=500, repeats=5).parse_args()
    tr.configure(devices=2, platform="cpu")
    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 784)).astype(np.float32)
    y = random.integers(0, 10, 4096).astype(np.int32)

    def loss_fn(params, x, y):
        hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def contender(replicas: int, batch: int) -> Contender:
        params = {
            "hidden": {
                "kernel": np.float32(random.normal(size=(784, 128)) * 0.05),
                "bias": np.zeros(128, np.float32),
            },
            "out": {
                "kernel": np.float32(random.normal(size=(128, 10)) * 0.1),
                "bias": np.zeros(10, np.float32),
            },
        }
        trainer = tr.Trainer(
            loss_fn, optax.sgd(0.01), params, replicas=replicas, steps_per_execution=100
        )
        data = tr.batches((x, y), batch, shuffle=True, repeat=True)
        name = f"{replicas} replica{'s' * (replicas > 1)} of batch {batch}"
        return Contender(name, lambda: trainer.fit(data, steps=flags.steps, progress=False))

    contenders = [contender(1, 256), contender(2, 128), contender(1, 128)]
    for one in contenders:
        one.run()
    measure(contenders, flags.repeats)
    publish(
        f"Replicas on {os.cpu_count()} cores: the same examples a step, on one device and on two",
        "python -m benchmarks.replicas",
        [
            timing_table(contenders, contenders[0], flags.steps, "step"),
            "Virtual devices share the cores that one device uses already: what is seen here is the "
            "price of replication (one all-reduce a step), not a gain.",
        ],
        path=None if flags.no_record else RESULTS,
    )


if __name__ == "__main__":
    main()
