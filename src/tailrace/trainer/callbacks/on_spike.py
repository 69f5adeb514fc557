"""`tr.on_spike`: detects a step whose loss is far above the previous ones."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.base.checks import check_count, check_number
from tailrace.base.messages import logger
from tailrace.errors import OptionError
from tailrace.records.scores import moving_scores
from tailrace.trainer.callbacks.callback import Callback, Execution

if TYPE_CHECKING:
    from tailrace.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Spike:
    """A step with an outlying loss.

    Attributes:
        step: its index.
        loss: its loss.
        score: the distance to the median of the previous steps, in robust standard deviations.
    """

    step: int
    loss: float
    score: float

    def __str__(self) -> str:
        far = f"{self.score:.1f} deviations above the median"
        how = far if np.isfinite(self.loss) else "not finite"
        return f"step {self.step}: loss {self.loss:.5g}, {how}"


class OnSpike(Callback):
    """Watches the loss; made by `tr.on_spike`.

    Attributes:
        spikes: all spikes so far, oldest first.
    """

    def __init__(
        self,
        then: str | Callable[[Any, Spike], Any] = "note",
        *,
        score: float = 8.0,
        window: int = 100,
        least: int = 20,
    ) -> None:
        if then not in ("note", "stop") and not callable(then):
            raise OptionError(
                f"on_spike does 'note', 'stop', or calls a function of trainer and spike. Received: "
                f"{then!r}."
            )
        self._then = then
        self._score = check_number("score", score, positive=True, error=OptionError)
        self._least = check_count("least", least, at_least=1, error=OptionError)
        window = check_count("window", window, at_least=1, error=OptionError)
        if least > window:
            raise OptionError(
                f"least is at most window: with fewer steps than least, no spike is detected. "
                f"Received: least={least}, window={window}."
            )
        self._window: deque[float] = deque(maxlen=window)
        self.spikes: list[Spike] = []

    def on_execution_end(self, trainer: Trainer, execution: Execution) -> None:
        """Look at the loss of each step."""
        # On the host: losses come to it anyway, and it is idle while the next execution runs.
        if "loss" not in execution.values:
            raise OptionError(
                f"tr.on_spike watches the loss. Received: a step of your own with the metrics "
                f"{', '.join(map(repr, execution.values))}. Call the one to watch 'loss'."
            )
        losses = [float(loss) for loss in execution.values["loss"]]
        most = self._window.maxlen or len(self._window)
        scores = moving_scores(losses, self._window, most, self._least)
        # NaN and Inf need no comparison, so they need no previous steps either. Those that follow one
        # are its consequence: a diverged fit has one spike, not one in each step.
        bad = ~np.isfinite([*list(self._window)[-1:], *losses])
        bad, after = bad[-len(losses) :], np.append(False, bad)[-len(losses) - 1 : -1]
        scores[bad] = np.where(after[bad], 0.0, np.inf)
        # Spikes too: scores are by medians, which one outlier does not move.
        self._window.extend(losses)
        for number in np.flatnonzero(scores > self._score):
            step, loss = execution.first_step + int(number), losses[number]
            self._act(trainer, Spike(step, loss, float(scores[number])))

    def _act(self, trainer: Trainer, spike: Spike) -> None:
        self.spikes.append(spike)
        if callable(self._then):
            self._then(trainer, spike)
            return
        logger.warning("A spike of the loss in %s. trainer.explain_step shows its rows.", spike)
        if self._then == "stop":
            trainer.stop()

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        # The window as well: a resumed fit judges its first steps as the fit would have.
        return {
            "window": list(self._window),
            "spikes": [dataclasses.asdict(spike) for spike in self.spikes],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._window.clear()
        self._window.extend(state["window"])
        self.spikes = [Spike(**spike) for spike in state["spikes"]]


def on_spike(
    then: str | Callable[[Any, Spike], Any] = "note",
    *,
    score: float = 8.0,
    window: int = 100,
    least: int = 20,
) -> OnSpike:
    """A callback that detects steps whose loss is far above the previous ones.

    The score is the distance to the median of the previous steps, divided by the median of their
    distances to it, so that one spike does not hide the next. A loss that is not finite is a spike, in
    any step; further ones directly after it are not reported.

    Args:
        then: "note" logs it, "stop" ends the fit after that execution, and a function is called with
            the trainer and the `Spike`.
        score: the smallest score of a spike.
        window: the number of previous steps to compare with.
        least: the fewest previous steps for a decision; at most `window`.

    Raises:
        OptionError: an argument has an invalid value.

    >>> import tailrace as tr
    >>> watch = tr.on_spike("stop", score=6.0)  # trainer.fit(..., callbacks=[watch])
    >>> watch.spikes
    []
    """
    return OnSpike(then, score=score, window=window, least=least)
