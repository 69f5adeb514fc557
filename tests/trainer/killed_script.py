"""A training script that is killed, and started again unchanged.

    python killed_script.py DIRECTORY [--slow SECONDS] [--waits FILE] [--blocks AFTER] [--run DIRECTORY]

Prints "step N" while it runs, and at its end a digest of everything that it left behind.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr


class Telling(tr.Callback):
    """Prints how far the fit is, and makes executions take some time, or wait for a file."""

    def __init__(self, seconds, awaited):
        self.seconds, self.awaited = seconds, awaited

    def on_execution_end(self, trainer, execution):
        # One write: the reader's thread prints, too.
        print(f"step {trainer.step}\n", end="", flush=True)
        time.sleep(self.seconds)
        while self.awaited is not None and trainer.step >= 9 and not self.awaited.exists():
            time.sleep(0.01)


def loss_fn(w, x, y):
    x = x * jax.random.bernoulli(tr.key(), 0.8, x.shape) if tr.training() else x
    return ((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2).mean()


def blocking(data, after):
    """A dataset that stops to deliver."""
    for number, element in enumerate(data):
        if number == after:
            print("blocked\n", end="", flush=True)
            time.sleep(600)
        yield element


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--waits", type=Path, help="for this file, from step 9 on")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--run", help="of the run, with fingerprints: what an audit reads")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    data = tr.batches((x, np.sin(x.sum(1))), 4, shuffle=True)
    w = {"a": rng.normal(size=(4, 8)).astype(np.float32), "b": np.zeros(8, np.float32)}
    watched = {} if given.run is None else {"run_dir": given.run, "fingerprint": True}
    trainer = tr.Trainer(loss_fn, optax.adam(0.01), w, steps_per_execution=3, **watched)
    checkpoint = None if given.directory == "-" else tr.Checkpoint(given.directory, every=5)
    source = data if given.blocks is None else blocking(data, given.blocks)
    call = {"epochs": 3} if given.blocks is None else {"steps": 30}
    telling = Telling(given.slow, given.waits)
    trainer.fit(source, **call, checkpoint=checkpoint, callbacks=[telling], progress=False)
    digest = hashlib.sha256()
    for leaf in [*jax.tree.leaves(trainer.state), trainer.history.loss]:
        digest.update(np.asarray(leaf).tobytes())
    print("digest", digest.hexdigest(), trainer.step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
