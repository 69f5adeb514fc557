"""The smallest loop with both feeds: pairs go in, their sums and differences come out.

There is no model and no optimizer. The body runs ten times on the device, fed by the infeed; what
it enqueues is there, all of it, when the program has ended.
"""

import argparse
import itertools

import numpy as np

import tailrace as tr


def pairs(shape=(2, 2)):
    """A constant, made into a pair of arrays, again and again without end."""
    constant = np.ones(shape, np.float32)
    return ((number * constant, 2 * constant) for number in itertools.count())


def main(iterations=10):
    infeed = tr.InfeedQueue(pairs())
    outfeed = tr.OutfeedQueue()

    def body(x1, x2):
        outfeed.enqueue({"d1": x1 + x2, "d2": x1 - x2})

    # Nothing is carried from one pass to the next, so the loop has no inputs but the elements.
    my_net = tr.compile(lambda: tr.repeat(iterations, body, infeed=infeed))
    with infeed:
        my_net()
    result = outfeed.dequeue()
    for name, values in result.items():
        print(f"{name}: shape {values.shape}, first entries {values[:, 0, 0].tolist()}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10)
    main(**vars(parser.parse_args()))
