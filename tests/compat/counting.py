"""The dataset of the original's tests: 0, 1, ..., n-1, and from the beginning again."""

import numpy as np

from tailrace.compat.ipu import config, ipu_compiler, ipu_infeed_queue


class Inc:
    """Elements of one array of `shape`, filled with the number of the element modulo n."""

    def __init__(self, n, shape=(), repeat=True, element=lambda x: (x,)):
        self.n, self.shape, self.repeat, self.element = n, shape, repeat, element

    def __iter__(self):
        while True:
            for i in range(self.n):
                yield self.element(np.full(self.shape, i, np.float32))
            if not self.repeat:
                return


def infeed(n, shape=(), **options):
    """An opened infeed of such elements."""
    queue = ipu_infeed_queue.IPUInfeedQueue(Inc(n, shape, **options))
    queue.initializer()
    return queue


def with_half(x):
    """A number, and half of what is ten more."""
    return (x, (x + 10) / 2)


def use(devices):
    """Configure this many devices."""
    cfg = config.IPUConfig()
    cfg.auto_select_ipus = devices
    cfg.configure_ipu_system()


def run(function, *inputs):
    """Compile and run once."""
    return ipu_compiler.compile(function, list(inputs))()
