"""A script for one or several processes: trains, and says what came of it as one line of JSON.

Run by the tests with `tailrace launch`; its argument is JSON: what to do, and with which options.
"""

import json
import os
import sys
import time

import jax
import numpy as np
import optax

import tailrace as tr

tr.distributed.initialize(timeout_s=300)

from oracles import mlp, mlp_apply, mlp_loss, regression  # noqa: E402
from tailrace.devices.processes.meeting import has_left  # noqa: E402
from tailrace.jaxprs import internals  # noqa: E402
from tailrace.program.memory import optimizer_state  # noqa: E402

OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.05)}


def main(replicas=4, accumulation=1, steps=4, data="share", optimizer="sgd", **options):
    """Train on a small regression problem; `data` says what goes wrong in process 1."""
    optimizer_state.LEAST = 2  # also the small leaves of this problem are shared out
    elements = regression(64)
    mine = tr.distributed.share(elements, replicas)
    process = tr.distributed.process_index()
    loss, fit = mlp_loss, {"steps": steps}
    if data == "generator":
        kept = list(mine)
        mine, fit = (lambda: iter(kept)), {"epochs": 2}
    if process == 1:
        if data == "dies":
            print("going down", flush=True)
            os._exit(7)
        if data == "leaves":
            return
        mine = spoilt(mine, data)
        loss = other_loss if data == "other loss" else mlp_loss
    trainer = tr.Trainer(
        loss,
        OPTIMIZERS[optimizer],
        mlp(),
        replicas=replicas,
        accumulation=accumulation,
        **options,
    )
    try:
        history = trainer.fit(mine, **fit)
    except tr.TailraceError:
        if process == 1:
            wait_until_process_0_has_left()
        raise
    predicted = trainer.predict(
        tr.distributed.share(elements[:6], replicas), lambda p, x, y: mlp_apply(p, x)
    )
    state = jax.tree.leaves(trainer.state.optimizer_state)
    said = {
        "process": process,
        "losses": history.loss.tolist(),
        "each": np.asarray(history.each("loss")).tolist(),
        "params": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(trainer.params)],
        "state": [np.asarray(leaf).tolist() for leaf in state],
        "evaluated": trainer.evaluate(tr.distributed.share(elements[:10], replicas)),
        "predicted": np.asarray(predicted).tolist(),
        "records": {name: shown(trainer.records[name]) for name in trainer.records.names},
    }
    # One write: a library may print too.
    print(f"RESULT {json.dumps(said)}\n", end="", flush=True)


def wait_until_process_0_has_left():
    """The launcher ends the others as soon as one has failed, and process 0 says what is tested."""
    client = internals.coordination_client()
    while not has_left(client, 0):
        time.sleep(0.05)


def shown(record):
    """What is compared of a record."""
    return [record.replicas.tolist(), record.values["mean"].tolist()]


def other_loss(params, x, y):
    """The same numbers, by other operations."""
    return mlp_loss(params, x + x - x, y)


def spoilt(elements, how):
    """A dataset with something wrong."""
    if how == "short":
        return list(elements)[:3]
    if how == "other shape":
        return [(x[:2], y[:2]) for x, y in elements]
    return failing(elements) if how == "fails" else elements


def failing(elements):
    """Two elements, and then an exception."""
    for number, element in enumerate(elements):
        if number == 2:
            raise OSError("the disk is gone")
        yield element


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
