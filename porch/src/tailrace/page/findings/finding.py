"""A finding: one sentence about a run, how bad it is, and where to look."""

from __future__ import annotations

import dataclasses
import enum


class Severity(enum.StrEnum):
    """How bad a finding is; the worst comes first."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        severity: how bad it is.
        topic: a word or two: "vanishing gradients".
        text: what was seen, with numbers, and what is usually done about it.
        tensor: the tensor to look at; empty for none.
        step: the step to look at; -1 for none.
    """

    severity: Severity
    topic: str
    text: str
    tensor: str = ""
    step: int = -1
