"""What fingerprints cost, and whether past steps come again bit for bit.

    python -m benchmarks.fingerprints                    # a small MLP, 10,000 steps, 50 replayed
    python -m benchmarks.fingerprints --gpt              # GPT-2 small (124 M parameters), bfloat16
    python -m benchmarks.fingerprints --gpt --layers 2 --width 128 --length 64 --replays 0
    python -m benchmarks.fingerprints --only --rows 100 --flips 1000 --kills 100

Fits without fingerprints, with those of the state and elements only, and with all are interleaved in
one process; each has a trainer of its own. The difference between the last two is the gradients'.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks.lengths import gpt_model, gpt_tokens
from benchmarks.report import settle
from tailrace.cli.command_line import main as cli
from tailrace.trainer.sentinel_faults import Fault, Faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpt", action="store_true", help="GPT-2 small instead of a small MLP")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--per-execution", type=int, default=None, help="steps (GPT: 10, MLP: 100)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=None, help="of the run (GPT: 200, MLP: 10,000)"
    )
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--only", action="store_true", help="no cost, no replays: what follows")
    parser.add_argument("--rows", type=int, default=0, help="corrupted rows to find")
    parser.add_argument("--flips", type=int, default=0, help="flipped bits to find")
    parser.add_argument("--kills", type=int, default=0, help="kills of a training, then audited")
    given = parser.parse_args()
    per = given.per_execution or (10 if given.gpt else 100)
    steps = given.steps or (200 if given.gpt else 10_000)
    if given.gpt:
        params, loss_fn = gpt_model(given.layers, given.width, given.length)
        elements = gpt_tokens(given.batch, given.length)
        data: Callable[[], Any] = lambda: itertools.cycle(elements)  # noqa: E731
    else:
        params, loss_fn, batches = small_mlp()
        data = lambda: batches  # noqa: E731

    def trainer_of(**options: Any) -> tr.Trainer:
        optimizer = optax.adamw(1e-4)
        return tr.Trainer(loss_fn, optimizer, params, steps_per_execution=per, **options)

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {per} steps an execution")
    if not given.only:
        print_cost(trainer_of, data, given.rounds, per)
        if given.replays:
            print_replays(trainer_of, data, steps, given.replays)
    if given.rows:
        print_rows(given.rows)
    if given.flips:
        print_flips(given.flips)
    if given.kills:
        print_kills(given.kills)


def print_cost(make: Callable[..., tr.Trainer], data: Any, rounds: int, per: int) -> None:
    """The time of a step without, with those of the state, with all; medians of interleaved fits."""
    trainers = {"none": make(), "state": make(fingerprint=True), "all": make(fingerprint=True)}
    without_gradients(trainers["state"], data())
    took: dict[str, list[float]] = {name: [] for name in trainers}
    length = 20 * per
    for trainer in trainers.values():
        trainer.fit(data(), steps=length)
    settle(list(trainers.values()))
    for trainer in trainers.values():  # the first execution of a new program takes longer
        trainer.fit(data(), steps=length)
    for number in range(rounds):
        order = list(trainers) if number % 2 else list(reversed(trainers))
        for name in order:
            started = time.perf_counter()
            trainers[name].fit(data(), steps=length)
            took[name].append((time.perf_counter() - started) / length)
    print(f"{'':10}{'us a step':>12}{'least':>12}{'ratio':>9}{'compiled s':>12}")
    for name, values in took.items():
        ratio = statistics.median(a / b for a, b in zip(values, took["none"], strict=True))
        compiled = sum(one.seconds for one in trainers[name].compilations)
        print(
            f"{name:10}{statistics.median(values) * 1e6:12.2f}{min(values) * 1e6:12.2f}{ratio:9.4f}"
            f"{compiled:12.1f}"
        )
    print(f"medians of {rounds} rounds; ratios are of the fits of one round")


def without_gradients(trainer: tr.Trainer, data: Any) -> None:
    """Leave the gradients out of a trainer's fingerprints, before its first fit."""
    engine = trainer.engine
    engine.use(data)
    runner = engine.runner
    runner.wanted = {
        position: [want for want in wants if not want.digest]
        for position, wants in runner.wanted.items()
    }


