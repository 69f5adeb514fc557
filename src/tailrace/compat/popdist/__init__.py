"""`popdist`: which of several processes this is, and how many replicas they have.

Processes are joined by `tailrace launch` or `tr.distributed.initialize`. In a process by itself there
is one instance; its replicas are those that POPDIST_NUM_LOCAL_REPLICAS asks for, or one.
"""

from __future__ import annotations

import os

import jax

from tailrace.compat.originals.missing import missing_from
from tailrace.devices.environment import PROCESSES
from tailrace.devices.processes import distributed
from tailrace.errors import OptionError

REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
"""How many replicas each process has."""


def isPopdistEnvSet() -> bool:
    """Whether this is one of several processes, or a number of replicas is asked for."""
    return PROCESSES in os.environ or REPLICAS in os.environ


def init() -> None:
    """Join the processes."""
    if PROCESSES in os.environ:
        distributed.initialize()


def getNumInstances() -> int:
    """How many processes there are.

    >>> getNumInstances(), getInstanceIndex(), getNumTotalReplicas()
    (1, 0, 1)
    """
    return jax.process_count()


def getInstanceIndex() -> int:
    """Which of them this is."""
    return jax.process_index()


def getNumLocalReplicas() -> int:
    """How many replicas a process has.

    Raises:
        OptionError: the environment's number of replicas is not a number.
    """
    text = os.environ.get(REPLICAS, "1")
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"{REPLICAS} is a number of replicas. Received: {text!r}.")
    return int(text)


def getNumTotalReplicas() -> int:
    """How many replicas all processes have."""
    return getNumInstances() * getNumLocalReplicas()


def getReplicaIndexOffset() -> int:
    """The number of this process's first replica."""
    return getInstanceIndex() * getNumLocalReplicas()


def getNumIpusPerReplica() -> int:
    """How many devices a replica has: one, if a configuration says nothing else."""
    return 1


__getattr__, __dir__ = missing_from(
    __name__, {name: f"{__name__}.{name}" for name in ("tensorflow", "poptorch")}
)
