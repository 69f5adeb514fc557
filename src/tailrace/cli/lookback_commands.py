"""The subcommands of `tailrace` that look back: replay, audit, bisect."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from tailrace.cli.parsers import Subparsers, add_run, add_two_runs
from tailrace.cli.targets import call, load
from tailrace.errors import OptionError

if TYPE_CHECKING:
    from tailrace.records.record import Record
    from tailrace.runs.reader import Run


def replay(subparsers: Subparsers) -> None:
    """`tailrace replay RUN --step n MODULE:FUNCTION`: a past step again."""
    parser = subparsers.add_parser(
        "replay",
        help="run a past step again, with any taps, and say whether it is what happened",
        description="Run a past step again from the nearest checkpoint, look at it with taps, and "
        "compare loss and fingerprints with the run. The exit code is 0 if they are equal bit for "
        "bit, 1 if not, or if nothing was recorded.",
    )
    add_run(parser)
    _add_target(parser)
    parser.add_argument("--step", type=int, required=True, help="the number of the step, from 0")
    parser.add_argument(
        "--observe", action="append", default=[], metavar="GLOB", help="tensors to look at"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="the directory of checkpoints (as the run says)"
    )
    parser.set_defaults(run=_run_replay)


def _run_replay(arguments: argparse.Namespace) -> int:
    from tailrace.runs.reader import open_run
    from tailrace.trainer.lookback.recorded import Recorded
    from tailrace.trainer.lookback.replay import replay as run_again

    run = open_run(arguments.directory)
    where = _checkpoints_of(run, arguments.checkpoint, "--checkpoint")
    # The user's function last: it may load data for minutes, and a wrong path is found before.
    trainer, dataset = _made(arguments.target)
    recorded = Recorded().add_run(run)
    taps = arguments.observe
    found = run_again(trainer.engine, arguments.step, dataset, taps, where, recorded)
    print(found)
    for (name, _), record in found.items():
        print(f"  {name}: {_shown(record)}")
    return 0 if found.proved else 1


def audit(subparsers: Subparsers) -> None:
    """`tailrace audit RUN`: whether every element was consumed once, in order."""
    parser = subparsers.add_parser(
        "audit",
        help="say whether every element of the data was consumed once, in order",
        description="Read which elements each execution of a run consumed, over kills and resumes. "
        "The exit code is 0 if every element was consumed once, in order, else 1.",
    )
    add_run(parser)
    _add_target(parser, optional=True)
    parser.add_argument(
        "--fit",
        type=int,
        metavar="STEP",
        help="compare contents of the fit that began with this step only (all of them)",
    )
    parser.set_defaults(run=_run_audit)


def _run_audit(arguments: argparse.Namespace) -> int:
    from tailrace.runs.audit import audit as check
    from tailrace.runs.reader import open_run

    if arguments.fit is not None and not arguments.target:
        raise OptionError(
            "--fit STEP says which fit a dataset is compared with. Give the function that makes "
            "trainer and dataset too."
        )
    dataset = _made(arguments.target)[1] if arguments.target else None
    found = check(open_run(arguments.directory), dataset, arguments.fit)
    print(found)
    return 0 if found.is_clean else 1


def bisect(subparsers: Subparsers) -> None:
    """`tailrace bisect RUN RUN`: the first execution, step and tensor in which two runs differ."""
    parser = subparsers.add_parser(
        "bisect",
        help="find the first execution, step and tensor group in which two runs differ",
        description="Compare the fingerprints and losses of two runs. With two functions that make "
        "trainer and dataset, the step is replayed in both and the first tensor that differs is "
        "named, in the order of the program. The exit code is 1 if they differ.",
    )
    add_two_runs(parser)
    for name in ("--first", "--second"):
        parser.add_argument(
            name,
            dest=f"{name[2:]}_target",
            metavar="MODULE:FUNCTION",
            help=f"the function that made trainer and dataset of the {name[2:]} run",
        )
        parser.add_argument(
            f"{name}-checkpoint",
            metavar="DIR",
            help=f"the directory of checkpoints of the {name[2:]} run (as the run says)",
        )
    parser.set_defaults(run=_run_bisect)


def _run_bisect(arguments: argparse.Namespace) -> int:
    from tailrace.runs.bisect import bisect as compare
    from tailrace.runs.reader import open_run

    targets = (arguments.first_target, arguments.second_target)
    given = (*targets, arguments.first_checkpoint, arguments.second_checkpoint)
    if any(given) and not all(targets):
        raise OptionError(
            "To name a tensor both runs are replayed, each with its own trainer and dataset. Give "
            "--first and --second, or neither; if one script made both runs, give it twice."
        )
    runs = open_run(arguments.first), open_run(arguments.second)
    found = compare(*runs)
    print(found)
    if found and all(targets):
        from tailrace.trainer.lookback.bisect import first_tensor
        from tailrace.trainer.lookback.recorded import Recorded

        kept = [
            _checkpoints_of(runs[0], arguments.first_checkpoint, "--first-checkpoint"),
            _checkpoints_of(runs[1], arguments.second_checkpoint, "--second-checkpoint"),
        ]
        made = [_made(target) for target in targets]
        # Up to the first loss that differs, or the end of the execution that does: both bound the
        # search, and the earlier one is closer.
        last = [end for end in (found.step, found.ended and found.ended - 1) if end is not None]
        sides = zip(kept, made, (Recorded().add_run(run) for run in runs), strict=True)
        print(first_tensor(found.equal_until, min(last), sides))
    return 1 if found else 0


# -- what they share ----------------------------------------------------------------------------


def _add_target(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        nargs="?" if optional else None,
        help="a function without arguments that returns (trainer, dataset); MODULE may be a file, "
        "train.py:make" + (". With it, contents are compared too" if optional else ""),
    )


def _checkpoints_of(run: Run, given: str | None, option: str) -> str:
    """The directory of a run's checkpoints: the given one, or the one that the run names."""
    named = run.info.get("checkpoint")
    if given is None and named is None:
        raise OptionError(
            f"A replay starts from a checkpoint, and the run {str(run.directory)!r} names no directory "
            f"of them. Give {option} DIR, or train with fit(checkpoint=...)."
        )
    if given is None and not os.path.isdir(str(named)):
        raise OptionError(
            f"The checkpoints of the run {str(run.directory)!r} were written to {str(named)!r}, and "
            f"that is not a directory here. Give {option} DIR."
        )
    return str(named) if given is None else given


def _made(target: str) -> tuple[Any, Any]:
    """The trainer and dataset that the user's function returns."""
    made: Any = load(target, "a function", "train.py:make")
    if callable(made):
        made = call(made, target)
    if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[0], "engine"):
        raise OptionError(
            f"{target} must return (trainer, dataset): a tr.Trainer and what it was trained on. "
            f"Received: {type(made).__name__}."
        )
    return made


def _shown(record: Record) -> str:
    import numpy as np

    values = record.values
    if isinstance(values, np.ndarray) and values.dtype.names:
        # One line per tensor: of several microbatches and replicas, the last.
        row = values.reshape(-1)[-1]
        return ", ".join(f"{name}={row[name]:.5g}" for name in values.dtype.names)
    return repr(record)


COMMANDS = [replay, audit, bisect]
