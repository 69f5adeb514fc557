"""`popdist` in a plain program: one process, one replica."""

from __future__ import annotations

from typing import Any

from benchmarks.originals.plain import poptorch as _poptorch
from benchmarks.originals.plain.anything import Anything

tensorflow: Any = Anything()
poptorch = _poptorch


def isPopdistEnvSet() -> bool:
    """Programs are started alone."""
    return False


def getInstanceIndex() -> int:
    """The first process."""
    return 0


def getNumInstances() -> int:
    """The only one."""
    return 1


getNumLocalReplicas = getNumTotalReplicas = getNumInstances
