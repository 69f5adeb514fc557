"""Which stages a model has: set, or named where its layers are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tailrace.keras.handles import settings_of
from tailrace.keras.pipelines.assignment_classes import noted_stages
from tailrace.keras.pipelines.graph import has_flow
from tailrace.keras.pipelines.stage_scope import CALLS, MADE
from tailrace.keras.pipelines.staged_forward import noted_in_call


def stages_of(model: keras.Model) -> list[Any] | None:
    """The stages of a model, set or named where its layers are called; None if it has none."""
    settings = settings_of(model)
    if settings.options.pipeline_stage_assignment is not None or settings.ignores_notes:
        return settings.options.pipeline_stage_assignment
    if isinstance(model, keras.Sequential) or not model.built:
        return None
    if not any(CALLS in layer.__dict__ or MADE in layer.__dict__ for layer in _layers(model)):
        return None
    found = noted_stages(model) if has_flow(model) else noted_in_call(model)
    settings.options.pipeline_stage_assignment = found
    return found


def _layers(model: keras.Model) -> Iterator[Any]:
    """The layers of a model, and of the models inside."""
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
