"""A pipeline in one or several processes; says what came of it as one line of JSON."""

import json
import sys

import jax
import numpy as np
import optax

import tailrace as tr

tr.distributed.initialize(timeout_s=300)

from oracles import regression  # noqa: E402
from tailrace.program.memory import optimizer_state  # noqa: E402


def stages():
    """Two stages of unequal widths, their parameters, and the loss."""
    rng = np.random.default_rng(0)
    params = [
        {"w": rng.normal(size=(3, 5)).astype(np.float32)},
        {"w": rng.normal(size=(5, 1)).astype(np.float32), "b": np.zeros(1, np.float32)},
    ]

    def first(p, x, y):
        return jax.numpy.tanh(x @ p["w"]), y

    def second(p, h, y):
        return h @ p["w"] + p["b"], y

    def loss(h, y):
        return ((h[:, 0] - y) ** 2).mean()

    return [first, second], params, loss


def main(replicas=1, **options):
    """Train on a small regression problem, and look at what came of it."""
    optimizer_state.LEAST = 2  # also the small leaves of this problem are shared out
    parts, params, loss = stages()
    pipeline = tr.Pipeline(parts, loss, accumulation=4)
    trainer = tr.Trainer(
        pipeline, optax.sgd(0.1, momentum=0.9), params, replicas=replicas, **options
    )
    elements = regression(32)
    mine = elements if replicas == 1 else tr.distributed.share(elements, replicas)
    history = trainer.fit(mine, steps=3)
    said = {
        "process": tr.distributed.process_index(),
        "each": np.asarray(history.each("loss")).tolist(),
        "params": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(trainer.params)],
        "evaluated": trainer.evaluate(mine),
    }
    # One write: a library may print too.
    print(f"RESULT {json.dumps(said)}\n", end="", flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
