"""The directory of a training's checkpoints, held while its model lives.

Nobody says when the user's loop has ended. The directory is given back when the model is destroyed or
garbage, and at the latest when the process exits.
"""

from __future__ import annotations

import contextlib
import os

from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError
from tailrace.torch.programs.open_run import closed_at_exit, is_closed
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.writer import CheckpointWriter


class HeldWriter:
    """Writes checkpoints, and holds their directory. Refers to nothing of the model, whose end it must
    not put off.

    Args:
        checkpoint: the directory and the period.

    Attributes:
        writer: writes checkpoints.
        directory: where they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.writer = CheckpointWriter(checkpoint, 0)
        self.directory = self.writer.directory
        self._open: contextlib.ExitStack | None = None
        self._process = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether the directory is held."""
        return self._open is not None

    def open(self) -> bool:
        """Hold the lock of the directory; returns whether it was not held before."""
        if self._open is not None:
            return False
        if distributed.process_count() > 1:
            raise CheckpointError(
                f"Checkpoints of PyTorch models are for training in one process; this one has "
                f"{distributed.process_count()}. tr.Trainer keeps them in several."
            )
        orbax_files.import_orbax()
        opened = contextlib.ExitStack()
        opened.enter_context(self.directory.writing())
        opened.callback(self.writer.close)
        # The directory belongs to this process, and not to one that is forked from it.
        self._open, self._process = opened, os.getpid()
        closed_at_exit(self)
        return True

    def close(self) -> None:
        """Give the directory back, once the checkpoint that is being written is complete."""
        opened, self._open = self._open, None
        is_closed(self)
        if opened is not None and self._process == os.getpid():
            opened.close()
