"""`trainer.summary()`: what is trained, part by part, and what it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tailrace.base.messages import shown, size_text
from tailrace.jaxprs.flops import model_flops
from tailrace.jaxprs.marks import path_name
from tailrace.records.html_table import html_table
from tailrace.trainer.costs.explanation import state_bytes, tree_bytes
from tailrace.trainer.engine import Engine
from tailrace.trainer.showing.optimizer_text import optimizer_text

MOST_ROWS = 40
"""Scopes that are listed; deeper ones are summed up where there are more."""

_COUNTED = {"parameters": "parameters", "state": "arrays"}
"""What there is in a scope, by what is trained."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The parameters of one scope.

    Attributes:
        name: the scope, or the parameter.
        count: the number of values.
        nbytes: their size in bytes.
        form: dtype and shape of a parameter; how many parameters a scope has.
    """

    name: str
    count: int
    nbytes: int
    form: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a trainer trains. Prints as a table.

    Attributes:
        parts: the parameters by scope.
        parameters: the number of trained values.
        memory: bytes by what they hold: parameters, optimizer state, model state.
        flops_per_step: floating-point operations of the matrix products and convolutions of a step,
            over all microbatches and replicas; None before the form of a batch is known.
        optimizer: the optimizer in words.
        what: what the parts are of: "parameters", or the "state" of a step of your own.
    """

    parts: tuple[Part, ...]
    parameters: int
    memory: Mapping[str, int]
    flops_per_step: float | None
    optimizer: str
    what: str = "parameters"

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{shown(name):<{widths[0]}}  {count:>{widths[1]}}  {size:>{widths[2]}}  {form}".rstrip()
            for name, count, size, form in rows
        ]
        return "\n".join([*lines, *self._sentences()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return html_table(head, rows) + "<br>".join(html_lines(self._sentences()))

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(p.name, f"{p.count:,}", size_text(p.nbytes), p.form) for p in self.parts]
        whole = ("all", f"{self.parameters:,}", size_text(self.memory[self.what]), "")
        return [(self.what, "numbers", "memory", "form"), *rows, whole]

    def _sentences(self) -> list[str]:
        rest = [f"{name} {size_text(n)}" for name, n in self.memory.items() if n]
        flops = self.flops_per_step
        said = f"{flops_text(flops)} a step" if flops is not None else "known after a fit, or with"
        return [
            f"memory: {', '.join(rest)}",
            f"floating-point operations: {said}"
            + ("" if flops is not None else " trainer.summary(example)"),
            f"optimizer: {self.optimizer}",
        ]


def summarise(engine: Engine) -> Summary:
    """What an engine trains; with FLOPs if it has a program."""
    form = engine.form
    what, trained = form.trained
    leaves = jax.tree_util.tree_flatten_with_path(trained)[0]
    alone = "params" if what == "parameters" else what
    named = [(path_name(path) or alone, leaf) for path, leaf in leaves]
    memory = state_bytes(form, engine.memory.keeping)
    flops = None
    if engine.has_program:
        flops = model_flops(engine.runner.traced.jaxpr.eqns) * engine.placement.replicas
    count = sum(leaf.size for _, leaf in named)
    return Summary(
        _parts(named, what), count, memory, flops, optimizer_text(engine.optimizer), what
    )


def _parts(named: list[tuple[str, Any]], what: str) -> tuple[Part, ...]:
    """One row a parameter, or a scope where there are too many, as deep as rows allow."""
    if len(named) <= MOST_ROWS:
        return tuple(
            Part(name, leaf.size, tree_bytes(leaf), f"{leaf.dtype}{list(leaf.shape)}")
            for name, leaf in named
        )
    groups: dict[str, list[Any]] = {}
    # The deepest level whose scopes still fit into the table.
    for depth in range(1, 10):
        deeper: dict[str, list[Any]] = {}
        for name, leaf in named:
            deeper.setdefault("/".join(name.split("/")[:depth]), []).append(leaf)
        if groups and len(deeper) > MOST_ROWS:
            break
        groups = deeper
    return tuple(
        Part(name, sum(x.size for x in held), tree_bytes(held), f"{len(held)} {_COUNTED[what]}")
        for name, held in groups.items()
    )


def flops_text(flops: float) -> str:
    """Floating-point operations for people.

    >>> flops_text(1.5e12), flops_text(12)
    ('1.5 TFLOP', '12 FLOP')
    """
    for unit in ("", "k", "M", "G", "T"):
        if flops < 1000 or unit == "T":
            return f"{flops:.4g} {unit}FLOP"
        flops /= 1000
    raise AssertionError


def html_lines(lines: list[str]) -> list[str]:
    """Lines of text, safe in HTML."""
    import html

    return [html.escape(line) for line in lines]
