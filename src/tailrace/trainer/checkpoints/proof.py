"""What proves that a checkpoint is damaged, and what is said where nothing does.

Memory that is short, a disk that answers with an error, another version of Orbax: these say nothing of
the files. A checkpoint that cannot be read for such a reason stays as it is, and so does the fit: it
ends with a sentence, and the next start continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tailrace.base.paths import remedy
from tailrace.errors import CheckpointError, TailraceError
from tailrace.trainer.checkpoints.file_list import damage_in

Read = TypeVar("Read")


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, or are not what was written: that is proved."""


class NotAsWritten(Exception):
    """What was read, to its end, is not what was written; proof once it is found a second time."""


def judged(path: Path, look: Callable[[], Read]) -> Read:
    """What `look` reads of a checkpoint.

    Args:
        path: the checkpoint.
        look: reads it; raises `NotAsWritten`, or any other exception.

    Raises:
        DamagedCheckpoint: it is proved that files are not what was written.
        CheckpointError: it cannot be read, and nothing proves that it is damaged.
    """
    try:
        return look()
    except TailraceError:
        raise
    except Exception as error:
        first = error
    # Everything is looked at twice: wrong bytes that come once are the memory's, or the network's.
    with sentence(path, "cannot be read", reading=True):
        if isinstance(first, NotAsWritten):
            try:
                return look()
            except NotAsWritten as again:
                if str(again) == str(first):
                    raise DamagedCheckpoint(_damaged(path, str(first))) from first
        damage = damage_in(path, every_byte=True)
        if damage and damage_in(path, every_byte=True) == damage:
            raise DamagedCheckpoint(_damaged(path, damage)) from first
        raise first


def _damaged(path: Path, damage: str) -> str:
    return f"The checkpoint {str(path)!r} is damaged: {damage}."


@contextlib.contextmanager
def sentence(path: Path, what: str, *, reading: bool = False) -> Iterator[None]:
    """Turn any error of the file system or Orbax into one sentence."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())  # those of Orbax have many lines
        advice = remedy(error, reading=reading)
        if isinstance(error, MemoryError):
            advice = "Free memory: another process, or a smaller dataset."
        if reading:
            advice += (
                " Nothing proves that it is damaged, so nothing was changed: try again, look at it "
                "with `tailrace fsck`, or move it away to use the one before it."
            )
        raise CheckpointError(
            f"The checkpoint {str(path)!r} {what}: {type(error).__name__}: "
            f"{text[:500].rstrip('.')}. {advice.strip()}".rstrip()
        ) from error
