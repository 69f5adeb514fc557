"""The state of training."""

from __future__ import annotations

from typing import Any, NamedTuple

from tailrace.program.step.loss_scale import ScaleState


class TrainState(NamedTuple):
    """The state that training carries from step to step."""

    params: Any
    optimizer_state: Any
    model_state: Any = None
    loss_scale: ScaleState | None = None
