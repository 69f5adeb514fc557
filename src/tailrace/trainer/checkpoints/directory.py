"""The directory of a fit's checkpoints: its contents, their lifetime, and its lock.

    directory/
      lock
      fit-0/step-0  fit-0/step-2000  fit-0/step-3000  fit-0/step-3100-end
      fit-1/step-4000  ...

The fits of a script are numbered. Names identify checkpoints, so that selecting and removing reads no
files: `-end` is the end of a fit, `-best` was the best when it was written.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.errors import CheckpointError, RunError
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.lock import DirectoryLock
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.snapshot import Snapshot

_NAME = re.compile(r"step-(\d{1,18})(-end|-best)?")
_FIT = re.compile(r"fit-(\d{1,9})")


@dataclasses.dataclass(frozen=True, order=True)
class Kept:
    """An existing checkpoint."""

    fit: int
    step: int
    ended: bool
    path: Path = dataclasses.field(compare=False)
    best: bool = dataclasses.field(compare=False, default=False)


class CheckpointDirectory:
    """The checkpoints in a directory.

    Args:
        directory: the directory.
        keep: the number of latest checkpoints of a fit to keep, in addition to its start, end and best.
    """

    def __init__(self, directory: Any, keep: int = 3) -> None:
        self.directory, self._keep = Path(directory).absolute(), keep

    def found(self, fit: int | None = None) -> list[Kept]:
        """All checkpoints, or those of one fit, oldest first."""
        kept: list[Kept] = []
        if not self.directory.is_dir():
            return kept
        for folder in self.directory.iterdir():
            number = _FIT.fullmatch(folder.name)
            if not number or folder.is_symlink() or not folder.is_dir():
                continue
            if fit is not None and int(number[1]) != fit:
                continue
            for path in folder.iterdir():
                name = _NAME.fullmatch(path.name)
                if name and path.is_dir() and not path.is_symlink():
                    end, best = name[2] == "-end", name[2] == "-best"
                    kept.append(Kept(int(number[1]), int(name[1]), end, path, best))
        return sorted(kept)

    def newest(self, fit: int | None = None) -> Kept | None:
        """The latest checkpoint, of all or of one fit."""
        return max(self.found(fit), default=None)

    def write(
        self, fit: int, step: int, snapshot: Snapshot, *, ended: bool = False, best: bool = False
    ) -> None:
        """Write a checkpoint, then remove superseded ones."""
        ending = "-end" if ended else "-best" if best else ""
        path = self.directory / f"fit-{fit}" / f"step-{step}{ending}"
        if path.exists():
            if not ended:
                return  # the same step, and so the same state
            orbax_files.remove(path)
        note = snapshot.whole_note()
        orbax_files.write(path, snapshot.on_host(), note)
        for one in superseded(self.found(fit), self._keep):
            orbax_files.remove(one.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the directory; refuses a second process."""
        check_no_file("checkpoint= is a directory", self.directory)
        with orbax_files.sentence(self.directory, "cannot be written"):
            self.directory.mkdir(parents=True, exist_ok=True)
        held = HeldDirectory(self.directory)
        lock = DirectoryLock(held)
        try:
            held.hold()
            lock.acquire()
        except RunError:
            held.release()
            raise CheckpointError(
                f"A checkpoint directory belongs to one trainer at a time, and "
                f"{str(self.directory)!r} is in use. Give this one another directory, or wait until "
                f"that fit has ended."
            ) from None
        try:
            for partial in self.directory.glob(f"fit-*/*{orbax_files.UNFINISHED}*"):
                shutil.rmtree(partial, ignore_errors=True)  # a writer was killed
            yield
        finally:
            lock.release()
            held.release()


def check_no_file(rule: str, directory: Path) -> None:
    """Refuse a path of a directory that is, or goes through, a file."""
    there = next((one for one in (directory, *directory.parents) if one.exists()), directory)
    if there.exists() and not there.is_dir():
        raise CheckpointError(
            f"{rule}, and {str(there)!r} is a file. Received: {str(directory)!r}. Give another path."
        )


def superseded(kept: list[Kept], keep: int) -> list[Kept]:
    """The checkpoints of a fit to remove: all except the first, the last ones, end and best.

    >>> steps = [Kept(0, step, False, Path()) for step in (0, 10, 20, 30)]
    >>> [one.step for one in superseded(steps, keep=2)]
    [10]
    """
    bests = [one for one in kept if one.best]
    ends = [one for one in kept if one.ended]
    plain = [one for one in kept if not one.ended and not one.best]
    stays = {*kept[:1], *bests[-1:], *ends[-1:], *plain[-keep:]}
    return [one for one in kept if one not in stays]
