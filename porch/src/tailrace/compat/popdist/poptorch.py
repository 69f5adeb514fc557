"""`popdist.poptorch`: options with this process's replicas."""

from __future__ import annotations

from typing import Any

from tailrace.compat import popdist
from tailrace.compat import poptorch as _poptorch


def Options(ipus_per_replica: int = 1, **_: Any) -> Any:
    """`poptorch.Options` with the replicas of this process."""
    del ipus_per_replica
    return _poptorch.Options().replicationFactor(popdist.getNumLocalReplicas())
