"""The subcommands of `tailrace` that show a run: in the terminal, as a report, as a web page."""

from __future__ import annotations

import argparse
import contextlib

from tailrace.cli.parsers import Subparsers, add_run


def show(subparsers: Subparsers) -> None:
    """`tailrace show RUN`: a run in the terminal."""
    parser = subparsers.add_parser(
        "show",
        help="show what ran, the curve of the loss, and findings",
        description="Show what ran and with which numbers, the curve of the loss, and findings: "
        "dead units, vanishing or exploding gradients, updates against weights, spikes of the loss, "
        "NaN.",
    )
    add_run(parser)
    parser.set_defaults(run=_run_show)


def _run_show(arguments: argparse.Namespace) -> int:
    from tailrace.page.terminal.show import show

    show(arguments.directory)
    return 0


def watch(subparsers: Subparsers) -> None:
    """`tailrace watch RUN`: the same while it grows."""
    parser = subparsers.add_parser(
        "watch",
        help="show a run while it grows",
        description="Show a run repeatedly while it grows. Ends with the run, when the process that "
        "writes it is gone, or on Ctrl-C.",
    )
    add_run(parser)
    parser.set_defaults(run=_run_watch)


def _run_watch(arguments: argparse.Namespace) -> int:
    from tailrace.page.terminal.watch import watch

    watch(arguments.directory)
    return 0


def report(subparsers: Subparsers) -> None:
    """`tailrace report RUN`: a report in one HTML file."""
    parser = subparsers.add_parser(
        "report",
        help="print a report of a run and write it as one HTML file",
        description="Print what ran, and write report.html into the run: one file that needs no "
        "network.",
    )
    add_run(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="another place for the HTML file")
    parser.set_defaults(run=_run_report)


def _run_report(arguments: argparse.Namespace) -> int:
    from tailrace.page.report.report import write_report
    from tailrace.page.terminal.show import show

    show(arguments.directory)
    print(f"\nSaved {write_report(arguments.directory, arguments.output)}")
    return 0


def compare(subparsers: Subparsers) -> None:
    """`tailrace compare A B`: two runs side by side."""
    parser = subparsers.add_parser(
        "compare",
        help="show two runs, or two profiles, side by side, largest difference first",
        description="Show what two runs took and reached, by scope where trainer.profile was called, "
        "and the settings that differ; largest difference first.",
    )
    for name, what in (
        ("first", "a run directory, or a file of Profile.save"),
        ("second", "another"),
    ):
        parser.add_argument(name, metavar="RUN", help=what)
    parser.set_defaults(run=_run_compare)


def _run_compare(arguments: argparse.Namespace) -> int:
    from tailrace.page.comparison import compare

    print(compare(arguments.first, arguments.second))
    return 0


def view(subparsers: Subparsers) -> None:
    """`tailrace view RUN...`: a live page."""
    parser = subparsers.add_parser(
        "view",
        help="show runs in the browser, also while they grow",
        description="Serve a page about runs at an address of this machine, which is printed and "
        "holds a token. Press Ctrl-C to stop it.",
    )
    parser.add_argument(
        "directories", metavar="RUN_DIR", nargs="+", help="a run directory, or a folder of them"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="the port to listen at (default: a free one)"
    )
    parser.set_defaults(run=_run_view)


def _run_view(arguments: argparse.Namespace) -> int:
    from tailrace.page.server.serve import serve

    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        serve(arguments.directories, arguments.port)
    return 0


COMMANDS = [show, watch, report, compare, view]
"""In the order in which `--help` lists them."""
