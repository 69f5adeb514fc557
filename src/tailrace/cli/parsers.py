"""Parts that the parsers of all commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Protocol

_NEGATIVE = re.compile(r"-[\d.]")
"""The start of a value such as `-1:` or `-1:1`."""


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments, with each option and a negative value after it as one: `--steps=-1:`.

    argparse takes a value that begins with a minus and is no plain number for another option.

    >>> joined(["heatmap", "run", "--steps", "-1:", "--scale", "0:1"])
    ['heatmap', 'run', '--steps=-1:', '--scale', '0:1']
    """
    if list(arguments[:1]) == ["launch"]:  # its script gets its arguments as they were given
        return list(arguments)
    found: list[str] = []
    for argument in arguments:
        last = found[-1] if found else ""
        # Only after a long option without `=`: elsewhere argparse reads a minus as intended.
        if _NEGATIVE.match(argument) and last.startswith("--") and "=" not in last:
            found[-1] = f"{last}={argument}"
        else:
            found.append(argument)
    return found


class Subparsers(Protocol):
    """The result of `ArgumentParser.add_subparsers`, whose class argparse keeps private."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        """A parser for the subcommand `name`."""
        ...


def add_run(parser: argparse.ArgumentParser) -> None:
    """The argument RUN: a run directory."""
    parser.add_argument("directory", metavar="RUN", help="a run directory (Trainer(run_dir=...))")


def add_two_runs(parser: argparse.ArgumentParser) -> None:
    """The arguments RUN RUN: two run directories."""
    parser.add_argument("first", metavar="RUN", help="a run directory")
    parser.add_argument("second", metavar="RUN", help="another one")
