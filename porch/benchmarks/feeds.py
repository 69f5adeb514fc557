"""The seed's workload, 10,000 host-fed steps: Tailrace, its limit, and what one would use instead.

    python -m benchmarks.feeds [--steps N] [--repeats N] [--only PART,...] [--no-peers]

Everybody reads the same batches in the same order and has all losses on the host at the end. Runs
are interleaved, compiled before they are timed, and compared by the ratio of neighbouring runs.
Then the growth of memory with the number of steps, and the time of `import tailrace`, each in
fresh processes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

from benchmarks import report, workload
from benchmarks.report import Contender
from benchmarks.workload import BATCH, RATE, HostBatches

LIMIT = "hand-written scan"
CHUNK = 100  # of the hand-written scan; 50 to 600 were tried, and it is among the fastest


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=10_000, repeats=7)
    parser.add_argument("--no-memory", action="store_true", help="skip memory and import time")
    parser.add_argument("--probe", nargs=2, metavar=("NAME", "STEPS"), help="used by itself")
    flags = parser.parse_args(arguments)
    if flags.probe:
        print(json.dumps(probe_memory(flags.probe[0], int(flags.probe[1]))))
        return
    batches = HostBatches(flags.steps)
    contenders, skipped = assemble(batches, peers=not flags.no_peers)
    contenders = report.chosen(contenders, flags.only, LIMIT)
    agreement = check_losses(contenders)
    report.measure(contenders, flags.repeats)
    baseline = next(c for c in contenders if c.name == LIMIT)
    parts = [report.timing_table(contenders, baseline, flags.steps, "step"), agreement]
    if skipped:
        parts.append("\n".join(f"- not measured: {text}" for text in skipped))
    if not flags.no_memory:
        parts += [memory_table(), import_table()]
    command = " ".join(["python -m benchmarks.feeds", *(arguments or sys.argv[1:])])
    title = f"Feeds: {flags.steps:,} host-fed steps of a classifier 784-128-10, batch {BATCH}"
    publish_to = None if flags.no_record else report.RESULTS
    report.publish(title, command, parts, path=publish_to)


# -- contenders ---------------------------------------------------------------------------------


def assemble(batches: HostBatches, *, peers: bool) -> tuple[list[Contender], list[str]]:
    """All contenders that can be run here, and a sentence for each of the others."""
    contenders = [
        Contender(LIMIT, hand_written(batches), f"{CHUNK} steps a dispatch, one chunk ahead"),
        Contender("tr.compile + feeds", compiled_with_feeds(batches)),
        Contender("tr.Trainer", trainer(batches)),
        Contender(
            "tr.Trainer, tr.batches", trainer(batches, whole=True), "the same data as arrays"
        ),
        Contender("one jit call a step", one_call_a_step(batches)),
    ]
    skipped = []
    if peers:
        for add in (keras_contenders, torch_contenders):
            try:
                contenders += add(batches)
            except ImportError as error:
                skipped.append(f"{add.__name__.partition('_')[0]} ({error})")
    return contenders, skipped


def hand_written(batches: HostBatches) -> Callable[[], np.ndarray]:
    params, run = workload.init_params(), workload.scan_loop(workload.sgd_step, CHUNK)
    return lambda: run(workload.fresh(params), batches)


def compiled_with_feeds(batches: HostBatches) -> Callable[[], np.ndarray]:
    import tailrace as tr

    infeed, outfeed = tr.InfeedQueue(batches), tr.OutfeedQueue()

    def body(params: Any, images: Any, labels: Any) -> Any:
        params, loss = workload.sgd_step(params, images, labels)
        outfeed.enqueue(loss)
        return params

    program = tr.compile(lambda params: tr.repeat(len(batches), body, params, infeed=infeed))
    params = workload.init_params()

    def run() -> np.ndarray:
        infeed.restart()
        program(params)
        return outfeed.dequeue()

    return run


def trainer(batches: HostBatches, *, whole: bool = False) -> Callable[[], np.ndarray]:
    import optax

    import tailrace as tr

    dataset: Any = batches
    if whole:
        dataset = tr.batches((batches.images, batches.labels), BATCH, repeat=True)
    made = tr.Trainer(workload.loss_fn, optax.sgd(RATE), workload.init_params())
    return lambda: made.fit(dataset, steps=len(batches), progress=False).loss


def one_call_a_step(batches: HostBatches) -> Callable[[], np.ndarray]:
    import jax

    step, start = jax.jit(workload.sgd_step, donate_argnums=0), workload.init_params()

    def run() -> np.ndarray:
        params, losses = workload.fresh(start), []
        for images, labels in batches:
            params, loss = step(params, images, labels)
            losses.append(loss)
        return np.array(jax.device_get(losses))

    return run


def keras_contenders(batches: HostBatches) -> list[Contender]:
    import keras

    if keras.backend.backend() != "jax":
        raise ImportError(f"its backend here is {keras.backend.backend()}")

    def one(steps_per_execution: int) -> Contender:
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((784,)), dense(128, "relu"), dense(10)])
        model.set_weights([leaf for layer in workload.init_params() for leaf in layer])
        model.compile(
            keras.optimizers.SGD(RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )

        def run() -> np.ndarray:
            epochs, rest = divmod(len(batches), len(batches.images) // BATCH)
            if rest:
                raise SystemExit(f"--steps must be a multiple of {workload.POOL} with Keras")
            found = model.fit(
                batches.images, batches.labels, BATCH, epochs, verbose=0, shuffle=False
            )
            return np.array(found.history["loss"])

        name = f"Keras fit, steps_per_execution={steps_per_execution}"
        return Contender(name, run, "arrays, its fastest input; returns one mean loss an epoch")

    return [one(1), one(100)]


def torch_contenders(batches: HostBatches) -> list[Contender]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    note = ""
    if device == "cpu":
        # Two threads are no faster at this size, and forty times slower on a machine that is shared.
        torch.set_num_threads(1)
        note = "one thread, which is as fast as two at this size"

    def one(name: str, wrap: Callable[[Any], Any]) -> Contender:
        (w1, b1), (w2, b2) = workload.init_params()
        layers = torch.nn.Linear(784, 128), torch.nn.Linear(128, 10)
        with torch.no_grad():
            for layer, weight, bias in zip(layers, (w1, w2), (b1, b2), strict=True):
                layer.weight.copy_(torch.from_numpy(np.array(weight).T))
                layer.bias.copy_(torch.from_numpy(np.array(bias)))
        model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        forward = wrap(lambda x, y: torch.nn.functional.cross_entropy(model(x), y))

        def run() -> np.ndarray:
            losses = []
            for images, labels in batches:
                x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
                loss = forward(x.to(device, non_blocking=True), y.to(device, non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).cpu().numpy()

        return Contender(f"{name} ({device})", run, note)

    contenders = [one("PyTorch eager", lambda function: function)]
    if device == "cuda":
        contenders.append(one("torch.compile", torch.compile))
    return contenders


# -- agreement ----------------------------------------------------------------------------------


def check_losses(contenders: list[Contender]) -> str:
    """Run everybody once from the same weights; say how far the losses are from the limit's."""
    expected = next(c for c in contenders if c.name == LIMIT).run()
    lines = ["Losses of the first run, against the hand-written scan:", ""]
    for contender in contenders:
        found = contender.run()
        if len(found) != len(expected):  # means over equal stretches
            wanted = expected.reshape(len(found), -1).mean(axis=1, dtype=np.float64)
        else:
            wanted = expected
        equal = "bit-equal" if np.array_equal(found, wanted) else None
        far = float(np.max(np.abs(found - wanted)))
        lines.append(f"- {contender.name}: {equal or f'differ by {far:.1e} at most'}")
        ours = contender.name.startswith("tr.")
        # An accelerator multiplies with fewer bits, each library in its own way.
        tolerated = 1e-3 if _on_cpu() else 5e-2
        if far > tolerated or (ours and not equal and _on_cpu()):
            raise SystemExit(f"{contender.name} computes something else: {lines[-1]}")
    return "\n".join(lines)


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


