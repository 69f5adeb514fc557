"""Make the figures of the documentation: `python docs/make_figures.py [name ...] [--check]`.

Each function below makes one picture and returns its SVG; the decorator names the file in
`docs/images`. To add a figure, add a function. `--check` writes nothing and fails if a file is not
what its function makes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tailrace.pipeline import compare_plans, plan

IMAGES = Path(__file__).parent / "images"
FIGURES: dict[str, Callable[[], str]] = {}


def figure(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function as the maker of `docs/images/<name>.svg`."""

    def register(make: Callable[[], str]) -> Callable[[], str]:
        FIGURES[name] = make
        return make

    return register


@figure("schedule_grouped")
def schedule_grouped() -> str:
    """Grouped: three stages, twelve microbatches."""
    return plan(stages=3, microbatches=12).draw(format="svg")


@figure("schedule_interleaved")
def schedule_interleaved() -> str:
    """Interleaved: the same pipeline."""
    return plan(stages=3, microbatches=12, schedule="interleaved").draw(format="svg")


@figure("schedule_sequential")
def schedule_sequential() -> str:
    """Sequential: the same stages, fewer microbatches, because it takes long."""
    return plan(stages=3, microbatches=4, schedule="sequential").draw(format="svg")


@figure("schedule_inference")
def schedule_inference() -> str:
    """Inference has no way back."""
    return plan(stages=3, microbatches=12, training=False).draw(format="svg")


@figure("schedule_shared_devices")
def schedule_shared_devices() -> str:
    """Three stages on two devices, out and back."""
    made = plan(stages=3, microbatches=12, device_mapping=[0, 1, 0])
    return made.draw(format="svg", title="Grouped, device_mapping=[0, 1, 0]")


@figure("schedule_concurrent")
def schedule_concurrent() -> str:
    """Concurrent stages, and the same pipeline with them one after the other."""
    concurrent = plan(
        stages=["embed", ["text", "image"], "head"], microbatches=12, schedule="interleaved"
    )
    titles = ["Concurrent: text and image are one stage", "Serialised: text, then image"]
    return compare_plans(concurrent, concurrent.serialised(), titles=titles)


def main(arguments: list[str]) -> int:
    """Write (or check) the figures that are named, all without a name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(FIGURES)}")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(FIGURES))
    if unknown:
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    stale = []
    for name in options.names or FIGURES:
        path = IMAGES / f"{name}.svg"
        picture = str(FIGURES[name]())
        if options.check:
            if not path.exists() or path.read_text(encoding="utf-8") != picture:
                stale.append(path.name)
            continue
        IMAGES.mkdir(exist_ok=True)
        path.write_text(picture, encoding="utf-8")
        print(path)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/make_figures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
