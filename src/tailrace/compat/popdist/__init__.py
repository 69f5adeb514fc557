"""`popdist`: which of several processes this is, and how many replicas they have.

Processes are joined by `tailrace launch` or `tr.distributed.initialize`. In a process by itself there
is one instance; its replicas are those that POPDIST_NUM_LOCAL_REPLICAS asks for, or one.

In: the environment, and `tr.distributed`. Out: numbers. Rule: nothing here starts or joins processes.
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
    """Whether this is one of several processes, or a number of replicas is asked for.

    >>> from tailrace.compat import popdist
    >>> popdist.isPopdistEnvSet()
    False
    """
    return PROCESSES in os.environ or REPLICAS in os.environ


def init() -> None:
    """Join the processes that `tailrace launch` has started; without effect in a single process.

    Raises:
        DistributedError: the processes do not find each other.

    >>> from tailrace.compat import popdist
    >>> popdist.init()
    """
    # Set by `tailrace launch`; a process by itself joins nothing.
    if PROCESSES in os.environ:
        distributed.initialize()


def getNumInstances() -> int:
    """How many processes there are.

    >>> from tailrace.compat import popdist
    >>> popdist.getNumInstances()
    1
    """
    return jax.process_count()


def getInstanceIndex() -> int:
    """The number of this process, from 0.

    >>> from tailrace.compat import popdist
    >>> popdist.getInstanceIndex()
    0
    """
    return jax.process_index()


def getNumLocalReplicas() -> int:
    """How many replicas a process has: the environment's `POPDIST_NUM_LOCAL_REPLICAS`, or 1.

    Raises:
        OptionError: the environment's number of replicas is not a number.

    >>> from tailrace.compat import popdist
    >>> popdist.getNumLocalReplicas()
    1
    """
    text = os.environ.get(REPLICAS, "1")
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"{REPLICAS} is a number of replicas. Received: {text!r}.")
    return int(text)


def getNumTotalReplicas() -> int:
    """How many replicas all processes have.

    Raises:
        OptionError: the environment's number of replicas is not a number.

    >>> from tailrace.compat import popdist
    >>> popdist.getNumTotalReplicas()
    1
    """
    return getNumInstances() * getNumLocalReplicas()


def getReplicaIndexOffset() -> int:
    """The number of this process's first replica.

    Raises:
        OptionError: the environment's number of replicas is not a number.

    >>> from tailrace.compat import popdist
    >>> popdist.getReplicaIndexOffset()
    0
    """
    return getInstanceIndex() * getNumLocalReplicas()


def getNumIpusPerReplica() -> int:
    """How many devices a replica has: always 1 here; a pipeline takes what its stages need.

    >>> from tailrace.compat import popdist
    >>> popdist.getNumIpusPerReplica()
    1
    """
    return 1


__getattr__, __dir__ = missing_from(
    __name__, {name: f"{__name__}.{name}" for name in ("tensorflow", "poptorch")}
)
