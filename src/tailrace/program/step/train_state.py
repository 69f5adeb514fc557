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

    @property
    def trained(self) -> tuple[str, Any]:
        """What is trained, and its name for users."""
        return "parameters", self.params

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that take memory, by their names for users."""
        return {
            "parameters": self.params,
            "optimizer state": self.optimizer_state,
            "model state": self.model_state,
        }


class OwnState(NamedTuple):
    """The state of a step of the user's own: one tree, of which nobody else knows what is what.

    The other names are those of `TrainState`, for code that asks what a forward pass reads.
    """

    state: Any

    @property
    def params(self) -> None:
        """Parameters are in the state, if there are any."""
        return None

    @property
    def optimizer_state(self) -> None:
        """Likewise."""
        return None

    @property
    def model_state(self) -> Any:
        """What a forward pass reads: all of it."""
        return self.state

    @property
    def loss_scale(self) -> None:
        """There is none."""
        return None

    @property
    def trained(self) -> tuple[str, Any]:
        """What is trained, and its name for users."""
        return "state", self.state

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that take memory, by their names for users."""
        return {"state": self.state}
