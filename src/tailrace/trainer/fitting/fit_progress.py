"""The progress of a fit, and its requested duration."""

from __future__ import annotations

import dataclasses

from tailrace.base.array_like import TensorLike
from tailrace.base.checks import check_count
from tailrace.data.dataset import Dataset
from tailrace.data.no_data import NO_DATA
from tailrace.errors import DataError, OptionError


@dataclasses.dataclass(frozen=True)
class Duration:
    """The requested duration: a number of steps, or of epochs."""

    steps: int | None = None
    epochs: int | None = None

    @classmethod
    def of(cls, steps: TensorLike, epochs: object) -> Duration:
        """`steps` or `epochs`, not both, and neither negative; one epoch if neither is given."""
        # `fit(x, y)` is a habit from other libraries: the labels would be taken for the number of
        # steps.
        if getattr(steps, "ndim", 0):
            raise OptionError(
                f"fit takes one dataset, then steps=, a whole number. Received: steps="
                f"{steps.dtype}{list(steps.shape)}. Inputs and labels are one dataset: "
                f"fit(tr.batches((x, y), batch_size), epochs=...)."
            )
        if steps is not None and epochs is not None:
            raise OptionError(
                f"fit takes steps= or epochs=, not both. Received: steps={steps}, epochs={epochs}."
            )
        if steps is not None:
            return cls(check_count("steps", steps, at_least=0, error=OptionError))
        epochs = 1 if epochs is None else epochs
        return cls(None, check_count("epochs", epochs, at_least=0, error=OptionError))

    def check_ends(self, source: Dataset) -> None:
        """Refuse epochs of a dataset that repeats without end."""
        if self.steps is None and source is NO_DATA:
            raise OptionError(
                f"fit(None) trains without data, which has no epochs, for a number of steps. Received: "
                f"{self}. Use fit(None, steps=...), or give a dataset."
            )
        if self.steps is None and source.endless:
            raise DataError(
                f"fit by epochs goes on until the dataset ends, but {source.name} repeats without "
                f"end. Use fit(steps=...), or a dataset that does not repeat."
            )

    def __str__(self) -> str:
        return f"steps={self.steps}" if self.epochs is None else f"epochs={self.epochs}"


@dataclasses.dataclass
class Progress:
    """The counts of one fit.

    Attributes:
        first_step: the trainer's step when it began.
        first_epoch: the trainer's count of epochs when it began.
        steps: the steps done so far.
        elements: the elements of this process consumed so far.
        epochs: the epochs completed so far.
        epoch_start: the number of steps done when the current epoch began.
        closed_at: the number of steps done when an epoch was last closed, with its validation and
            callbacks: a fit that resumes there does not close it twice. -1 before.
        stopped: whether `trainer.stop()` was called: a fit that resumes after that only ends.
    """

    first_step: int
    first_epoch: int
    steps: int = 0
    elements: int = 0
    epochs: int = 0
    epoch_start: int = 0
    closed_at: int = -1
    stopped: bool = False

    @property
    def epoch(self) -> int:
        """The index of the current epoch, over all fits of the trainer."""
        return self.first_epoch + self.epochs

    def reached(self, duration: Duration) -> bool:
        """Whether `duration` is reached."""
        if duration.steps is not None:
            return self.steps >= duration.steps
        return self.epochs >= (duration.epochs or 0)

    def passed(self, duration: Duration) -> bool:
        """Whether more than `duration` is done."""
        if duration.steps is not None:
            return self.steps > duration.steps
        # A pass that was begun counts: a shorter fit would not have begun it.
        beyond = self.steps > self.epoch_start
        return self.epochs + beyond > (duration.epochs or 0)
