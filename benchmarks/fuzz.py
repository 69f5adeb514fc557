"""Bad input to everything that loads or is constructed: each answer is a value or a TailraceError.

    python -m benchmarks.fuzz [--inputs N] [--seed N] [--only NAME]

Inputs are drawn by hypothesis. A load path gets what it wrote itself, damaged: cut off, with bits
flipped, half written, with another file in its place, with sizes and types in its JSON that are wrong.
A constructor gets good arguments of which one or two are replaced by something else. Whatever is
raised and is no sentence of ours is listed by where it came from, with the input, and the exit code is
1. With atheris installed, `--atheris NAME` mutates the bytes of one load path by coverage instead.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import io
import json
import logging
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import tailrace as tr
from tailrace.feeds.reader import Reader

MOST_MEMORY = 8 << 30

# -- what is wrong ----------------------------------------------------------------------------------


def _takes_two(a, b):
    return a


def _raises(*_: Any) -> Any:
    raise ZeroDivisionError("the user's own")


def _endless():
    while True:
        yield np.ones(2, np.float32)


class Odd:
    """Nothing in particular."""

    def __repr__(self) -> str:
        return "Odd()"


NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**63), True, False]),
    st.floats(),
    st.sampled_from([np.int64(3), np.float32(2), np.bool_(True), 1j]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "auto", "all", "grouped", "mean", "loss", "grad/*", "[", "\0", "../x", "a.b"]
    ),
    st.binary(max_size=4),
)
ARRAYS = st.sampled_from(
    [
        np.zeros(()),
        np.zeros((0, 3), np.float32),
        np.ones((8, 2), ">f4"),
        np.array([None, Odd()], dtype=object),
        np.array(["a", "b"]),
        np.zeros(3, [("x", "f4")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.float32([np.nan, np.inf]),
        np.ones(4, np.complex64),
        np.ma.masked_array([1, 2]),
    ]
)
THINGS = st.sampled_from(
    [None, ..., NotImplemented, Odd(), Odd, int, print, _takes_two, _raises, _endless, slice(3)]
)
LEAVES = st.one_of(NUMBERS, TEXTS, ARRAYS, THINGS)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(TEXTS, st.integers(-1, 9)), inner, max_size=2),
        st.lists(inner, max_size=3).map(iter),
    ),
    max_leaves=4,
)


# -- constructors ---------------------------------------------------------------------------------


def _loss(params, x):
    return ((x - params) ** 2).mean()


X = np.ones((16, 2), np.float32)


def _sum(params, x):
    return ((x - params["a"]) ** 2).mean()


def _stage(params, x):
    return x * params


def _trainer(**options: Any) -> Any:
    return tr.Trainer(
        **{"loss_fn": _loss, "optimizer": optax.sgd(0.1), "params": np.float32(0), **options}
    )


def _infeed(**options: Any) -> None:
    with tr.InfeedQueue(**options) as queue:
        queue.spec()


def _dataset(dataset: Any) -> None:
    reader = Reader(dataset)
    reader.read(reader.available(3))


GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Tap": (tr.Tap, {"select": "grad/*", "mode": "all", "reduce": "stats", "live": False}),
    "every": (tr.every, {"n": 3}),
    "stop_on_nonfinite": (tr.stop_on_nonfinite, {"select": "loss"}),
    "plan": (
        tr.plan,
        {
            "stages": 2,
            "microbatches": 4,
            "schedule": "grouped",
            "device_mapping": [0, 1],
            "training": True,
        },
    ),
    "what_if": (
        tr.what_if,
        {
            "forward": [1.0, 2.0],
            "backward": [2.0, 3.0],
            "microbatches": 4,
            "schedules": ["grouped"],
            "stages": 2,
            "devices": 2,
            "transfer": 0.1,
            "update": 0.1,
            "stash_bytes": [4, 4],
            "training": True,
        },
    ),
    "batches": (
        tr.batches,
        {
            "arrays": X,
            "batch_size": 4,
            "shuffle": True,
            "seed": 0,
            "repeat": False,
            "drop_remainder": True,
        },
    ),
    "InfeedQueue": (
        _infeed,
        {"dataset": [X, X], "prefetch": 1, "resident": None, "timeout_s": 5.0},
    ),
    "dataset": (_dataset, {"dataset": [X, X]}),
    "OutfeedQueue": (
        tr.OutfeedQueue,
        {"mode": "all", "live": False, "most_bytes": 99, "when_full": "raise"},
    ),
    "MaybeOutfeedQueue": (tr.MaybeOutfeedQueue, {"mode": "all", "filters": ["a"]}),
    "Accumulation": (
        tr.Accumulation,
        {"microbatches": 2, "dtype": "float32", "reduction": "mean", "weight": None},
    ),
    "Pipeline": (
        tr.Pipeline,
        {
            "stages": [_stage, _stage],
            "loss_fn": _loss,
            "accumulation": 4,
            "schedule": "grouped",
            "device_mapping": [0, 0],
            "inputs": (),
            "shared": (),
            "recompute": False,
        },
    ),
    "Trainer": (
        _trainer,
        {
            "loss_fn": _loss,
            "optimizer": optax.sgd(0.1),
            "params": np.float32(0),
            "steps_per_execution": 2,
            "accumulation": 2,
            "replicas": 1,
            "offload_optimizer_state": False,
            "shard_optimizer_state": False,
            "offload_activations": False,
            "model_state": None,
            "replica_state": "mean",
            "seed": 0,
            "observe": "grad/*",
            "observe_bytes": 1 << 20,
        },
    ),
    "run_dir": (_trainer, {"run_dir": None}),
    "configure": (tr.configure, {"devices": None, "platform": "cpu"}),
    "compile": (
        tr.compile,
        {"function": _loss, "replicas": 1, "seed": 0, "observe": "loss", "observe_bytes": 1 << 20},
    ),
    "observe": (
        tr.observe,
        {"function": _loss, "taps": "loss", "seed": 0, "observe_bytes": 1 << 20, "device": None},
    ),
    "repeat": (tr.repeat, {"n": 2, "body": lambda x: x, "inputs": 1.0, "infeed": None}),
    "while_loop": (
        tr.while_loop,
        {"condition": lambda x: x < 1, "body": lambda x: x, "inputs": 1.0, "maximum_iterations": 3},
    ),
    "gradient_accumulation": (
        tr.optimizers.gradient_accumulation,
        {"optimizer": optax.sgd(0.1), "microbatches": 2, "dtype": None, "reduction": "mean"},
    ),
    "cross_replica": (tr.optimizers.cross_replica, {"optimizer": optax.sgd(0.1)}),
    "dataset_benchmark": (
        tr.dataset_benchmark,
        {"dataset": [X, X], "epochs": 1, "elements_per_epoch": 2, "timeout_s": 0.2},
    ),
    "diff": (tr.diff, {"first": "no run", "second": "no run", "rtol": 0.0, "atol": 0.0}),
    "open_run": (tr.open_run, {"directory": "no run", "limit": None}),
    "distributed": (
        functools.partial(tr.distributed.initialize, timeout_s=0.05),
        {"coordinator_address": "no address", "num_processes": 2, "process_id": 0},
    ),
    "share": (tr.distributed.share, {"dataset": [X], "replicas": 2}),
    "print_tensor": (
        tr.print_tensor,
        {
            "x": X,
            "title": "t",
            "print_gradient": True,
            "summarise_threshold": 10,
            "edge_items": 3,
            "max_line_width": 80,
            "digits": 3,
            "float_format": "auto",
            "separator": ", ",
            "open_bracket": "(",
            "close_bracket": ")",
        },
    ),
}
"""Constructors and functions, each with arguments that are good (or nearly)."""


@st.composite
def _arguments(draw: Any, good: dict[str, Any]) -> dict[str, Any]:
    wrong = draw(st.lists(st.sampled_from(sorted(good)), min_size=1, max_size=2, unique=True))
    return {**good, **{name: draw(JUNK) for name in wrong}}


# -- load paths -----------------------------------------------------------------------------------

WRONG_JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", "float32", "|O", "<M8[s]"]
    ),
    st.sampled_from([[], {}, [1, 2], {"a": 1}, [[[[]]]], ["a"], [10**15], {"name": "gzip"}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a tree of JSON."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def changed_json(draw: Any, text: bytes) -> bytes:
    """The same JSON with one or two values replaced, removed or nested."""
    value = [json.loads(text)]
    for _ in range(draw(st.integers(1, 2))):
        path = (0, *draw(st.sampled_from(places(value[0]))))
        holder = functools.reduce(lambda tree, key: tree[key], path[:-1], value)
        if isinstance(holder, dict) and draw(st.booleans()):
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(draw(WRONG_JSON))
    return json.dumps(value[0]).encode()


def damaged(draw: Any, content: bytes, is_json: bool, others: list[bytes]) -> bytes:
    """The content of a file after something happened to it."""
    kinds = ["cut", "flip", "hole", "foreign", "junk", "grown", "empty"]
    kind = draw(st.sampled_from([*kinds, *(["json"] * 8 if is_json else [])]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "json":
        return changed_json(draw, content)
    if kind == "cut":
        return content[:at]
    if kind == "flip" and content:
        whole = bytearray(content)
        for _ in range(draw(st.integers(1, 3))):
            whole[draw(st.integers(0, len(whole) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(whole)
    if kind == "hole":
        return content[:at] + bytes(len(content) - at)
    if kind == "foreign":
        return draw(st.sampled_from(others))
    if kind == "junk":
        return draw(
            st.one_of(st.binary(max_size=64), st.just(b"[" * 5000), st.just(b'{"a":' * 5000))
        )
    if kind == "grown":
        return content + draw(st.binary(min_size=1, max_size=40))
    return b""


class Files:
    """A folder that a load path reads: one of its files is damaged, read, and put back."""

    def __init__(self, folder: Path, read: Callable[[Path], Any]) -> None:
        self.folder, self.read = folder, read
        self.names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        self.contents = {name: (folder / name).read_bytes() for name in self.names}

    def strategy(self) -> Any:
        @st.composite
        def draw_one(draw: Any) -> tuple[str, bytes | None]:
            name = draw(st.sampled_from(self.names))
            if draw(st.integers(0, 19)) == 0:
                return name, None  # the file is not there
            is_json = name.endswith(".json")
            return name, damaged(draw, self.contents[name], is_json, list(self.contents.values()))

        return draw_one()

    def __call__(self, name: str, content: bytes | None) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        try:
            self.read(self.folder)
        finally:
            path.write_bytes(self.contents[name])


def read_run(directory: Path) -> None:
    """Everything that a run has."""
    run = tr.open_run(directory)
    repr(run), repr(run.records), run._repr_html_()
    for pair in run.records:
        _ = run.records[pair]
    _ = run.history.loss, run.catalogue, str(run.catalogue), run.is_ended
    if run.plan is not None:
        repr(run.plan)


def make_run(folder: Path) -> Files:
    """A small run with a plan, statistics, histograms and a tree of values."""
    trainer = tr.Trainer(
        lambda w, x: (((x - w["a"]) ** 2).mean(), {"mean": x.mean()}),
        optax.sgd(0.1),
        {"a": np.float32([0, 1]), "b": np.float32(1)},
        observe=[tr.Tap("grad/*"), tr.Tap("grad/a", mode=tr.every(2), reduce="tensor")],
        run_dir=folder,
        steps_per_execution=4,
    )
    trainer.fit(tr.batches(X, 2), steps=8, progress=False)
    (folder / "lock").unlink()
    about = json.loads((folder / "run.json").read_text())
    about["plan"] = tr.plan(2, 4).to_json(ticks=False)
    (folder / "run.json").write_text(json.dumps(about))
    return Files(folder, read_run)


def make_plans(folder: Path) -> Files:
    """Plans as JSON and as text."""
    from tailrace.pipeline import Plan

    folder.mkdir()
    for number, made in enumerate(
        (tr.plan(2, 4), tr.plan([1, 2, 1], 6), tr.plan(3, 6, "interleaved"))
    ):
        (folder / f"{number}.json").write_text(made.to_json())
        (folder / f"{number}.txt").write_text(made.to_text())

    def read(where: Path) -> None:
        for path in where.glob("*"):
            text = path.read_text(errors="replace")
            plan = Plan.from_json(text) if path.suffix == ".json" else Plan.from_text(text)
            repr(plan), plan.stages, plan.devices

    return Files(folder, read)


def make_saves(folder: Path) -> Files:
    """What models of `tailrace.torch` save; the load path without a compilation."""
    from tailrace.torch.models.saving import check_same_form, read_state, write_state

    folder.mkdir()
    tree = {"a": np.float32([[1, 2]]), "b": {"c": np.arange(3)}}
    kinds = {"step": int, "seed": int, "optimizer": str, "unused": list, "late": dict}
    note = {"step": 3, "seed": 0, "optimizer": "SGD", "unused": [], "late": {}}
    write_state(folder / "model.npz", {"param": tree, "buffer": {}}, note)

    def read(where: Path) -> None:
        trees, _ = read_state(where / "model.npz", kinds)
        check_same_form(trees.get("param", {}), tree, "parameters")

    return Files(folder, read)


def make_options(folder: Path) -> Files:
    """Option files of `tailrace.compat.poptorch`."""
    from tailrace.compat import poptorch

    folder.mkdir()
    lines = [
        "deviceIterations(4)",
        "Training.gradientAccumulation(2)  # a comment",
        "outputMode(poptorch.OutputMode.All)",
        "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))",
        "randomSeed(7)",
    ]
    (folder / "options").write_text("\n".join(lines))
    (folder / "options.json").write_text(
        '{"Training.gradientAccumulation": 4, "deviceIterations": 2}'
    )

    def read(where: Path) -> None:
        poptorch.Options().loadFromFile(where / "options")
        file = where / "options.json"
        text = file.read_text(errors="replace") if file.exists() else ""
        poptorch.Options().from_json(text)

    return Files(folder, read)


def make_checkpoints(folder: Path) -> Files:
    """A checkpoint with an optimizer's state, a key and a history in a file of its own."""
    from tailrace.trainer.checkpoints import file_list, long_arrays

    def made() -> Any:
        return _trainer(
            optimizer=optax.sgd(0.1, 0.9), params={"a": np.float32([0, 1])}, loss_fn=_sum
        )

    trainer, fresh, long = made(), made(), long_arrays.LONG
    long_arrays.LONG = 16
    try:
        trainer.fit(tr.batches(X, 2), steps=8, progress=False)
        trainer.save(folder)
    finally:
        long_arrays.LONG = long

    def read(where: Path) -> None:
        try:
            fresh.restore(where)
        except tr.TailraceError:
            # The list of files finds nearly everything. Who plants a checkpoint leaves it out.
            listed = where / file_list.FILE
            if not listed.exists():
                raise
            content = listed.read_bytes()
            listed.unlink()
            try:
                fresh.restore(where)
            finally:
                listed.write_bytes(content)
            raise

    return Files(folder, read)


