"""Random programs with and without taps: equal results, and no error that the untapped one lacks.

    python -m benchmarks.fuzz_taps [--programs N] [--seed N] [--verbose]

Each program (`benchmarks/random_programs.py`) is a function for `tr.observe`, a body for `tr.compile`,
or the loss of a `tr.Trainer`, plain or in stages, with options drawn at random. It runs twice: without
taps (for `tr.observe`: under `jax.jit`), and with random ones. State, history and outputs must be equal
bit for bit, and records of whole tensors must be what the program returns. The compiler's special case
for loops of less than about 1 KiB is switched off: docs/guarantees.md. A few programs are compiled
together; if there is a fault, they run again one by one. A program that fails without taps is left out
and counted. The exit code is 1 if anything is found.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import logging
import os
import random
import time
import traceback
import zlib
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # before JAX starts: replicas and stages need devices
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=4"
        + " --xla_disable_hlo_passes=small-while-loop-hoisting"
    )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks.random_programs import Program, is_float, is_key
from tailrace.errors import NonFiniteError, SelectionError

TOGETHER = 4
"""How many programs are compiled together: most of the time is not theirs, but a compilation's."""

X = np.random.default_rng(0).normal(size=(12, 2, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (12, 2)).astype(np.int32)
PARAMS = {
    "m": np.random.default_rng(2).normal(size=(3, 3)).astype(np.float32),
    "v": np.random.default_rng(3).normal(size=(3,)).astype(np.float32),
    "s": np.float32(0.7),
    "one": np.full(1, 0.3, np.float32),
}


def _largest(value: jax.Array) -> jax.Array:
    return jnp.abs(value).astype(jnp.float32).max(initial=0.0)


@dataclasses.dataclass
class Case:
    """A few programs that are compiled together, and their taps; everything follows from the seeds.

    Attributes:
        seeds: the numbers of the programs.
        taps: whether they are observed.
    """

    seeds: Sequence[int]
    taps: bool = True

    def __post_init__(self) -> None:
        # Of the group, so that a part of it has the options of the whole.
        self.random = random.Random(self.seeds[0] // TOGETHER)
        kinds = ["observe", "observe", "compile", "loss", "loss", "loss", "stages"]
        self.kind = self.random.choice(kinds)
        drawn = self._taps()
        self.observe = drawn if self.taps else []

    def _made(self, start: Sequence[Any], part: int = 0, *, ours: bool = True) -> list[Program]:
        """The programs, each run on its own."""
        return [
            Program(2 * seed + part, start, ours=ours).run(random.Random(seed).randint(2, 6))
            for seed in self.seeds
        ]

    # -- taps -------------------------------------------------------------------------------------

    def _select(self) -> Any:
        salt = self.random.getrandbits(16)

        def third(entry: Any) -> bool:
            return zlib.crc32(f"{entry.name}{salt}".encode()) % 3 == 0

        own = ["grad/*", "update*", "loss", "param/*", ["reduced/*", "updated/*"], "optimizer/*"]
        alone = own if self.kind in ("loss", "stages") else ["output/*", "input/*"]
        gradients = ["cotangent/*"] if self.kind in ("loss", "stages") else []
        return self.random.choice(["*", "*", "activation/*", third, *gradients, *alone])

    def _taps(self) -> list[Any]:
        reduces = ["tensor", "stats", "histogram", "norm", _largest]
        taps: list[Any] = []
        for reduce in self.random.sample(reduces, self.random.choice([1, 1, 2])):
            mode = self.random.choice(["all", "all", "sum", "final", tr.every(2), tr.every(3)])
            taps.append(tr.Tap(self._select(), mode=mode, reduce=reduce))
        if self.kind in ("loss", "stages") and self.random.random() < 0.1:
            taps.append(tr.stop_on_nonfinite())
        return taps

    # -- programs ---------------------------------------------------------------------------------

    def run(self) -> Any:
        """What the programs give: a tree of arrays."""
        return {"observe": self._observe, "compile": self._compile}.get(self.kind, self._train)()

    def _observe(self) -> Any:
        ours = self.random.random() < 0.3

        def function(m: Any, v: Any, s: Any, x: Any, y: Any) -> Any:
            start = [m, v, s, x, y] if ours else [m, v, s, x, y, jax.random.key(3)]
            programs = self._made(start, ours=ours)
            with jax.named_scope("probe"):
                seen = jnp.tanh(programs[0].float())
            outputs = [[v for v in p.values[5:] if not is_key(v)][-6:] for p in programs]
            return {"seen": seen, "more": [outputs, outputs[0][:1], m]}

        args = PARAMS["m"], PARAMS["v"], PARAMS["s"], X[0], Y[0]
        if not self.taps and not ours:
            return jax.jit(function)(*args)
        output, records = tr.observe(function, self.observe)(*args)
        seen = output["seen"]
        expected = {"activation/probe": seen, "output/seen": seen, "input/0": args[0]}
        if self.taps:
            _check_records(records, {name: value[None] for name, value in expected.items()})
        return output

    def _compile(self) -> Any:
        def body(state: Any) -> Any:
            programs = self._made([*state.values(), X[0]])
            parts = [p.like(v) for p, v in zip(itertools.cycle(programs), state.values())]
            drawn = [jnp.tanh(v) if is_float(v) else v for v in parts]
            rest = sum((_total(p.values[4:]) for p in programs), start=jnp.float32(0))
            return {**dict(zip(state, drawn, strict=True)), "s": drawn[0].sum() + rest}

        steps, once = self.random.choice([1, 2, 3, 5]), self.random.random() < 0.2
        program = tr.compile(
            body if once else lambda state: tr.repeat(steps, body, state), observe=self.observe
        )
        state = {key: PARAMS[key] for key in ("m", "v", "s")}
        return [program(state), program(state)]

    def _train(self) -> Any:
        r, staged = self.random, self.kind == "stages"

        def loss(params: Any, x: Any, y: Any) -> Any:
            start = [*params.values(), x, y]
            programs = self._made(start)
            if staged:
                with jax.named_scope("first"):
                    hidden = [
                        _joined([*p.values[6:], *start], seed)
                        for p, seed in zip(programs, self.seeds, strict=True)
                    ]
                hidden = tr.stage_boundary(jnp.concatenate(hidden))
                programs = self._made([hidden, params["v"], y], part=1)
            totals = [_total([p.values[0], *p.values[3:]]) for p in programs]
            total = functools.reduce(jnp.add, totals)
            return total, {"seen": _total(programs[0].values[-2:]), "last": totals[-1]}

        options: dict[str, Any] = {"precision": r.choice([None, None, "bfloat16", "float16"])}
        microbatches, replicas = r.choice([4] if staged else [1, 1, 2, 3]), r.choice([1, 1, 1, 2])
        if staged:
            options["recompute"] = r.choice([False, False, True])
            model: Any = tr.Pipeline(
                loss, accumulation=microbatches, recompute=options.pop("recompute")
            )
        else:
            model, options["accumulation"] = loss, microbatches
        trainer = tr.Trainer(
            model,
            r.choice([optax.sgd(0.1), optax.adam(0.01), optax.sgd(0.1, momentum=0.9)]),
            PARAMS,
            replicas=replicas,
            steps_per_execution=2,
            observe=self.observe,
            **options,
        )
        steps = r.choice([1, 3])
        count = steps * microbatches * replicas
        rows = [(X[i % 12], Y[i % 12]) for i in range(count)]
        try:
            history = trainer.fit(rows, steps=steps, progress=False)
        except NonFiniteError:  # what the guard is for
            return None
        if self.taps and count == steps:
            _check_records(trainer.records, {"loss": np.asarray(history.loss)})
        return [jax.tree.leaves(trainer.state), history.loss, history["seen"], history["last"]]


def _joined(values: list[Any], seed: int) -> jax.Array:
    """A few of the floats among some values, in one vector."""
    floats = [v.astype(jnp.float32).reshape(-1) for v in values if is_float(v)]
    chosen = random.Random(seed).sample(floats, min(4, len(floats)))
    return jnp.concatenate([jnp.tanh(one)[:2] for one in chosen])


def _total(values: list[Any]) -> jax.Array:
    total = jnp.float32(0)
    for value in values:
        if is_float(value) and value.size:
            total += jnp.tanh(value.astype(jnp.float32)).mean()
    return total


def _check_records(records: Any, expected: dict[str, Any]) -> None:
    """Records of whole tensors in every step are the values that the program returns."""
    for name, value in expected.items():
        if (name, "tensor") in records and len(records[name, "tensor"].values) == len(value):
            found = records[name, "tensor"].values
            assert _bits(found) == _bits(value), f"the record of {name} is {found}, not {value}"


def _bits(leaf: Any) -> Any:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.array(leaf)
    if array.dtype.kind in "fcV" or array.dtype.name == "bfloat16":
        array[np.isnan(array)] = np.nan  # a NaN is a NaN
    return array.shape, array.dtype, array.tobytes()


def difference(plain: Any, tapped: Any) -> str:
    """Where two trees differ in a bit; empty if they do not."""
    if plain is None or tapped is None:
        return ""
    ours, theirs = jax.tree.leaves(tapped), jax.tree.leaves(plain)
    if len(ours) != len(theirs):
        return f"{len(ours)} leaves, not {len(theirs)}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if _bits(a) != _bits(b):
            return f"leaf {number}: {np.asarray(a)!r}, not {np.asarray(b)!r}"
    return ""


def check(seeds: Sequence[int]) -> list[tuple[int, str, str]]:
    """Run programs both ways: for each its number, the outcome, and what there is to say about it.

    Programs of which one fails without taps, or shows a fault, are run again in smaller groups.
    """
    outcome, about = _compared(seeds)
    if outcome != "equal" and len(seeds) > 1:
        half = len(seeds) // 2
        parts = [*check(seeds[:half]), *check(seeds[half:])]
        if outcome == "left out" or any(is_fault(each) for _, each, _ in parts):
            return parts
        return (
            [(seeds[0], outcome, f"(together) {about}"), *parts[1:]] if is_fault(outcome) else parts
        )
    return [(seed, outcome, about) for seed in seeds]


def _compared(seeds: Sequence[int]) -> tuple[str, str]:
    try:
        plain = Case(seeds, taps=False).run()
    except Exception as error:
        return "left out", f"{type(error).__name__}: {str(error)[:200]}"
    tapped = Case(seeds)
    told = f"{tapped.kind} {list(seeds)}, taps {tapped.observe}"
    try:
        found = tapped.run()
    except SelectionError:  # the taps that were drawn select nothing in this program
        return "selects nothing", ""
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-4:])
        return f"raises {type(error).__name__}", f"{where}\n{told}"
    differs = difference(plain, found)
    return ("differs", f"{differs}\n{told}") if differs else ("equal", "")


def is_fault(outcome: str) -> bool:
    """Whether an outcome is one that must not be."""
    return outcome == "differs" or outcome.startswith("raises")


def main() -> None:
    """Run as many programs as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for first in range(given.seed, given.seed + given.programs, TOGETHER):
        found = check(range(first, min(first + TOGETHER, given.seed + given.programs)))
        counts.update(outcome for _, outcome, _ in found)
        for seed, outcome, about in found:
            if given.verbose or is_fault(outcome):
                print(f"{seed}: {outcome} {about}", flush=True)
        jax.clear_caches()
        print(f"{first}... {time.perf_counter() - start:.0f} s: {dict(counts)}", flush=True)
    raise SystemExit(any(map(is_fault, counts)))


if __name__ == "__main__":
    main()
