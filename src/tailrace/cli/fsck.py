"""`tailrace fsck DIR`: what a directory holds, and what of it is proved whole."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from tailrace.cli.parsers import Subparsers
from tailrace.errors import CheckpointError, RunError

WHOLE, DAMAGED, UNKNOWN = "whole", "damaged", "unknown"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is proved of a checkpoint or a run: `whole`, `damaged` or `unknown`, and why."""

    name: str
    kind: str
    why: str = ""


def fsck(subparsers: Subparsers) -> None:
    """`tailrace fsck DIR`: what a directory holds, and what of it is proved whole."""
    parser = subparsers.add_parser(
        "fsck",
        help="say what a directory of checkpoints holds, and what of it is proved whole",
        description="Read every file of a directory of checkpoints, of one checkpoint, or of a run, "
        "and compare it with the checksums that were written with it. Changes nothing. The exit code "
        "is 0 if all of it is whole, 1 if something is damaged, or cannot be read.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="the directory of fit(checkpoint=...), one checkpoint in it, a directory of "
        "trainer.save, or a run directory",
    )
    parser.set_defaults(run=_run_fsck)


def _run_fsck(arguments: argparse.Namespace) -> int:
    from tailrace.runs.storage.lock import is_locked

    where = Path(arguments.directory)
    if is_locked(where):
        print("A training writes there now: what it has not finished yet is not looked at.")
    counts: collections.Counter[str] = collections.Counter()
    for found in _verdicts(where):
        counts[found.kind] += 1
        print(f"{found.kind:8} {found.name}{f': {found.why}' if found.why else ''}", flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in (WHOLE, DAMAGED, UNKNOWN)))
    return 0 if set(counts) == {WHOLE} else 1


def _verdicts(where: Path) -> Iterator[Verdict]:
    from tailrace.runs.info import RUN_FILE
    from tailrace.trainer.checkpoints.directory import CheckpointDirectory, described
    from tailrace.trainer.checkpoints.orbax_files import is_checkpoint

    directory = CheckpointDirectory(where)
    kept, aside = directory.found(), directory.set_aside()
    if kept or aside:
        for one in kept:
            yield _verdict(one.path, f"{one.path.parent.name}/{one.path.name}")
        for _, path in aside:
            yield _of_set_aside(path)
    elif is_checkpoint(where):
        yield _verdict(where, where.name)
    elif os.path.isfile(where / RUN_FILE):
        yield _of_run(where)
    else:
        raise CheckpointError(
            f"fsck looks at what fit(checkpoint=...), trainer.save or run_dir= wrote, and "
            f"{str(where)!r} is {described(where)}."
        )


def _verdict(path: Path, name: str) -> Verdict:
    from tailrace.trainer.checkpoints.file_list import foreign_files
    from tailrace.trainer.checkpoints.orbax_files import DamagedCheckpoint, check, sentence

    try:
        said = check(path)
        with sentence(path, "cannot be read", reading=True):
            foreign = foreign_files(path)
    except DamagedCheckpoint as error:
        return Verdict(name, DAMAGED, str(error))
    except CheckpointError as error:
        return Verdict(name, UNKNOWN, str(error))
    if foreign:
        return Verdict(name, UNKNOWN, f"{foreign[0]!r} was not written with it; the rest is whole")
    return Verdict(name, WHOLE, said)


def _of_set_aside(path: Path) -> Verdict:
    found = _verdict(path, f"{path.parent.name}/{path.name}")
    if found.kind != WHOLE:
        return found
    # By an earlier version, for which any error was damage; or it was repaired.
    name = path.name.partition(".damaged")[0]
    return dataclasses.replace(
        found, why=f"set aside, and whole: renamed to {name!r}, it is used again; {found.why}"
    )


def _of_run(where: Path) -> Verdict:
    from tailrace.runs.reader import open_run

    try:
        run = open_run(where)
        # Each piece of a run has a checksum, which is compared when it is read.
        steps = len(run.history.steps)
        _ = run.catalogue, run.executions, run.elements
        for record in run.records.values():
            _ = record.values
    except RunError as error:
        # Only what was read can be damaged.
        answered = not isinstance(error.__cause__, OSError)
        missing = isinstance(error.__cause__, FileNotFoundError)
        return Verdict(where.name, DAMAGED if answered or missing else UNKNOWN, str(error))
    return Verdict(where.name, WHOLE, f"a run of {steps:,} steps")


COMMANDS = [fsck]
"""In the order in which `--help` lists them."""
