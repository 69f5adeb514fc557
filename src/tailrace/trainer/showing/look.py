"""How a trainer shows itself: a few lines at a prompt, tables and curves in a notebook."""

from __future__ import annotations

from tailrace.devices.shard_rules import mesh_text
from tailrace.records.history import History
from tailrace.records.html_table import html_table
from tailrace.records.records import Records
from tailrace.trainer.engine import Engine
from tailrace.trainer.showing.summary import summarise


def trainer_text(engine: Engine, history: History, records: Records) -> str:
    """A trainer in a line or two."""
    facts = trainer_facts(engine, records)
    first = ", ".join(f"{value} {name}" if name else value for name, value in facts)
    lines = [f"Trainer({first})"]
    if len(history):
        last = ", ".join(f"{name} {value:.4g}" for name, value in history.last().items())
        lines.append(f"  last fit: {len(history):,} steps, {last}")
    return "\n".join(lines)


def trainer_html(engine: Engine, history: History, records: Records) -> str:
    """The same as tables: what is trained, how far it is, and its curves."""
    rows = [(name or "model", value) for name, value in trainer_facts(engine, records)]
    parts = [f"<b>Trainer</b>{html_table((), rows)}"]
    if len(history):
        parts.append(history._repr_html_())
    summary = summarise(engine)._repr_html_()
    parts.append(f"<details><summary>{engine.form.trained[0]}</summary>{summary}</details>")
    if engine.plan is not None:
        parts.append(f"<details><summary>plan</summary>{engine.plan._repr_html_()}</details>")
    return "".join(parts)


def trainer_facts(engine: Engine, records: Records) -> list[tuple[str, str]]:
    """The description of a trainer, as (name, value)."""
    pipeline = engine.pipeline
    summary = summarise(engine)
    fn = engine.step_function.loss_fn
    facts = [("", getattr(fn, "__name__", type(fn).__name__))]
    counted = summary.what if summary.what == "parameters" else f"numbers of {summary.what}"
    facts.append((counted, f"{summary.parameters:,}"))
    facts.append(("steps done", f"{engine.step:,}"))
    if engine.accumulation.microbatches > 1:
        facts.append(("microbatches", str(engine.accumulation.microbatches)))
    if engine.placement.sharding is not None:
        facts.append(("mesh", mesh_text(engine.placement.sharding.given)))
    if engine.placement.replicas > 1:
        facts.append(("replicas", str(engine.placement.replicas)))
    if pipeline is not None:
        facts.append(("stages", str(len(pipeline.sizes) or "traced")))
    if len(records):
        facts.append(("tensors recorded", str(len(records))))
    return facts
