"""The directory of a fit's checkpoints: its contents, their lifetime, and its lock.

    directory/
      lock
      fit-0/step-0  fit-0/step-2000  fit-0/step-3000  fit-0/step-3100-end
      fit-1/step-4000  ...

The fits of a script are numbered. Names identify checkpoints, so that selecting and removing reads no
files: `-end` is the end of a fit (earlier ones are from before it was continued), `-best` was the best
when it was written, `.damaged` was set aside because it could not be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tailrace.data.paths import file_in_the_way
from tailrace.errors import CheckpointError, RunError
from tailrace.messages import logger
from tailrace.runs.info import RUN_FILE, read_info
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.lock import DirectoryLock, DirectoryTaken
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.snapshot import Snapshot

# Digits are limited: names on a disk may be anything, and `int` refuses very long ones.
_NAME = re.compile(r"step-(\d{1,18})(-end|-best)?")
_FIT = re.compile(r"fit-(\d{1,9})")

DAMAGED = ".damaged"
"""The suffix of a checkpoint that could not be read."""


# Sorted by fit and step; of one step, the end of the fit comes last, because it is the newest.
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

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        self.directory, self._keep = Path(directory).absolute(), keep
        self._held = HeldDirectory(
            self.directory, "checkpoint directory", "checkpoint=", CheckpointError
        )
        self._lock = DirectoryLock(self._held)

    def check_same(self, here: Mapping[str, tuple[object, object]]) -> None:
        """Refuse a checkpoint of another training: each value now, and what its note holds."""
        for what, (now, then) in here.items():
            if now != then:
                raise CheckpointError(
                    f"The checkpoint directory {str(self.directory)!r} belongs to another training: "
                    f"{what}: {then!r} there, {now!r} here. Use what it was saved with, or another "
                    f"directory."
                )

    def found(self, fit: int | None = None) -> list[Kept]:
        """All checkpoints, or those of one fit, oldest first."""
        with orbax_files.sentence(self.directory, "cannot be looked at"):
            return sorted(self._found(fit))

    def _found(self, fit: int | None) -> list[Kept]:
        kept: list[Kept] = []
        for number, folder in self._fits():
            if fit is not None and number != fit:
                continue
            for path in folder.iterdir():
                # What was set aside, or is unfinished, has another name and is passed over.
                name = _NAME.fullmatch(path.name)
                if name and path.is_dir() and not path.is_symlink():
                    end, best = name[2] == "-end", name[2] == "-best"
                    kept.append(Kept(number, int(name[1]), end, path, best))
        return kept

    def _fits(self) -> Iterator[tuple[int, Path]]:
        """The folders of fits, by number; links do not count."""
        if os.path.isdir(self.directory):
            for folder in self.directory.iterdir():
                number = _FIT.fullmatch(folder.name)
                # Links are not followed: what is found may be removed, and that must not reach outside.
                if number and folder.is_dir() and not folder.is_symlink():
                    yield int(number[1]), folder

    def newest(self, fit: int | None = None) -> Kept | None:
        """The latest checkpoint, of all or of one fit."""
        return max(self.found(fit), default=None)

    def read_newest(self, fit: int) -> tuple[Kept, dict[str, Any], dict[str, Any]] | None:
        """The latest checkpoint of a fit that is whole, its arrays and its note; None without any.

        Damaged ones after it are set aside, with a warning: the steps since are trained again, with the
        same result. Only while the directory is held.
        """
        # The first error found, of the newest checkpoint, is the one to report if none can be read.
        kept, first = self.found(fit), None
        while kept:
            newest = kept.pop()
            try:
                return newest, *orbax_files.read(newest.path)
            except orbax_files.DamagedCheckpoint as error:
                first = first or error
                self._set_aside(newest, kept, error)
        if first is not None:
            raise first
        return None

    def _set_aside(self, damaged: Kept, earlier: list[Kept], error: CheckpointError) -> None:
        """Rename a damaged checkpoint, or raise its error if there is none to use instead."""
        later = sorted({one.fit for one in self.found() if one.fit > damaged.fit})
        if later:
            # Their checkpoints, and the rows of a run directory, follow the end of this fit as it was.
            raise CheckpointError(
                f"{error} It belongs to a fit that later fits continued from (fit-{later[0]}). Put a "
                f"copy of it back; or remove it, fit-{later[0]} and later ones, to train from the "
                f"checkpoint before it."
            ) from error
        if not earlier:
            raise CheckpointError(
                f"{error} There is no other one of this fit. Put a copy of it back, or give another "
                f"directory to train from the start."
            ) from error
        aside = damaged.path.with_name(damaged.path.name + DAMAGED)
        # Left by an earlier attempt at the same step.
        shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(damaged.path, aside)
        except OSError:
            raise error from None
        logger.warning(
            "%s It was renamed to %r, and the fit goes on from %r: the steps since are trained again.",
            error,
            aside.name,
            earlier[-1].path.name,
        )

    def write(
        self, fit: int, step: int, snapshot: Snapshot, *, ended: bool = False, best: bool = False
    ) -> None:
        """Write a checkpoint, then remove superseded ones. Only while the directory is held."""
        with self._safely():
            self._held.check()
            self._lock.check()
            self._held.make_folder(f"fit-{fit}")
        ending = "-end" if ended else "-best" if best else ""
        path = self.directory / f"fit-{fit}" / f"step-{step}{ending}"
        # A resumed fit trains some steps again, and meets checkpoints that it wrote before.
        if path.exists():
            if not ended:
                return  # the same step, and so the same state
            orbax_files.remove(path)
        note = snapshot.whole_note()
        orbax_files.write(path, snapshot.on_host(), note)
        # After the new one is complete: at no moment are there fewer checkpoints than `keep`.
        for one in superseded(self.found(fit), self._keep):
            orbax_files.remove(one.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the directory; refuses a second process."""
        check_no_file("checkpoint= is a directory", self.directory)
        with self._safely():
            self.directory.mkdir(parents=True, exist_ok=True)
        try:
            try:
                with self._safely():
                    self._held.hold()
                    self._lock.acquire()
            except DirectoryTaken:
                raise CheckpointError(
                    f"A checkpoint directory belongs to one trainer at a time, and "
                    f"{str(self.directory)!r} is in use. Give this one another directory, or wait "
                    f"until that fit has ended."
                ) from None
            # Under the lock: nobody else is writing, so what is unfinished will never be finished.
            with self._safely():
                for _, folder in self._fits():
                    for partial in folder.glob(f"*{orbax_files.UNFINISHED}*"):
                        self._held.remove(f"{folder.name}/{partial.name}")
            yield
        finally:
            self._lock.release()
            self._held.release()

    def _safely(self) -> AbstractContextManager[None]:
        return orbax_files.sentence(self.directory, "cannot be written")


