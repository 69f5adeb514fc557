"""How a trainer shows itself: a few lines at a prompt, tables and curves in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.records.html_table import html_table
from tailrace.trainer.showing.summary import summarise

if TYPE_CHECKING:
    from tailrace.trainer.trainer import Trainer


def trainer_text(trainer: Trainer) -> str:
    """A trainer in a line or two."""
    facts, history = trainer_facts(trainer), trainer.history
    first = ", ".join(f"{value} {name}" if name else value for name, value in facts)
    lines = [f"Trainer({first})"]
    if len(history):
        last = ", ".join(f"{name} {value:.4g}" for name, value in history.last().items())
        lines.append(f"  last fit: {len(history):,} steps, {last}")
    return "\n".join(lines)


def trainer_html(trainer: Trainer) -> str:
    """The same as tables: what is trained, how far it is, and its curves."""
    rows = [(name or "model", value) for name, value in trainer_facts(trainer)]
    parts = [f"<b>Trainer</b>{html_table((), rows)}"]
    if len(trainer.history):
        parts.append(trainer.history._repr_html_())
    summary = summarise(trainer.engine)._repr_html_()
    parts.append(f"<details><summary>parameters</summary>{summary}</details>")
    if trainer.plan is not None:
        parts.append(f"<details><summary>plan</summary>{trainer.plan._repr_html_()}</details>")
    return "".join(parts)


def trainer_facts(trainer: Trainer) -> list[tuple[str, str]]:
    """What a trainer is, as (name, value)."""
    engine, pipeline = trainer.engine, trainer.pipeline
    summary = summarise(engine)
    fn = engine.step_function.loss_fn
    facts = [("", getattr(fn, "__name__", type(fn).__name__))]
    facts.append(("parameters", f"{summary.parameters:,}"))
    facts.append(("steps done", f"{trainer.step:,}"))
    if trainer.accumulation.microbatches > 1:
        facts.append(("microbatches", str(trainer.accumulation.microbatches)))
    if trainer.replicas > 1:
        facts.append(("replicas", str(trainer.replicas)))
    if pipeline is not None:
        facts.append(("stages", str(len(pipeline.sizes) or "traced")))
    if len(trainer.records):
        facts.append(("tensors recorded", str(len(trainer.records))))
    return facts
