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


HOST, DEVICE, INK, LINE = "#eef3f8", "#fdf3e3", "#1d2b3a", "#5b6b7b"


class Sketch:
    """Boxes, words and arrows on white, so that they can be read on a dark page too."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def ground(self, x: int, y: int, w: int, h: int, fill: str) -> None:
        """A coloured ground behind what belongs together."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}"/>')

    def box(self, x: int, y: int, w: int, h: int, *lines: str, fill: str = "#fff") -> None:
        """A box with a title and lines of small text below; what ends in .py is in code's font."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{LINE}"/>'
        )
        top = y + h / 2 - 8 * (len(lines) - 1) + 4
        for number, text in enumerate(lines):
            style = ' font-weight="600"' if number == 0 else f' font-size="12" fill="{LINE}"'
            if text.endswith(".py"):
                style = f' font-size="11" font-family="monospace" fill="{LINE}"'
            at = top + 16 * number
            self._parts.append(
                f'<text x="{x + w / 2}" y="{at}" text-anchor="middle"{style}>{text}</text>'
            )

    def text(self, x: int, y: int, words: str, anchor: str = "start") -> None:
        """Small words."""
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="12" fill="{LINE}" text-anchor="{anchor}">{words}</text>'
        )

    def arrow(self, path: str) -> None:
        """An arrow along SVG path commands."""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self, width: int, height: int) -> str:
        """The whole picture."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="14" fill="{INK}"><defs><marker id="tip" '
            'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
            f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(self._parts)}</svg>\n'
        )


@figure("dataflow")
def dataflow() -> str:
    """The way of the data: dataset, infeed, device program, outfeed; and the same over time."""
    sketch = Sketch()
    box, text, arrow = sketch.box, sketch.text, sketch.arrow
    for x, w, fill, words in (
        (10, 330, HOST, "host"),
        (350, 380, DEVICE, "device: one program, many steps"),
        (740, 250, HOST, "host"),
    ):
        sketch.ground(x, 10, w, 250, fill)
        text(x + 12, 30, words)
    box(25, 95, 110, 60, "dataset", "any iterable")
    box(185, 95, 140, 60, "infeed", "a thread reads,", "stacks and moves")
    box(365, 95, 90, 60, "block", "n elements")
    box(500, 60, 215, 135)
    text(512, 80, "step, n times")
    inside = ("forward, backward", "accumulate microbatches", "mean over replicas", "update")
    for number, words in enumerate(inside):
        box(512, 90 + 24 * number, 190, 20)
        text(607, 104 + 24 * number, words, "middle")
    box(755, 95, 95, 60, "outfeed", "in order")
    box(890, 80, 90, 90, "yours", "dequeue", "stream", "history")
    for path in ("M135 125H183", "M325 125H363", "M455 125H498", "M715 125H753", "M850 125H888"):
        arrow(path)
    arrow("M607 195V228H480V170H498")
    text(544, 244, "state stays on the device", "middle")
    lanes = {
        "thread": ("read", HOST, 110, (100, 218, 422, 626)),
        "device": ("execution", DEVICE, 196, (218, 422, 626)),
        "host": ("results", HOST, 76, (422, 626, 830)),
    }
    for row, (who, (what, fill, width, starts)) in enumerate(lanes.items()):
        text(25, 310 + 38 * row, who)
        for number, x in enumerate(starts):
            box(x, 290 + 38 * row, width, 30, f"{what} {number}", fill=fill)
    text(
        100,
        420,
        "While execution k runs, the elements of k + 1 are read and the results of k - 1 collected.",
    )
    text(100, 438, "At most two blocks exist at a time, for any number of steps.")
    return sketch.svg(1000, 450)


