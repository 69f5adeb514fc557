"""Operations of the original, by the modules they were in."""

from typing import Any

from tailrace.compat.ipu.ops import cross_replica_ops as cross_replica_ops
from tailrace.compat.ipu.ops import grad_util_ops as grad_util_ops
from tailrace.compat.ipu.ops import internal_ops as internal_ops
from tailrace.compat.ipu.ops import pipelining_ops as pipelining_ops
from tailrace.compat.ipu.settings import absent as _absent


def __getattr__(name: str) -> Any:
    return _absent.refuse("ipu.ops", name)
