"""Parts that the parsers of all commands share."""

from __future__ import annotations

import argparse
from typing import Any, Protocol


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