def make_bundles(folder: Path) -> Files:
    """The bundle of a step that was not finite."""
    guard = tr.stop_on_nonfinite("loss", bundle=folder)
    data = [X, X * np.nan]
    with contextlib.suppress(tr.TailraceError):
        _trainer(observe=[guard], params=np.ones(2, np.float32)).fit(data, progress=False)
    fresh = _trainer(params=np.ones(2, np.float32))
    return Files(folder, lambda where: fresh.replay_bundle(where, X))


LOADED = {
    "runs": make_run,
    "checkpoints": make_checkpoints,
    "bundles": make_bundles,
    "plans": make_plans,
    "saves": make_saves,
    "options": make_options,
}
"""Load paths: what writes the files, and reads them."""


# -- running --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Found:
    """What a fuzzer has seen.

    Attributes:
        inputs: how many inputs there were, by target.
        refused: how many of them were answered with a sentence.
        failures: other exceptions by target, type and place: how often, and the first input.
        slowest: the longest that an input took, and which.
    """

    inputs: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: dict[tuple[str, str, str], list[Any]] = dataclasses.field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")

    def tell(self, target: str, call: Callable[[], Any], shown: Callable[[], str]) -> None:
        """Call, and remember how it ended."""
        self.inputs[target] += 1
        started = time.perf_counter()
        try:
            call()
        except tr.TailraceError as error:
            self.refused[target] += 1
            if len(str(error)) < 20 or type(error).__str__ is KeyError.__str__:
                self.note(target, error, shown)
        except Exception as error:
            self.note(target, error, shown)
        took = time.perf_counter() - started
        if took > self.slowest[0]:
            self.slowest = (took, f"{target}: {shown()[:300]}")

    def note(self, target: str, error: Exception, shown: Callable[[], str]) -> None:
        """Remember what was no sentence."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "/tailrace/" in f.filename.replace("\\", "/")] or frames[-1:]
        place = f"{ours[-1].filename.rpartition('/tailrace/')[2]}:{ours[-1].lineno}"
        key = (target, type(error).__name__, place)
        if key not in self.failures:
            print("found:", *key, shown()[:200], flush=True)
        kept = self.failures.setdefault(key, [0, f"{shown()[:400]}\n      {str(error)[:300]}"])
        kept[0] += 1


def fuzz(inputs: int, number: int, folder: Path, only: str | None = None) -> Found:
    """Try a number of inputs, spread over all targets.

    Args:
        inputs: how many, in all.
        number: the seed.
        folder: an empty one, to write in.
        only: one target; None: all.
    """
    found = Found()
    names = [name for name in (*GOOD, *LOADED) if only is None or name == only]
    # Load paths have many more states than a constructor.
    shares = {name: 6 if name in LOADED else 1 for name in names}
    for name in names:
        count = max(1, inputs * shares[name] // sum(shares.values()))
        started = time.perf_counter()
        fuzz_one(name, count, number, folder, found)
        took = time.perf_counter() - started
        print(
            f"{name:24} {count:8,} inputs, {found.refused[name]:8,} refused, {took:5.0f} s",
            flush=True,
        )
    return found


def fuzz_one(name: str, count: int, number: int, folder: Path, found: Found) -> None:
    if name in LOADED:
        files = LOADED[name](folder / name)
        strategy: Any = files.strategy()

        def run(one: Any) -> None:
            found.tell(name, lambda: files(*one), lambda: repr(one))
    else:
        function, good = GOOD[name]
        strategy = _arguments(good)

        def run(one: Any) -> None:
            found.tell(name, lambda: function(**one), lambda: f"{name}({one!r})")

    choose = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        seed(number)(choose(given(strategy)(run)))()


def _atheris(name: str, folder: Path) -> None:
    import atheris  # pyright: ignore

    files = LOADED[name](folder / name)

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        where = files.names[provider.ConsumeIntInRange(0, len(files.names) - 1)]
        try:
            files(where, provider.ConsumeBytes(1 << 20))
        except tr.TailraceError:
            return

    atheris.instrument_all()
    atheris.Setup(sys.argv[:1], one)
    atheris.Fuzz()


def limit_memory() -> None:
    """An input that takes all memory is a failure, and not the end of the machine."""
    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    parser.add_argument("--atheris", metavar="NAME", choices=sorted(LOADED))
    arguments = parser.parse_args()
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    tr.configure(devices=1, platform="cpu")
    limit_memory()
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        if arguments.atheris:
            _atheris(arguments.atheris, folder)
        started = time.perf_counter()
        found = fuzz(arguments.inputs, arguments.seed, folder, arguments.only)
    finally:
        shutil.rmtree(folder)
    took = time.perf_counter() - started
    print(
        f"{sum(found.inputs.values()):,} inputs in {took:.0f} s; slowest {found.slowest[0]:.2f} s"
    )
    print(f"  {found.slowest[1]}")
    for (name, kind, place), (count, text) in sorted(found.failures.items()):
        print(f"{name}: {kind} at {place}, {count} times\n      {text}")
    print(f"{len(found.failures)} kinds of answers that are no sentence")
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
