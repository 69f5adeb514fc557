"""Processes that meet in collectives until one of them stops; run by `tailrace launch`."""

import json
import os
import signal
import sys
import time

import jax

import tailrace as tr


def listening():
    """The addresses at which this process listens."""
    inodes = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.append((address, int(port, 16)))
    return found


def main():
    options = json.loads(sys.argv[1])
    tr.distributed.initialize(heartbeat_s=options["heartbeat_s"])
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("start")
    port = int(os.environ["TAILRACE_COORDINATOR"].rpartition(":")[2])
    own = [address for address, number in listening() if number == port]
    # One write: a library may print too.
    print(f"READY {jax.process_index()} {os.getpid()} {json.dumps(own)}\n", end="", flush=True)
    for number in range(10_000):
        if number == 3 and jax.process_index() == options["stopped"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        multihost_utils.sync_global_devices(str(number))
        time.sleep(0.05)


main()