# -- memory and import time, each in a process of its own ----------------------------------------


def probe_memory(name: str, steps: int) -> dict[str, float]:
    """How far the process grows while it trains, after the data was made and JAX has started."""
    import psutil

    batches = HostBatches(steps)
    make = {LIMIT: hand_written, "tr.compile + feeds": compiled_with_feeds, "tr.Trainer": trainer}
    run = make[name](batches)
    process, peak = psutil.Process(), 0
    before = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return {"grown_mb": (peak - before) / 1e6}


def memory_table(few: int = 2_000, many: int = 20_000, repeats: int = 3) -> str:
    """The growth of memory at few and at many steps; psutil is needed."""
    try:
        import psutil  # noqa: F401
    except ImportError:
        return "Memory was not measured: psutil is not installed."
    rows = []
    for name in (LIMIT, "tr.compile + feeds", "tr.Trainer"):
        grown = {few: [], many: []}
        for _ in range(repeats):
            for steps, found in grown.items():
                found.append(_python("-m", "benchmarks.feeds", "--probe", name, str(steps)))
        at_few, at_many = (
            statistics.median(json.loads(text)["grown_mb"] for text in grown[steps])
            for steps in (few, many)
        )
        rows.append((name, f"{at_few:.0f}", f"{at_many:.0f}", f"{at_many / at_few:.2f}"))
    title = "Peak growth of the process (RSS, MB; compilation included), each run in a new process:"
    headings = ("", f"{few:,} steps", f"{many:,} steps", "ratio")
    return f"{title}\n\n{report.markdown_table(headings, rows)}"


def import_table(repeats: int = 9) -> str:
    """Import times in new processes, taken in turn."""
    code = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
    found: dict[str, list[float]] = {"jax": [], "tailrace": []}
    with tempfile.TemporaryDirectory() as bytecode:
        # As after an installation: all bytecode is there, for both.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(repeats + 1):
            for module, seconds in found.items():
                took = float(_python("-c", code.format(module), environment=environment))
                if number:
                    seconds.append(took)
    jax_s, ours_s = (statistics.median(found[module]) for module in ("jax", "tailrace"))
    pairs = zip(found["tailrace"], found["jax"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return (
        f"`import tailrace` takes {ours_s:.2f} s and `import jax` {jax_s:.2f} s: "
        f"{ratio:.2f} times as long (medians of {repeats} new processes each)."
    )


def _python(*arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
