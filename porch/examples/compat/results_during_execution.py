"""Results that are fetched while the program runs, by a thread beside it, in the seeds' words."""

import argparse
import itertools
import threading
import time

import jax.numpy as jnp
import numpy as np

from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops


def main(iterations=500):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    data = itertools.repeat((np.ones((64, 64), np.float32),))
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

    def body(counter, x):
        outfeed_queue.enqueue((counter, jnp.mean(x @ x)))
        return counter + 1

    run_loop = ipu_compiler.compile(
        lambda c: loops.repeat(iterations, body, [c], infeed_queue), [0]
    )
    fetched = []

    def dequeue():
        """Fetch what is there, until everything has been."""
        while sum(len(counters) for counters, _ in fetched) < iterations:
            result = outfeed_queue.dequeue()
            if len(result) and len(result[0]):
                fetched.append(result)
            time.sleep(0.001)

    # The thread starts first: whoever asks beforehand gets results during the execution.
    thread = threading.Thread(target=dequeue, daemon=True)
    thread.start()
    infeed_queue.initializer()
    run_loop()
    thread.join()
    infeed_queue.deleter()
    counters = np.concatenate([counters for counters, _ in fetched])
    in_order = bool((counters == np.arange(iterations)).all())
    print(f"{len(counters)} results, in order: {in_order}, more than one fetch: {len(fetched) > 1}")
    return counters


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=500)
    main(**vars(parser.parse_args()))
