"""Attributes of Zarr groups, with a checksum: numbers of rows, names of tensors and metrics.

A chunk has a checksum of its own. With a changed digit a number of rows is still a number, and a name a
name: rows would be missing, a resumed fit would cut off the wrong ones, a metric would be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.base.files import json_checksum

CHECKSUM = "checksum"


def sealed(said: Mapping[str, Any]) -> dict[str, Any]:
    """A value of JSON, with its checksum.

    >>> unsealed(sealed({"history": 12}))
    {'history': 12}
    """
    return {**said, CHECKSUM: json_checksum(dict(said))}


def unsealed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The value without its checksum; a ValueError if it is not what was written.

    Runs of earlier versions have none.
    """
    said = dict(found)
    if CHECKSUM in said and said.pop(CHECKSUM) != json_checksum(said):
        raise ValueError(f"{said!r:.100} is not what was written")
    return said
