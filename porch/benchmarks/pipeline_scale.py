"""What a pipeline adds to the work itself: four stages on one device against `accumulation=8`.

    python -m benchmarks.pipeline_scale          # a GPT of 4 layers, width 128, for a CPU
    python -m benchmarks.pipeline_scale --gpt    # GPT-2 small (124 M), batch 8 x 1024, for a GPU

Parameters are float32, the computation is bfloat16, the optimizer AdamW. Both programs compute the
same: what the pipeline takes longer and larger is its own. The planned stash is the sum, over stages,
of the slots of the plan times the bytes that one microbatch leaves there. Operations are counted in
the compiled program, however often they run.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks.report import Contender, machine_record, markdown_table, measure
from tailrace.pipeline.running.report import report

STAGES, COUNT = 4, 8  # stages, and microbatches of a step
OPERATIONS = ("dynamic-update-slice", "dynamic-slice", "copy", "while", "fusion")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


class Size(NamedTuple):
    layers: int
    width: int
    length: int
    batch: int
    vocabulary: int
    steps: int  # of a timed run


SMALL = Size(4, 128, 128, 4, 512, 2)
GPT2 = Size(12, 768, 1024, 8, 50304, 4)


def make_params(size: Size) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 0.02, shape).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        return {
            "qkv": normal(size.width, 3 * size.width),
            "out": normal(size.width, size.width),
            "up": normal(size.width, 4 * size.width),
            "down": normal(4 * size.width, size.width),
            "scale": np.ones((2, size.width), np.float32),
            "shift": np.zeros((2, size.width), np.float32),
        }

    return {
        "embed": normal(size.vocabulary, size.width),
        "position": normal(size.length, size.width),
        "layers": [layer() for _ in range(size.layers)],
    }


def norm(x: Any, scale: Any, shift: Any) -> Any:
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x * scale + shift).astype(jnp.bfloat16)


def block(p: dict[str, Any], x: Any) -> Any:
    cast = {name: value.astype(jnp.bfloat16) for name, value in p.items()}
    h = norm(x, p["scale"][0], p["shift"][0])
    q, k, v = jnp.split((h @ cast["qkv"]).reshape(*h.shape[:2], -1, 64), 3, axis=2)
    kernel: Any = "cudnn" if jax.default_backend() == "gpu" else None
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
    x = x + a.reshape(h.shape) @ cast["out"]
    h = norm(x, p["scale"][1], p["shift"][1])
    return x + jax.nn.gelu(h @ cast["up"]) @ cast["down"]


def loss_fn(params: dict[str, Any], tokens: Any) -> Any:
    """The model, cut into stages by marks that do nothing without a pipeline."""
    embed = params["embed"].astype(jnp.bfloat16)
    x = embed[tokens[:, :-1]] + params["position"].astype(jnp.bfloat16)
    each = len(params["layers"]) // STAGES
    for number, layer in enumerate(params["layers"]):
        if number and number % each == 0:
            x = tr.stage_boundary(x)
        x = block(layer, x)
    logits = (x @ embed.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_tokens(size: Size) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    shape = (COUNT * size.steps, size.batch, size.length + 1)
    return list(random.integers(0, size.vocabulary, shape).astype(np.int32))


def make_trainers(size: Size, schedules: list[str]) -> dict[str, tr.Trainer]:
    params, found = make_params(size), {}
    options: dict[str, Any] = {"steps_per_execution": size.steps}
    found[f"accumulation={COUNT}"] = tr.Trainer(
        loss_fn, optax.adamw(1e-4), params, accumulation=COUNT, **options
    )
    for schedule in schedules:
        pipeline = tr.Pipeline(
            loss_fn, accumulation=COUNT, schedule=schedule, device_mapping=[0] * STAGES
        )
        found[schedule] = tr.Trainer(pipeline, optax.adamw(1e-4), params, **options)
    return found


def compiled_program(trainer: tr.Trainer) -> Any:
    """What XLA made of a fit; `trainer.explain` has its sizes, but compiles once more."""
    executables = trainer.engine.runner._executables.values()
    return next(e.compiled for e in executables if e.compiled is not None)


def stages_of(trainer: tr.Trainer) -> Sequence[Any]:
    """What each stage costs; none without a pipeline."""
    assembly = getattr(trainer.engine.runner, "assembly", None)
    return () if assembly is None else report(assembly, timed=False).stages


def counts(text: str) -> list[str]:
    found = [str(len(re.findall(rf" {name}\(", text))) for name in OPERATIONS]
    copied = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", text)
    total = sum(
        ITEM_BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in copied
    )
    return [*found, f"{total / 1e6:,.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpt", action="store_true", help="GPT-2 small, for a GPU")
    parser.add_argument("--schedules", default="grouped", help="comma-separated (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (%(default)s)")
    parser.add_argument("--dump", default="", help="write the compiled programs to files like this")
    flags = parser.parse_args()
    size = GPT2 if flags.gpt else SMALL
    data = make_tokens(size)
    trainers = make_trainers(size, flags.schedules.split(","))
    losses = {n: t.fit(data, steps=size.steps, progress=False).loss for n, t in trainers.items()}
    processor = dict.fromkeys(trainers, 0.0)  # of this process: others do not disturb it

    def run(name: str) -> None:
        started = time.process_time()
        trainers[name].fit(data, steps=size.steps, progress=False)
        processor[name] += time.process_time() - started

    contenders = [Contender(name, functools.partial(run, name)) for name in trainers]
    measure(contenders, flags.repeats)
    rows, base = [], contenders[0]
    for contender in contenders:
        trainer = trainers[contender.name]
        program, stages = compiled_program(trainer), stages_of(trainer)
        memory, text = program.memory_analysis(), program.as_text()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        if flags.dump:
            with open(f"{flags.dump}.{contender.name}.txt", "w") as file:
                file.write(text)
        rows.append(
            [
                contender.name,
                f"{contender.median / size.steps * 1e3:,.1f}",
                f"{contender.ratio_to(base):.3f}",
                f"{processor[contender.name] / processor[base.name]:.3f}",
                f"{peak / 1e6:,.1f}",
                f"{memory.temp_size_in_bytes / 1e6:,.1f}",
                f"{sum(stage.stash for stage in stages) / 1e6:,.1f}",
                f"{sum(stage.stash // stage.slots for stage in stages) / 1e6:,.1f}",
                *counts(text),
            ]
        )
    heads = ("", "ms a step", "ratio", "of processor time", "peak MB", "temporaries")
    heads = (*heads, "planned stash", "a microbatch")
    print(machine_record())
    print(markdown_table((*heads, *OPERATIONS, "copied MB"), rows))
    for name, loss in losses.items():
        print(f"- losses of {name}: {', '.join(f'{value:.6f}' for value in loss)}")


if __name__ == "__main__":
    main()
