"""The command `tailrace`.

Each subcommand is one function in `COMMANDS`: it adds its parser, and sets the function that runs it
with `set_defaults(run=...)`. That function gets the parsed arguments and returns the exit code. A
`TailraceError` is printed as one sentence, without a traceback, and the exit code is 2.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailrace._version import __version__
from tailrace.cli.fsck import COMMANDS as FILE_COMMANDS
from tailrace.cli.look_commands import COMMANDS as LOOK_COMMANDS
from tailrace.cli.lookback_commands import COMMANDS as LOOKBACK_COMMANDS
from tailrace.cli.parsers import Subparsers, joined
from tailrace.cli.run_commands import COMMANDS as RUN_COMMANDS
from tailrace.cli.run_commands import add_select, selected
from tailrace.cli.targets import call, load
from tailrace.devices.processes.launch import add_parser as launch
from tailrace.errors import DataError, OptionError, TailraceError

EPOCHS, ELEMENTS = 5, 1000
"""Measurements of `benchmark-data` and the elements of each, where the dataset has enough."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    # Outside `try`: argparse prints its own errors, and exits with 2 as well.
    given = sys.argv[1:] if arguments is None else arguments
    parsed = _parsed(joined(given))
    try:
        if any("\0" in argument for argument in given):
            raise OptionError(
                "An argument contains the character NUL, which no name or number has."
            )
        code = parsed.run(parsed)
        print(end="", flush=True)  # here, where it is expected that nobody reads on
        return code
    except TailraceError as error:
        # On one line, even if the message quotes an exception of the user's code that has several.
        print(f"tailrace {parsed.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # as with `| head`
            # What is left would be written when Python ends, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        from tailrace.base.paths import in_words  # loads NumPy, which help does without

        # Of a file that a command reads; what it writes says so itself.
        named = f"{error.filename!r:.200}: " if error.filename else ""
        print(f"tailrace {parsed.command}: {named}{in_words(error, reading=True)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the exit code of a process ended by Ctrl-C


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    # Some versions of argparse take an argument that may be missing for missing at the first option.
    rest = [one for one in rest if one != "--"]
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(parsed, "target", "") is None:
        parsed.target = rest.pop()
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


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
        "--epochs", type=int, help=f"how many measurements (default: {EPOCHS}, or fewer)"
    )
    parser.add_argument(
        "--elements", type=int, help=f"elements in each (default: {ELEMENTS}, or fewer)"
    )
    parser.add_argument(
        "--step-time",
        type=float,
        metavar="MICROSECONDS",
        help="the time of one step on the device, without waiting for data",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_run_benchmark_data)


def _run_benchmark_data(arguments: argparse.Namespace) -> int:
    # Imports are in the functions of commands: `--help` must need no JAX.
    from tailrace.data.adapters import FromFunction, as_dataset
    from tailrace.feeds.benchmark.measure import dataset_benchmark
    from tailrace.feeds.benchmark.verdict import verdict

    if arguments.step_time is not None and not arguments.step_time > 0:
        raise OptionError(
            f"--step-time must be greater than 0 microseconds. Received: {arguments.step_time:g}."
        )
    dataset = as_dataset(load(arguments.target))
    if isinstance(dataset, FromFunction):
        # Called once, here: an exception of the user's function becomes a sentence, and it is not
        # timed.
        dataset = call(dataset.make, arguments.target)
    measured = dataset_benchmark(dataset, *_amounts(arguments, dataset.length))
    if arguments.json:
        print(measured)
    else:
        from rich.console import Console

        from tailrace.feeds.benchmark.table import benchmark_table

        Console().print(benchmark_table(measured, title=dataset.name))
    if arguments.step_time is not None:
        sentence = verdict(measured, step_time_s=arguments.step_time * 1e-6).sentence
        # With --json, standard output is the JSON text and nothing else.
        print(sentence, file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _amounts(arguments: argparse.Namespace, length: int | None) -> tuple[int, int]:
    """Epochs and elements of each: as given, or else no more than a dataset of known length has."""
    epochs, elements = arguments.epochs, arguments.elements
    # A generator has no known length: one that is shorter is refused by the benchmark.
    available = EPOCHS * ELEMENTS if length is None else length
    if epochs is None:
        # `max(1, ...)`: counts below 1 are refused by the benchmark, in words; they must not divide
        # here.
        epochs = max(1, min(EPOCHS, available // max(1, elements or 1)))
    if elements is None:
        elements = max(1, min(ELEMENTS, available // max(1, epochs)))
    return epochs, elements


def tensors(subparsers: Subparsers) -> None:
    """`tailrace tensors`: the catalogue of a training step."""
    parser = subparsers.add_parser(
        "tensors",
        help="list the tensors of a training step by name",
        description="List every tensor of a step, as taps select them: name, shape, dtype and the "
        "line it comes from.",
    )
    parser.add_argument(
        "target",
        metavar="MODULE:ATTRIBUTE",
        help="a tr.Trainer that has been trained, or a function without arguments that returns "
        "(trainer, dataset), as for replay, or (trainer, example), where example is one element",
    )
    add_select(parser, "*")
    parser.add_argument("--json", action="store_true", help="print the catalogue as JSON")
    parser.set_defaults(run=_run_tensors)


def _run_tensors(arguments: argparse.Namespace) -> int:
    from tailrace.taps.catalogue import names_listed_by

    found: Any = load(arguments.target, "a trainer", "mypackage.train:make")
    if not hasattr(found, "tensors") and callable(found):
        found = call(found, arguments.target)
    pair: Any = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    trainer, example = pair
    if not hasattr(trainer, "tensors"):
        raise OptionError(
            f"{arguments.target} must be a tr.Trainer, or a function that returns (trainer, "
            f"dataset) or (trainer, example). Received: {type(trainer).__name__}."
        )
    example = () if example is None else (_element_of(example, arguments.target),)
    listed = trainer.tensors(*example)
    # A selection that matches nothing says where names are listed: here a command, not a method.
    with names_listed_by("tailrace tensors without --select"):
        chosen = listed.select(selected(arguments))
    print(chosen.to_json() if arguments.json else chosen.to_text())
    return 0


def _element_of(given: object, target: str) -> Any:
    """The first element of a dataset, or `given` if it is an element already."""
    from tailrace.data.adapters import as_dataset

    try:
        dataset = as_dataset(given)
    except DataError:  # arrays, tuples and dicts are elements
        return given
    return call(lambda: next(dataset.iterate(), None), target)


def plan(subparsers: Subparsers) -> None:
    """`tailrace plan`: a pipeline schedule, drawn."""
    parser = subparsers.add_parser(
        "plan",
        help="draw a pipeline schedule and say what it costs",
        description="Plan one execution of a pipeline: which device does what in which tick.",
    )
    parser.add_argument("--stages", type=int, required=True, help="how many stages")
    parser.add_argument(
        "--microbatches", type=int, required=True, help="how many microbatches make a step"
    )
    parser.add_argument(
        "--schedule", default="grouped", help="grouped, interleaved or sequential (%(default)s)"
    )
    parser.add_argument("--inference", action="store_true", help="without backward passes")
    parser.add_argument(
        "--device-mapping",
        metavar="DEVICES",
        help="the device of each stage, such as 0,1,1,0; 1+2 for a stage of two members",
    )
    for name in ("forward", "backward"):
        parser.add_argument(
            f"--{name}",
            metavar="TIMES",
            help=f"how long the {name} pass of each stage takes, such as 1,1,2; predicts the time",
        )
    parser.add_argument("--svg", metavar="FILE", help="write the picture there")
    parser.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> int:
    from tailrace.base.checks import member_named
    from tailrace.pipeline import PipelineSchedule
    from tailrace.pipeline import plan as make

    # Names and counts are checked here too, so that messages name options, not arguments of `tr.plan`.
    schedule = member_named(PipelineSchedule, arguments.schedule, "--schedule")
    mapping = _each("--device-mapping", arguments.device_mapping, int)
    if mapping is not None and len(mapping) != arguments.stages:
        raise OptionError(
            f"--device-mapping has an entry for each of the --stages. Received: {len(mapping)} in "
            f"{arguments.device_mapping!r}, and --stages {arguments.stages}. Make them equal; 1+2 is "
            f"one stage of two members."
        )
    # The members of each stage, if any has several: that is how `tr.plan` takes such stages.
    members = [len(each) if isinstance(each, list) else 1 for each in mapping or ()]
    made = make(
        members if any(count > 1 for count in members) else arguments.stages,
        arguments.microbatches,
        schedule,
        mapping,
        training=not arguments.inference,
    )
    forward = _each("--forward", arguments.forward, float)
    backward = _each("--backward", arguments.backward, float)
    if forward is None and backward is not None:
        raise OptionError("--backward goes with --forward: give the times of both passes.")
    # Before anything is printed: it refuses wrong times.
    times = None if forward is None else made.simulate(forward, backward)
    print(made)
    if times is not None:
        print(times)
    if arguments.svg:
        try:
            Path(arguments.svg).write_text(str(made.draw(format="svg")), encoding="utf-8")
        except OSError as error:
            from tailrace.base.paths import in_words

            raise OptionError(f"{arguments.svg!r} cannot be written: {in_words(error)}") from error
        print(f"Saved {arguments.svg}")
    return 0


def _each(option: str, text: str | None, kind: type) -> list[Any] | None:
    """A list with an entry per stage; for a stage of several members, a list."""
    if text is None:
        return None
    try:
        parts = [[kind(number) for number in part.split("+")] for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"{option} has a number for each stage, with commas between them; 1+2 for a stage of two "
            f"members. Received: {text!r}."
        ) from None
    return [part[0] if len(part) == 1 else part for part in parts]


def doctor(subparsers: Subparsers) -> None:
    """`tailrace doctor`: what is here, and what will not work."""
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, devices and optional packages, and what will not work",
        description="Show versions, devices with their memory kinds, optional packages, and what "
        "will not work here.",
    )
    parser.set_defaults(run=_run_doctor)


def _run_doctor(_: argparse.Namespace) -> int:
    from tailrace.cli.doctor import diagnose

    print(diagnose())
    return 0


COMMANDS: list[Callable[[Subparsers], None]] = [
    *(benchmark_data, tensors, plan, doctor, launch),
    *LOOK_COMMANDS,
    *RUN_COMMANDS,
    *LOOKBACK_COMMANDS,
    *FILE_COMMANDS,
]
"""The subcommands, in the order in which `--help` lists them."""
