"""Processes that keep checkpoints; in each of the first starts one is killed, at a random moment.

Run by `tailrace launch --restarts`; its argument is JSON: how many starts have a kill, a folder for the
count of starts, and the options of `keep_together`.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import tailrace as tr

MOST_AFTER = 1
"""The most executions that begin after the moment is chosen."""

MOST_STEPS = 5
"""The most steps of a start with a kill."""


class Killed(tr.Callback):
    """Kills this process some time after an execution: in the next one, or while one is saved."""

    def __init__(self, execution, delay_s):
        self.left, self.delay_s = execution, delay_s

    def on_execution_end(self, trainer, execution):
        self.left -= 1
        if self.left == 0:
            kill_in(self.delay_s)
        while self.left < -MOST_AFTER:  # so that the fit does not end before
            time.sleep(1)


def kill_in(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def number_of_start(folder):
    """The number of this start, from 1, the same in all processes: the launcher's token is new in each.

    One that is ended before it comes here would count its own starts otherwise than the others do.
    """
    (Path(folder) / f"start-{os.environ['TAILRACE_TOKEN']}").touch()
    return len(list(Path(folder).glob("start-*")))


def main(kills, folder, **options):
    here, count = int(os.environ["TAILRACE_PROCESS"]), int(os.environ["TAILRACE_PROCESSES"])
    start = number_of_start(folder)
    chance = random.Random(f"{options.get('directory')} {start}")  # the same in all processes
    victim, early = chance.randrange(count), chance.random() < 0.2
    callbacks = []
    if start <= kills:
        moment, delay_s = chance.randint(1, 3), chance.random() / 5
        if here == victim:
            callbacks = [Killed(moment, delay_s)]
            if early:
                kill_in(chance.uniform(0, 3))  # while it starts, meets the others or compiles
    import keep_together

    keep_together.main(callbacks=callbacks, **options)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
