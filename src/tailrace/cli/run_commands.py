"""The subcommands of `tailrace` that read a run directory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tailrace.cli.parsers import Subparsers, add_run, add_two_runs
from tailrace.errors import OptionError

if TYPE_CHECKING:
    from tailrace.runs.export.figures import Picture


def histogram(subparsers: Subparsers) -> None:
    """`tailrace histogram RUN`: the histogram of gradients, with the limits of number formats."""
    parser = subparsers.add_parser(
        "histogram",
        help="draw the histogram of gradients (or other tensors) of a run",
        description="Draw the values of tensors by binary exponent, with the limits of float16, "
        "bfloat16 and float8, and say what share is beyond them. The run needs taps with "
        "reduce='histogram' (or 'tensor').",
    )
    _add_run(parser)
    _add_steps(parser)
    parser.add_argument(
        "--together", action="store_true", help="draw all tensors as one histogram, not a row each"
    )
    _add_output(parser, "histogram.png", "histogram.svg")
    parser.set_defaults(run=_run_histogram)


def _run_histogram(arguments: argparse.Namespace) -> int:
    from tailrace.runs.reader import open_run

    steps, run = _slice(arguments.steps), open_run(arguments.directory)
    # The sentences are about all tensors together, whatever is drawn.
    together = run.histogram(selected(arguments), steps)
    print(together)
    rows = together if arguments.together else run.histograms(selected(arguments), steps)
    _save(rows, arguments)
    return 0


def heatmap(subparsers: Subparsers) -> None:
    """`tailrace heatmap RUN`: tensors over steps."""
    parser = subparsers.add_parser(
        "heatmap",
        help="draw tensors over steps: a row per tensor, a column per step",
        description="Draw one number per tensor and step: the norm, a statistic, or the mean "
        "magnitude of a histogram.",
    )
    _add_run(parser)
    parser.add_argument(
        "--field", default="std", help="which statistic, of taps with reduce='stats' (std)"
    )
    _add_steps(parser)
    parser.add_argument(
        "--scale",
        metavar="LOW:HIGH",
        help="the values at the ends of the colours, so that two pictures share them",
    )
    _add_output(parser, "heatmap.png", "heatmap.svg")
    parser.set_defaults(run=_run_heatmap)


def _run_heatmap(arguments: argparse.Namespace) -> int:
    from tailrace.runs.reader import open_run

    run, steps = open_run(arguments.directory), _slice(arguments.steps)
    scale = None if arguments.scale is None else _scale(arguments.scale)
    picture = run.heatmap(selected(arguments), arguments.field, steps, scale)
    print(f"{len(picture.names)} tensors, {len(picture.steps)} columns: {picture.what}")
    _save(picture, arguments)
    return 0


def tensorboard(subparsers: Subparsers) -> None:
    """`tailrace tensorboard RUN LOGDIR`: event files."""
    parser = subparsers.add_parser(
        "tensorboard",
        help="write a run as TensorBoard event files",
        description="Write the history, statistics and histograms of a run as event files.",
    )
    _add_run(parser, select="*")
    parser.add_argument("logdir", metavar="LOGDIR", help="where the event files go")
    parser.add_argument(
        "--every", type=int, default=1, help="write every N-th step (default: %(default)s)"
    )
    parser.set_defaults(run=_run_tensorboard)


def _run_tensorboard(arguments: argparse.Namespace) -> int:
    from tailrace.runs.reader import open_run

    run = open_run(arguments.directory)
    count = run.to_tensorboard(arguments.logdir, selected(arguments), arguments.every)
    print(f"Wrote {count:,} values to {arguments.logdir}")
    return 0


def diff(subparsers: Subparsers) -> None:
    """`tailrace diff RUN RUN`: where two runs differ first."""
    parser = subparsers.add_parser(
        "diff",
        help="find the first difference between two runs",
        description="Compare two runs where both have records. The exit code is 1 if they differ.",
    )
    add_two_runs(parser)
    for name, what in (
        ("--rtol", "relative to the largest value of a tensor"),
        ("--atol", "absolute"),
    ):
        parser.add_argument(
            name, type=float, default=0.0, help=f"a difference that does not count, {what} (0)"
        )
    parser.set_defaults(run=_run_diff)


def _run_diff(arguments: argparse.Namespace) -> int:
    from tailrace.runs.diff.run_diff import diff as compare

    found = compare(arguments.first, arguments.second, rtol=arguments.rtol, atol=arguments.atol)
    print(found)
    return 1 if found else 0  # like Unix `diff`


# -- what they share ----------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser, select: str = "grad/*") -> None:
    add_run(parser)
    add_select(parser, select)


def add_select(parser: argparse.ArgumentParser, default: str) -> None:
    """The option `--select`, which may be given several times."""
    parser.add_argument(
        "--select",
        action="append",
        metavar="GLOB",
        help=f"which tensors; may be given several times (default: {default})",
    )
    # Not `default=`: with action="append" argparse would add to it instead of replacing it.
    parser.set_defaults(default_select=default)


def selected(arguments: argparse.Namespace) -> Any:
    """The value of `--select`: one selection, or a list."""
    given = arguments.select or [arguments.default_select]
    return given[0] if len(given) == 1 else given


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        metavar="FIRST:STOP",
        default=":",
        help="from which steps; -1: is the last one recorded (default: all)",
    )


def _scale(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = 0.0, 0.0  # refused below, with the same words as limits in the wrong order
    if not found[0] < found[1]:
        raise OptionError(f"--scale is LOW:HIGH, such as 1e-6:1. Received: {text!r}.")
    return found


def _add_output(parser: argparse.ArgumentParser, *default: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="FILE",
        help=f"the picture: .png, .svg or .pdf; may be given several times (default: "
        f"{' and '.join(default)})",
    )
    parser.set_defaults(default_output=default)


def _save(picture: Picture, arguments: argparse.Namespace) -> None:
    for output in arguments.output or arguments.default_output:
        picture.save(output)
        print(f"Saved {output}")


def _slice(text: str) -> slice:
    first, colon, stop = text.partition(":")
    try:
        # Without a colon it could mean one step, or the steps up to it.
        if not colon:
            raise ValueError
        return slice(int(first) if first else None, int(stop) if stop else None)
    except ValueError:
        raise OptionError(
            f"--steps is FIRST:STOP, such as 0:100, 500: or -1:. Received: {text!r}."
        ) from None


COMMANDS = [histogram, heatmap, tensorboard, diff]
"""In the order in which `--help` lists them."""