def print_replays(make: Callable[..., tr.Trainer], data: Any, steps: int, count: int) -> None:
    """Random steps of a run, replayed by a trainer of their own."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(fingerprint=True)
        every = max(1, steps // 20)
        kept = tr.Checkpoint(f"{folder}/kept", every=every, keep=1 + steps // every)
        trainer.fit(data(), steps=steps, checkpoint=kept)
        chosen = np.random.default_rng(0).choice(steps, min(count, steps), replace=False)
        proved, seconds = [], []
        for step in map(int, sorted(chosen)):
            started = time.perf_counter()
            found = make(fingerprint=True).replay(
                step, data(), observe=[tr.Tap("reduced/*", reduce="norm")], checkpoint=kept
            )
            seconds.append(time.perf_counter() - started)
            proved.append(found.proved)
            if not found.proved:
                print(found)
    print(
        f"{sum(map(bool, proved))} of {len(proved)} random steps of a run of {steps:,} proved equal, "
        f"median {statistics.median(seconds):.2f} s each"
    )


def print_rows(count: int) -> None:
    """One wrong label among 1,000 batches, again and again: whether its row is named."""
    params, loss_fn, recipe = small_mlp()
    images, labels = recipe.leaves
    named = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        row = int(rng.integers(len(labels)))
        x = np.array(images)
        x[row] = rng.normal(size=784) * 30
        data = tr.batches((x, labels), 4, shuffle=True, seed=seed)  # 1,024 batches
        step = int(np.argwhere(data.rows(0, len(data)) == row)[0, 0])
        with tempfile.TemporaryDirectory() as folder:
            trainer = tr.Trainer(loss_fn, optax.sgd(0.01), params, steps_per_execution=64)
            trainer.fit(data, epochs=1, checkpoint=folder)
            found = trainer.explain_step(step, data, checkpoint=folder)
        named += int(found.rows["row"][0]) == row
    print(f"a corrupted row among 1,024 batches is named {named} times of {count}")


def print_flips(count: int) -> None:
    """One bit of one tensor in one step, flipped once: whether it is found, and what is named."""
    params, loss_fn, data = two_layers()
    trainer = tr.Trainer(loss_fn, optax.adam(1e-2), params, steps_per_execution=4, sentinel=1.0)
    trainer.engine.use(data[:4])
    faults = Faults(trainer.engine)
    trainer.fit(data[:4], steps=4)
    start = trainer.state
    trainer.fit(data[4:8], steps=4)  # without a fault: the program with its ports, as it should be
    right = jax.tree.map(np.asarray, trainer.params)
    rng, seen = np.random.default_rng(0), collections.Counter()
    for _ in range(count):
        entry = faults.entries[rng.integers(len(faults.entries))]
        index = int(rng.integers(math.prod(entry.shape)))
        bits = 8 * np.dtype(entry.dtype).itemsize
        fault = Fault(entry.name, int(rng.integers(4, 8)), index, int(rng.integers(bits)))
        trainer.engine.state, trainer.engine.step = start, 4
        faults.arm(fault)
        error = None
        try:
            trainer.fit(data[4:8], steps=4)
        except tr.errors.CorruptionError as raised:
            error = raised
        after = jax.tree.map(np.asarray, trainer.params)
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), after, right)
        seen["changed"] += not all(jax.tree.leaves(same))
        seen["found"] += error is not None
        seen["missed"] += error is None and not all(jax.tree.leaves(same))
        if error is not None:
            hit = (error.step, error.names[0]) == (fault.step, fault.name)
            seen["named"] += hit
            if not hit:
                print(f"  {fault}: {error.names[0]} in step {error.step}")
    print(
        f"of {count} flips in {len(faults.entries)} tensors {seen['changed']} changed a parameter, "
        f"{seen['missed']} of those were missed; {seen['found']} were found, step and tensor named "
        f"right in {seen['named']} ({100 * seen['named'] / max(1, seen['found']):.1f} %)"
    )


def print_kills(count: int) -> None:
    """A training that is killed and taken up again and again: whether its audit is clean."""
    params, loss_fn, data = two_layers()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        kept = tr.Checkpoint(f"{folder}/kept", every=8)
        killed, steps = 0, 30 * count

        def batches() -> Any:
            x, y = (np.concatenate(leaf) for leaf in zip(*data, strict=True))
            return tr.batches((x, y), 4, shuffle=True, repeat=True)

        while True:
            trainer = tr.Trainer(
                loss_fn,
                optax.adam(1e-2),
                params,
                steps_per_execution=2,
                fingerprint=True,
                run_dir=f"{folder}/run",
            )
            end = int(rng.integers(1, 40)) if killed < count else 10**9
            try:
                trainer.fit(batches(), steps=steps, checkpoint=kept, callbacks=[Kill(end)])
                break
            except Killed:
                killed += 1
        clean = cli(["audit", f"{folder}/run"]) == 0
    print(f"{killed} kills, {steps} steps: the audit is {'clean' if clean else 'NOT clean'}")


class Killed(Exception):
    """Stands for the end of a process."""


class Kill(tr.Callback):
    """Ends a fit after a number of its steps, without a chance to save."""

    def __init__(self, after: int) -> None:
        self._left = after

    def on_execution_end(self, trainer: tr.Trainer, execution: Any) -> None:
        """Count down."""
        self._left -= 2
        if self._left <= 0:
            raise Killed


def two_layers() -> tuple[Any, Any, list[Any]]:
    """A small regression, whose program is compiled quickly: 8-16-1, batches of 4."""
    rng = np.random.default_rng(0)
    params = {
        "first": (rng.normal(size=(8, 16)) * 0.3).astype(np.float32),
        "second": (rng.normal(size=16) * 0.2).astype(np.float32),
    }

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        with jax.named_scope("hidden"):
            h = jnp.tanh(x @ params["first"])
        with jax.named_scope("out"):
            out = h @ params["second"]
        return ((out - y) ** 2).mean()

    x = rng.normal(size=(64, 4, 8)).astype(np.float32)
    return params, loss_fn, [(one, np.sin(one.sum(axis=1))) for one in x]


def small_mlp() -> tuple[Any, Any, tr.data.Batches]:
    """A classifier of random digits: 784-128-10, batch 32."""
    rng = np.random.default_rng(0)
    params = {
        "first": (rng.normal(size=(784, 128)) * 0.05).astype(np.float32),
        "second": (rng.normal(size=(128, 10)) * 0.1).astype(np.float32),
    }

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        out = jnp.tanh(x @ params["first"]) @ params["second"]
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    x = rng.normal(size=(4096, 784)).astype(np.float32)
    y = rng.integers(0, 10, 4096).astype(np.int32)
    return params, loss_fn, tr.batches((x, y), 32, shuffle=True, repeat=True)


if __name__ == "__main__":
    main()
