"""A loop with both feeds, in the seeds' words: pairs go in, sums and differences come out.

Beside the original, three lines differ: the imports, reading `initializer` where a session ran it,
and calling the program instead of giving it to a session.
"""

import itertools

import numpy as np

from tailrace.compat import ipu
from tailrace.compat.ipu import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops, scopes


def create_dataset():
    """A constant, made into a pair of arrays, again and again without end."""
    constant = np.full((4, 4), 2.0, np.float32)
    return itertools.repeat((constant, constant / 2))


def main():
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(create_dataset())
    outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

    # The device side.
    def body(x1, x2):
        d1 = x1 + x2
        d2 = x1 - x2
        return outfeed_queue.enqueue({"d1": d1, "d2": d2})

    def my_net():
        return loops.repeat(10, body, [], infeed_queue)

    with scopes.ipu_scope("/device:IPU:0"):
        run_loop = ipu_compiler.compile(my_net, inputs=[])

    # The hardware.
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    infeed_queue.initializer()
    run_loop()
    result = outfeed_queue.dequeue()
    for name, values in result.items():
        print(f"{name}: shape {values.shape}, each {values[0, 0, 0]}")
    return result


if __name__ == "__main__":
    main()