TAP = (
    ("step", "marks named values", "training_step.py"),
    ("trace", "one jaxpr", "tracing/trace.py"),
    ("catalogue", "tensors by name", "taps/catalogue.py"),
    ("wanted", "what taps select", "taps/wanted.py"),
    ("rewrite", "adds an output", "taps/rewrite.py"),
    ("emission", "on the device", "taps/frame.py"),
    ("record", "on the host, by step", "records/records.py"),
)
PIPELINE = (
    ("cut", "the model in pieces", "lowering/cut.py"),
    ("stages", "forward, backward", "lowering/stage.py"),
    ("plain step", "calls of stages", "pipeline_step.py"),
    ("plan", "which unit when", "schedule/plan.py"),
    ("jobs", "calls by unit", "lowering/jobs.py"),
    ("layout", "values in buffers", "device_layout.py"),
    ("machine", "one device program", "running/emit_step.py"),
)
DRIVERS = (
    ("tr.Trainer", "trainer/fitting/fit.py"),
    ("Keras", "keras/programs/train.py"),
    ("PyTorch", "torch/programs/train.py"),
    ("IPU pipelines", "ipu/pipelining/training_pipeline.py"),
)


@figure("architecture")
def architecture() -> str:
    """Three ways through the house: a tap, a pipelined step, and those who drive the engine."""
    sketch = Sketch()
    box, text, arrow = sketch.box, sketch.text, sketch.arrow
    chains = ("A tap becomes an output", TAP), ("A pipelined step is built", PIPELINE)
    for row, (title, chain) in enumerate(chains):
        top = 10 + 130 * row
        sketch.ground(10, top, 1140, 120, HOST)
        text(24, top + 22, title)
        for number, words in enumerate(chain):
            x = 24 + 161 * number
            box(x, top + 34, 146, 70, *words, fill=DEVICE if words[0] == "emission" else "#fff")
            if number:
                arrow(f"M{x - 15} {top + 69}H{x - 2}")
    sketch.ground(10, 270, 1140, 310, HOST)
    text(24, 292, "Four loops drive one engine")
    for number, words in enumerate(DRIVERS):
        y = 304 + 68 * number
        box(24, y, 256, 56, *words)
        arrow(f"M280 {y + 28}H334")
    box(336, 304, 220, 260)
    lines = "use(dataset) → Feed", "dispatch(length) → Ticket", "collect(ticket) → Results", "state"
    box(346, 314, 200, 50, "Engine", "trainer/engine.py")
    for number, words in enumerate(lines):
        box(346, 378 + 46 * number, 200, 36)
        text(446, 400 + 46 * number, words, "middle")
    box(
        610,
        304,
        236,
        76,
        "Feed",
        "InfeedQueue reads ahead,",
        "HandedFeed gets blocks",
        "feeds/feed.py",
    )
    box(
        610,
        396,
        236,
        76,
        "LoopRunner",
        "or PipelineRunner: one program",
        "loop_runner.py",
        "pipeline_runner.py",
    )
    box(610, 488, 236, 76, "Journal", "history, records, run directory", "observation/journal.py")
    box(
        900,
        350,
        236,
        76,
        "Executable",
        "rewrites, compiles, dispatches",
        "running/executable.py",
        fill=DEVICE,
    )
    box(
        900,
        488,
        236,
        76,
        "Ticket, then Results",
        "on the device, then on the host",
        "trainer/executions.py",
    )
    for path in (
        "M556 342H608",
        "M556 434H608",
        "M846 342H872V374H898",
        "M846 434H872V402H898",
        "M1018 426V486",
        "M900 526H848",
    ):
        arrow(path)
    text(1028, 460, "emissions")
    return sketch.svg(1160, 590)


@figure("gradient_histogram")
def gradient_histogram() -> str:
    """The gradients of the last step of an epoch; drawn by `tailrace histogram`."""
    import importlib.util
    import tempfile

    import optax

    import tailrace as tr
    from tailrace.cli import main as tailrace

    example = Path(__file__).parents[1] / "examples" / "observe_gradients.py"
    spec = importlib.util.spec_from_file_location("observe_gradients", example)
    assert spec is not None
    assert spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = tr.Trainer(
            model.loss_fn,
            optax.sgd(0.01),
            model.create_model(),
            observe=[tr.Tap("grad/*", reduce="histogram")],
            run_dir=f"{folder}/run",
        )
        digits = tr.batches(tr.data.digits("train"), 1000, shuffle=True, seed=0)
        trainer.fit(digits, epochs=1, progress=False)
        drawn = f"{folder}/histogram.svg"
        code = tailrace(["histogram", f"{folder}/run", "--steps=-1:", "-o", drawn])
        assert code == 0
        return Path(drawn).read_text(encoding="utf-8")


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
