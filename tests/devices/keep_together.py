"""A script for several processes that keeps checkpoints, and is ended on the way."""

import itertools
import json
import os
import signal
import sys

import jax
import numpy as np
import optax

import tailrace as tr

tr.distributed.initialize(timeout_s=300)

from oracles import mlp, mlp_apply, regression  # noqa: E402
from tailrace.program.memory import optimizer_state  # noqa: E402


class End(tr.Callback):
    """Ends one process at some step, by a signal or at once; or the launcher, by a signal to both."""

    def __init__(self, how, process, step):
        self.how, self.step = how, step
        self.mine = process == tr.distributed.process_index()

    def on_execution_end(self, trainer, execution):
        if trainer.step == self.step and self.mine:
            if self.how == "dies":
                os._exit(7)
            if self.how == "launcher":
                os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def loss_fn(params, x, y):
    x = x * jax.random.bernoulli(tr.key(), 0.8, x.shape) if tr.training() else x
    return ((mlp_apply(params, x) - y) ** 2).mean()


def main(directory=None, steps=10, end=None, run_dir=None, replicas=4, every=2, callbacks=()):
    optimizer_state.LEAST = 2  # also the small leaves of this problem are shared out
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.05, momentum=0.9),
        mlp(),
        replicas=replicas,
        steps_per_execution=1,
        shard_optimizer_state=True,
        run_dir=run_dir,
    )
    data = tr.distributed.share(lambda: itertools.cycle(regression(64)), replicas)
    kept = None if directory is None else tr.Checkpoint(directory, every=every)
    callbacks = [*callbacks, *([] if end is None else [End(*end)])]
    trainer.fit(data, steps=steps, checkpoint=kept, callbacks=callbacks)
    leaves = jax.tree.leaves((trainer.params, trainer.state.optimizer_state))
    said = {
        "process": tr.distributed.process_index(),
        "executions": trainer.executions,
        "losses": trainer.history.loss.tolist(),
        "state": [np.asarray(leaf).tolist() for leaf in leaves],
    }
    # One write: a library may print too.
    print(f"RESULT {json.dumps(said)}\n", end="", flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
