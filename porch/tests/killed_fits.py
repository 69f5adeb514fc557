"""A fit that ends in the middle, as if its process had been killed."""

import tailrace as tr


class Killed(Exception):
    """Stands for the end of a process."""


class Kill(tr.Callback):
    """Ends the fit at some execution, without a chance to save."""

    def __init__(self, after):
        self.left = after

    def on_execution_end(self, trainer, execution):
        self.left -= 1
        if self.left < 0:
            raise Killed
