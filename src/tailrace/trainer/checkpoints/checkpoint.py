"""`tr.Checkpoint`: where and how often a fit saves its state, and how many checkpoints it keeps."""

from __future__ import annotations

import dataclasses
import os
import re

from tailrace.base.checks import check_count
from tailrace.base.paths import is_path
from tailrace.errors import OptionError
from tailrace.trainer.observation.monitoring import Monitor


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """How a fit saves its state, so that a killed script can simply be started again.

    Args:
        directory: the directory, created if necessary. One directory belongs to one trainer.
        every: the period: a number of steps, or seconds as `"60s"`; applied at the next end of an
            execution. The start and the end of a fit are always saved.
        keep: the number of most recent checkpoints to keep, in addition to those of the start and the
            end.
        best: also keep the best by this logged value ("val_loss", "accuracy"); None for none.
        mode: "min" or "max", what is best of that value; "auto" knows it of "loss" and "accuracy"
            (after `val_` or a scope). A resumed fit keeps what its checkpoint recorded.

    Raises:
        OptionError: an argument has an invalid value.

    Example:
        >>> import tailrace as tr
        >>> tr.Checkpoint("checkpoints", every="60s", keep=2).seconds
        60.0
    """

    directory: str | os.PathLike[str]
    every: int | str = 1000
    keep: int = 3
    best: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        if not is_path(self.directory):
            raise OptionError(
                f"checkpoint= is a directory or a tr.Checkpoint. Received: {self.directory!r}."
            )
        if self.seconds is None:
            more = " (steps), or a text such as '60s', which is more than 0 seconds"
            every = check_count("every", self.every, at_least=1, error=OptionError, more=more)
            object.__setattr__(self, "every", every)
        keep = check_count("keep", self.keep, at_least=1, error=OptionError)
        object.__setattr__(self, "keep", keep)
        monitor_of(self)  # refused here, before there is a fit

    @property
    def seconds(self) -> float | None:
        """The period in seconds; None if it counts steps."""
        found = (
            re.fullmatch(r"(\d+(?:\.\d+)?)s", self.every) if isinstance(self.every, str) else None
        )
        return float(found[1]) if found and float(found[1]) > 0 else None

    @property
    def steps(self) -> int | None:
        """The period in steps; None if it counts seconds."""
        return self.every if isinstance(self.every, int) else None


def as_checkpoint(given: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    """Parse the value of `fit(checkpoint=)`."""
    return given if isinstance(given, Checkpoint) else Checkpoint(given)


def monitor_of(checkpoint: Checkpoint) -> Monitor | None:
    """What watches the value of `best=`; None without one."""
    best, mode = checkpoint.best, checkpoint.mode
    if best is None:
        if mode != "auto":
            raise OptionError(
                f"mode= of tr.Checkpoint says what is best of the value of best=. Received: "
                f"mode={mode!r} without best=. Give best= too, or leave mode= out."
            )
        return None
    try:
        return Monitor(best, mode)
    except OptionError as error:
        raise OptionError(f"best= of tr.Checkpoint: {error}") from None
