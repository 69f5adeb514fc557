"""The command `tailrace`.

Each subcommand is one function in `COMMANDS`: it adds its parser, and names the function that runs
it with `set_defaults(run=...)`. That one gets the parsed arguments and returns the exit code. Any
`TailraceError` it raises is printed as a sentence, without a traceback, and the code is 2.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tailrace._version import __version__
from tailrace.errors import OptionError, TailraceError

Subparsers = Any  # argparse's own class for this is private


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except TailraceError as error:
        # One line, also where the text quotes an exception of the user's own that has several.
        print(f"tailrace {parsed.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # what a shell reports for a process ended by Ctrl-C


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace", description="Training that stays on the device."
    )
    parser.add_argument("--version", action="version", version=f"tailrace {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(subparsers)
    return parser


def benchmark_data(subparsers: Subparsers) -> None:
    """`tailrace benchmark-data`: how fast a dataset delivers."""
    parser = subparsers.add_parser(
        "benchmark-data",
        help="measure how many elements a second a dataset delivers",
        description="Measure how many elements a second a dataset delivers, the way an infeed "
        "reads it; with --step-time, say whether the data or the device is the bottleneck.",
    )
    parser.add_argument(
        "target",
        metavar="MODULE:ATTRIBUTE",
        help="where the dataset is: a dataset, or a function without arguments that returns one",
    )
    parser.add_argument(
        "--epochs", type=int, default=5, help="how many measurements (default: %(default)s)"
    )
    parser.add_argument(
        "--elements", type=int, default=1000, help="elements in each (default: %(default)s)"
    )
    parser.add_argument(
        "--step-time",
        type=float,
        metavar="MICROSECONDS",
        help="what one step takes on the device when its data is there",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_run_benchmark_data)


def _run_benchmark_data(arguments: argparse.Namespace) -> int:
    from tailrace.data.adapters import FromFunction, as_dataset
    from tailrace.data.benchmark import dataset_benchmark
    from tailrace.data.bottleneck import verdict

    if arguments.step_time is not None and not arguments.step_time > 0:
        raise OptionError(
            f"--step-time must be greater than 0 microseconds. Received: {arguments.step_time:g}."
        )
    dataset = as_dataset(load(arguments.target))
    if isinstance(dataset, FromFunction):
        dataset = _guarded(dataset.make, f"{arguments.target} was called and raised")
    measured = dataset_benchmark(dataset, arguments.epochs, arguments.elements)
    if arguments.json:
        print(measured)
    else:
        from rich.console import Console

        from tailrace.data.report import benchmark_table

        Console().print(benchmark_table(measured, title=dataset.name))
    if arguments.step_time is not None:
        sentence = verdict(measured, step_time_s=arguments.step_time * 1e-6).sentence
        # With --json, standard output is the JSON text and nothing else.
        print(sentence, file=sys.stderr if arguments.json else sys.stdout)
    return 0


def load(target: str) -> Any:
    """The object at MODULE:ATTRIBUTE, looked for in the working directory as well.

    >>> load("math:pi")
    3.141592653589793
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise OptionError(
            "A dataset is named as MODULE:ATTRIBUTE, for example mypackage.data:training_set. "
            f"Received: {target!r}."
        )
    # `python script.py` finds modules that lie beside it; an installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _guarded(
        lambda: importlib.import_module(module_name), f"importing {module_name!r} raised"
    )
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise OptionError(
                f"{target!r} names no dataset: {module_name!r} was imported, but it has no "
                f"attribute {attribute!r}."
            )
        found = getattr(found, name)
    return found


def _guarded(function: Callable[[], Any], what: str) -> Any:
    """Call into the user's own code; what it raises comes back as one sentence."""
    try:
        return function()
    except TailraceError:
        raise
    except Exception as error:
        raise OptionError(f"{what} {type(error).__name__}: {error}") from error


COMMANDS: list[Callable[[Subparsers], None]] = [benchmark_data]
"""The subcommands, in the order in which `--help` lists them."""


if __name__ == "__main__":
    sys.exit(main())
