"""Where a loop goes on: what `model.resume()` returns."""

from __future__ import annotations

import dataclasses

from tailrace.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a loop goes on.

    Attributes:
        step: the steps that were made; 0 if nothing was restored.
        restored: whether there was a checkpoint.
        done: the batches of the epoch that were used; the loader passes over them by itself.
    """

    step: int = 0
    restored: bool = False
    done: int = 0
    known_epoch: int | None = 0

    @property
    def epoch(self) -> int:
        """The epoch to go on with, counted in passes over the loader before it."""
        if self.known_epoch is None:
            raise CheckpointError(
                "The checkpoint has no epoch: the model followed no loader. Make it with the model, "
                "tt.DataLoader(model, dataset, ...), or read another one through "
                "model.batches(loader); or go on from .step."
            )
        return self.known_epoch
