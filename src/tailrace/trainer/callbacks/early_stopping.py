"""Stopping when a value no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tailrace.base.checks import check_count, check_flag
from tailrace.errors import OptionError
from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.observation.monitoring import Monitor
from tailrace.trainer.random_keys import as_keys, as_numbers, generator_of, is_key

if TYPE_CHECKING:
    from tailrace.records.history import History
    from tailrace.trainer.trainer import Trainer


class EarlyStopping(Callback):
    """Ends a fit when a value has not improved for some time.

    A validation value (`val_...`) is checked after each validation, any other after each epoch. A value
    that the fit does not have is refused before it trains, or after its first execution.

    Args:
        monitor: the name of a logged value: "loss", "val_loss", "val_accuracy", ...
        patience: the number of checks in a row without improvement after which to stop; 0 means 1, as
            in Keras.
        mode: "min", "max", or "auto": less of a "loss" and more of an "accuracy" is better (after
            `val_` or a scope). Any other name needs "min" or "max".
        min_delta: the smallest change that counts as an improvement.
        restore_best: whether to restore the whole state (parameters, optimizer state, model state,
            step) of the best check at the end of the fit.

    Attributes:
        watched: the value, and what counts as better.
        best: the best value so far.
        best_step: the step it belongs to.

    Raises:
        OptionError: an argument has an invalid value, or a fit does not have the value.

    Example:
        >>> import numpy as np, optax, tailrace as tr
        >>> data = tr.batches(np.ones(32, np.float32), 8)
        >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
        >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.5), np.float32(0))
        >>> stopping = tr.callbacks.EarlyStopping("loss", patience=2)
        >>> history = trainer.fit(data, epochs=100, callbacks=[stopping], progress=False)
        >>> trainer.step < 400, stopping.best
        (True, 0.0)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        mode: str = "auto",
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        patience = check_count("patience", patience, at_least=0, error=OptionError)
        self.watched = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.restore_best = check_flag("restore_best", restore_best, error=OptionError)
        self.best_step = 0
        self._waited = 0
        self._kept: list[np.ndarray] | None = None

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first check."""
        return self.watched.best

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Start over, unless a fit is resumed."""
        # A resumed fit sets them after this, by `set_state`.
        self.watched.begin()
        self._waited, self._kept = 0, None

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """Check a validation value."""
        if self.watched.is_of_validation:
            self._look(trainer, logs)

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: dict[str, float]) -> None:
        """Check a value of an epoch."""
        # Not a value of validations: an epoch may be shorter than the time between two of them.
        if not self.watched.is_of_validation:
            self._look(trainer, logs)

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Restore the best state, if requested."""
        if self._kept is not None:
            leaves, structure = jax.tree.flatten(trainer.engine.state)
            best = [_like(now, kept) for now, kept in zip(leaves, self._kept, strict=True)]
            trainer.engine.state = jax.tree.unflatten(structure, best)
            # Random keys are folded from the step: the state and its step belong together.
            trainer.engine.step = self.best_step

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        kept = {f"kept/{i}": leaf for i, leaf in enumerate(self._kept or ())}
        numbers = {"best": self.best, "best_step": self.best_step, "waited": self._waited}
        return {**numbers, "watched": self.watched.recorded(), **kept}

    def set_state(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        # Checkpoints of earlier versions do not say what was watched.
        then, best = state.get("watched"), state["best"]
        if not self.watched.take_up(then, best, "monitor= of EarlyStopping"):
            return
        self.best_step, self._waited = state["best_step"], state["waited"]
        kept = [state[f"kept/{i}"] for i in range(sum(k.startswith("kept/") for k in state))]
        self._kept = kept or None

    def _look(self, trainer: Trainer, logs: dict[str, float]) -> None:
        if self.watched.improves(logs):
            self._waited, self.best_step = 0, trainer.step
            if self.restore_best:
                # On the host: a device that is full with one state has no room for a second.
                self._kept = [
                    np.asarray(as_numbers(leaf)) for leaf in jax.tree.leaves(trainer.state)
                ]
            return
        self._waited += 1
        if self._waited >= max(1, self.patience):
            trainer.stop()


def _like(leaf: jax.Array, values: np.ndarray) -> jax.Array | np.ndarray:
    """Values that were kept on the host, as a leaf again."""
    return as_keys(values, generator_of(leaf)) if is_key(leaf) else values
