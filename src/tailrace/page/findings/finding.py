"""A finding: one sentence about a run, its severity, and where to look."""

from __future__ import annotations

import dataclasses
import enum


class Severity(enum.StrEnum):
    """The severity of a finding, worst first."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One conclusion about a run.

    Attributes:
        severity: its severity.
        topic: a word or two: "vanishing gradients".
        text: the observation, with numbers, and the usual remedy.
        tensor: the tensor to look at; empty for none.
        step: the step to look at; -1 for none.
    """

    severity: Severity
    topic: str
    text: str
    tensor: str = ""
    step: int = -1
