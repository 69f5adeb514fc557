"""The description of an engine for a run directory: devices, options, taps, catalogue, plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tailrace.devices.devices import available
from tailrace.devices.surroundings import SURROUNDINGS, surroundings
from tailrace.trainer.engine import Engine
from tailrace.trainer.showing.optimizer_text import optimizer_text


def describe(
    engine: Engine, steps_per_execution: int | None, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The description of the fit that writes a run directory, ready for JSON."""
    plan, step, placement = engine.plan, engine.step_function, engine.placement
    placed = placement.mesh is not None or placement.sharding or placement.chosen
    mesh = placement.sharding and dict(placement.sharding.mesh.shape)
    return {
        "devices": [
            {"platform": device.platform, "kind": device.device_kind, "id": device.id}
            for device in (placement.devices if placed else available()[:1])
        ],
        SURROUNDINGS: surroundings(),
        "config": dict(config or {}),
        "options": {
            "optimizer": optimizer_text(engine.optimizer),
            "steps_per_execution": "auto" if steps_per_execution is None else steps_per_execution,
            "microbatches": engine.accumulation.microbatches,
            "reduction": str(engine.accumulation.reduction),
            "replicas": engine.placement.replicas,
            "seed": engine.seed,
            "precision": str(precision.dtype) if (precision := step.precision) else None,
            "sentinel": None if engine.sentinel is None else engine.sentinel.share,
            "fingerprint": engine.digests is not None,
            "loss_scale": dataclasses.asdict(scale) if (scale := step.loss_scale) else None,
            "build": engine.built,
            **({"mesh": mesh} if mesh else {}),
        },
        "taps": [
            {
                "select": describe_select(tap.select),
                "mode": f"every({tap.period})" if tap.period > 1 else str(tap.mode),
                "reduce": tap.kind,
            }
            for tap in engine.taps
            # Those of `log=` make columns of the history, and are not the user's.
            if not tap.kind.startswith("log:")
        ],
        "catalogue": engine.sight.catalogue.to_rows(),
        "use_order": engine.sight.catalogue.use_order(),
        "plan": plan.to_json(ticks=False) if plan is not None else None,
    }


def describe_select(select: object) -> Any:
    """A selection as JSON: globs unchanged, anything else as a description.

    >>> describe_select(["grad/*", re.compile("^loss$")])
    ['grad/*', 're.compile(^loss$)']
    """
    # For people: nothing is selected by this text, so a function needs only a name.
    if isinstance(select, str):
        return select
    if isinstance(select, re.Pattern):
        return f"re.compile({select.pattern})"
    if isinstance(select, list | tuple | set):
        return [describe_select(part) for part in select]
    return f"function {getattr(select, '__name__', type(select).__name__)}"
