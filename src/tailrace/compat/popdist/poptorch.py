"""`popdist.poptorch`: options with this process's replicas."""

from __future__ import annotations

from typing import Any

from tailrace.compat import popdist
from tailrace.compat import poptorch as _poptorch


def Options(ipus_per_replica: int = 1, **_: Any) -> Any:
    """`poptorch.Options` with the replicas of this process.

    Args:
        ipus_per_replica: without effect: the blocks of a model say how many devices it takes.
        **_: without effect.

    Raises:
        OptionError: the environment's number of replicas is not a number.

    >>> from tailrace.compat import popdist
    >>> popdist.poptorch.Options().replication_factor
    1
    """
    # Blocks name their devices; a number beside them could only contradict them.
    del ipus_per_replica
    return _poptorch.Options().replicationFactor(popdist.getNumLocalReplicas())
