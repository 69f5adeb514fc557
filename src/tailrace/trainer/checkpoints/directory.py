"""The directory of a fit's checkpoints: its contents, their lifetime, and its lock.

    directory/
      lock
      fit-0/step-0  fit-0/step-2000  fit-0/step-3000  fit-0/step-3100-end
      fit-1/step-4000  ...

The fits of a script are numbered. Names identify checkpoints, so that selecting and removing reads no
files: `-end` is the end of a fit (earlier ones are from before it was continued), `-best` was the best
when it was written, `.damaged` (`.damaged-2`, ...) was set aside because its damage is proved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tailrace.base.messages import listed, logger
from tailrace.base.paths import file_in_the_way
from tailrace.errors import CheckpointError, RunError
from tailrace.runs.info import RUN_FILE, read_info
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.storage.lock import DirectoryLock, DirectoryTaken
from tailrace.trainer.checkpoints import orbax_files
from tailrace.trainer.checkpoints.snapshot import Snapshot

# Digits are limited: names on a disk may be anything, and `int` refuses very long ones.
_NAME = re.compile(r"step-(\d{1,18})(-end|-best)?")
_FIT = re.compile(r"fit-(\d{1,9})")

_NONE_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What says that there is no such directory; any other error says nothing of it."""

DAMAGED = ".damaged"
"""The suffix of a checkpoint that was set aside; nothing here removes it."""
_ASIDE = re.compile(rf"step-(\d{{1,18}})(-end|-best)?{re.escape(DAMAGED)}.*")


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
        self._writer: Future[Any] | None = None

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
            for path in _folders(folder):
                # What was set aside, or is unfinished, has another name and is passed over.
                if name := _NAME.fullmatch(path.name):
                    end, best = name[2] == "-end", name[2] == "-best"
                    kept.append(Kept(number, int(name[1]), end, path, best))
        return kept

    def set_aside(self, fit: int | None = None) -> list[tuple[int, Path]]:
        """The checkpoints that were set aside as damaged, by step."""
        with orbax_files.sentence(self.directory, "cannot be looked at"):
            return sorted(
                (int(name[1]), path)
                for number, folder in self._fits()
                if fit in (None, number)
                for path in _folders(folder)
                if (name := _ASIDE.fullmatch(path.name))
            )

    def _fits(self) -> Iterator[tuple[int, Path]]:
        """The folders of fits, by number."""
        for folder in _folders(self.directory):
            if number := _FIT.fullmatch(folder.name):
                yield int(number[1]), folder

    def newest(self, fit: int | None = None) -> Kept | None:
        """The latest checkpoint, of all or of one fit."""
        return max(self.found(fit), default=None)

    def read_newest(self, fit: int) -> tuple[Kept, dict[str, Any], dict[str, Any]] | None:
        """The latest checkpoint of a fit that is whole, its arrays and its note; None without any.

        Those after it that are proved to be damaged are set aside, with a warning: the steps since are
        trained again, with the same result. Only while the directory is held.
        """
        kept, aside = self.found(fit), self.set_aside(fit)
        if not kept and aside:
            raise CheckpointError(
                f"The checkpoint directory {str(self.directory)!r} has no checkpoint of this fit any "
                f"more, only what was set aside as damaged: {_names(aside)}. See what `tailrace fsck` "
                f"says of it: rename a checkpoint that is whole, or put a copy of one there. To train "
                f"from the start, give another directory."
            )
        while kept:
            newest = kept.pop()
            try:
                read = orbax_files.read(newest.path)
            except orbax_files.DamagedCheckpoint as error:
                self._set_aside(newest, kept, error)
                continue
            # At each start: whoever starts the script again has not seen the first warning.
            if lost := [one for one in aside if one[0] > newest.step]:
                logger.warning(
                    "The fit goes on from %r of %r. Later checkpoints were set aside as damaged (%s): "
                    "`tailrace fsck` says what is left of them.",
                    newest.path.name,
                    str(self.directory),
                    _names(lost),
                )
            return newest, *read
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
        aside = _unused(damaged.path.with_name(damaged.path.name + DAMAGED))
        with self._safely():
            os.rename(damaged.path, aside)
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
        ending = "-end" if ended else "-best" if best else ""
        path = self.directory / f"fit-{fit}" / f"step-{step}{ending}"
        with self._safely():
            self._held.check()
            self._lock.check()
            self._held.make_folder(f"fit-{fit}")
            # A resumed fit trains some steps again, and meets checkpoints that it wrote before: of the
            # same step, and so of the same state, unless it has ended there.
            if not ended and os.path.lexists(path):
                return
            note, arrays = snapshot.whole_note(), snapshot.on_host()
        orbax_files.write(path, arrays, note, replace=ended)
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
                    for name in os.listdir(folder):
                        if orbax_files.UNFINISHED in name:
                            self._held.remove(f"{folder.name}/{name}")
            yield
        finally:
            if self._writer is None or self._writer.done():
                self._release()
            else:
                # As long as a thread writes, no other trainer may: the wait for it was interrupted.
                self._writer.add_done_callback(lambda _: self._release())

    def written_by(self, writer: Future[Any]) -> None:
        """Keep the directory locked until a thread has ended its write, whatever happens meanwhile."""
        self._writer = writer

    def _release(self) -> None:
        self._lock.release()
        self._held.release()

    def _safely(self) -> AbstractContextManager[None]:
        return orbax_files.sentence(self.directory, "cannot be written")


def _folders(directory: Path) -> list[Path]:
    """The folders in a directory; none if it does not exist.

    Links are not followed: what is found may be removed, and that must not reach outside.
    """
    # Not `is_dir` of a path, which may say False where the disk does not answer: a fit would start
    # from 0.
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if error.errno not in _NONE_THERE:
            raise
        return []


def _unused(path: Path) -> Path:
    """A path that nothing has: what was set aside before stays."""
    names = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    return next(one for one in itertools.chain([path], names) if not os.path.lexists(one))


def _names(aside: list[tuple[int, Path]]) -> str:
    return listed([f"{path.parent.name}/{path.name}" for _, path in aside], 4)


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
