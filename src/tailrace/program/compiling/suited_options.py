"""The options of XLA's compiler that suit a program: a table from measurements."""

from __future__ import annotations

from tailrace.jaxprs.value_graph import ValueGraph
from tailrace.program.compiling.build import Option


def suited_options(graph: ValueGraph, platform: str) -> dict[str, Option]:
    """The options for a program on a platform; empty where XLA's own are best."""
    return {}