def check_no_file(rule: str, directory: Path) -> None:
    """Refuse a path of a directory that is, or goes through, a file."""
    there = file_in_the_way(directory)
    if there is not None:
        raise CheckpointError(
            f"{rule}, and {str(there)!r} is a file. Received: {str(directory)!r}. Give another path."
        )


def described(where: Path) -> str:
    """What is at a path that has no checkpoint, and for a run directory, where its checkpoints are."""
    if not os.path.isdir(where):
        return "a file" if os.path.exists(where) else "nothing"
    if os.path.exists(where / RUN_FILE):
        named = None
        with contextlib.suppress(RunError):
            named = read_info(where).get("checkpoint")
        hint = f"This run's checkpoints are in {named!r}" if named else "It has none of them"
        return f"a run directory: records, not the state of a trainer. {hint}"
    return "a directory without a checkpoint" if any(where.iterdir()) else "an empty directory"


def superseded(kept: list[Kept], keep: int) -> list[Kept]:
    """The checkpoints of a fit to remove: all except the first, the last ones, end and best.

    >>> steps = [Kept(0, step, False, Path()) for step in (0, 10, 20, 30)]
    >>> [one.step for one in superseded(steps, keep=2)]
    [10]
    >>> ends = [Kept(0, step, True, Path()) for step in (15, 40)]  # continued after 15 steps
    >>> [one.step for one in superseded(sorted(steps + ends), keep=3)]
    [10]
    """
    bests = [one for one in kept if one.best]
    end = [one for one in kept if one.ended][-1:]
    # The end of a fit that was continued is one of its middle: replays of the steps after it start
    # there.
    plain = [one for one in kept if one not in end and not one.best]
    # The first one stays for replays: it is the state before step 0.
    stays = {*kept[:1], *bests[-1:], *end, *plain[-keep:]}
    return [one for one in kept if one not in stays]
