"""Execution traces of the two classifiers: with feeds, and with one call of the device for each step.

Writes one timeline each, for https://ui.perfetto.dev. With feeds, a run of the program has many steps
and the device does not wait for the host in between.
"""

import argparse
import contextlib
import io
import pathlib
import tempfile

import mnist_with_feeds
import mnist_without_feeds
import tailrace as tr


def traced(directory, program, **options):
    """The runs on the device of a program that is already compiled, and the file."""
    with contextlib.redirect_stdout(io.StringIO()):  # its times are not those of an untraced run
        program(**options)
        with tr.trace(directory, operations=None) as timeline:
            program(**options)
    training = max({run.module for run in timeline.runs}, key=lambda name: taken(timeline, name))
    runs = [run for run in timeline.runs if run.module == training]
    return runs, busy_share(runs), timeline.path


def busy_share(runs):
    """The share of the time in which a run is under way; on a CPU two may overlap."""
    busy, last = 0, runs[0].start
    for run in runs:
        busy, last = busy + max(0, run.end - max(run.start, last)), max(last, run.end)
    return busy / (last - runs[0].start)


def taken(timeline, name):
    return sum(run.end - run.start for run in timeline.runs if run.module == name)


def main(steps=500, steps_per_execution=50, directory=None):
    folder = pathlib.Path(directory or tempfile.mkdtemp(prefix="execution_traces_"))
    fed = traced(
        folder / "with_feeds",
        mnist_with_feeds.main,
        steps=steps,
        steps_per_execution=steps_per_execution,
    )
    plain = traced(folder / "without_feeds", mnist_without_feeds.main, steps=steps)
    for name, (runs, busy, path) in {"with feeds": fed, "without feeds": plain}.items():
        print(
            f"{name:13}: {len(runs):5} runs of {steps / len(runs):.0f} steps, the device runs "
            f"{busy:.0%} of the time; {path}"
        )
    return fed, plain


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--steps-per-execution", type=int, default=50)
    parser.add_argument("--directory", help="where the timelines go; a new folder if not given")
    main(**vars(parser.parse_args()))
