"""A zoo: `tr.Trainer` against one jit call a step, a hand-written scan, Keras `fit` and PyTorch.

    python -m benchmarks.models                       # every model, in the size for this platform
    python -m benchmarks.models --only convnet,lstm

A multilayer perceptron (784-320-100-10), a convnet with pooling (28x28), residual blocks (as ResNet-18,
a quarter as wide on a CPU), an LSTM, a GPT; the convnet with BatchNorm in Keras, ResNet-18
and a GPT in PyTorch.
On a CPU they are small, on a GPU large: batches of 3 MB from the host's memory for the perceptron,
GPT-2 small in bfloat16 with cuDNN attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tailrace as tr
from benchmarks import report
from benchmarks.lengths import gpt_model, gpt_tokens
from benchmarks.models_peers import keras_convnet, torch_gpt, torch_resnet
from benchmarks.report import Contender

RATE = 0.01
SLOW = 2
"""Steps of the hand-written scan on a CPU, whose convolutions are slow there."""

Contest = tuple[dict[str, int], list[Contender]]
"""How many steps each contender makes in a run, and the contenders."""


def main(arguments: list[str] | None = None) -> None:
    given = report.common_flags(__doc__, steps=40, repeats=7).parse_args(arguments)
    wanted = [part for part in given.only.split(",") if part]
    parts = []
    for name, model in MODELS.items():
        if (wanted and not any(part in name for part in wanted)) or (
            given.no_peers and model in PEERS
        ):
            continue
        steps, contenders = model(given.steps)
        for contender in contenders:
            contender.run()
        report.measure(contenders, given.repeats)
        parts.append(table(name, contenders, steps))
    only = f" --only {given.only}" if given.only else ""
    command = f"python -m benchmarks.models --steps {given.steps} --repeats {given.repeats}{only}"
    path = None if given.no_record else report.RESULTS
    report.publish("Models", command, parts, path=path)


def table(name: str, contenders: list[Contender], steps: dict[str, int]) -> str:
    """Milliseconds a step, and the ratio to the first contender, in neighbouring runs."""
    first = contenders[0]
    rows = []
    for each in contenders:
        scale = steps[first.name] / steps[each.name]
        rows.append(
            (
                each.name,
                f"{each.median / steps[each.name] * 1e3:.3f}",
                f"{min(each.seconds) / steps[each.name] * 1e3:.3f}",
                f"{each.ratio_to(first) * scale:.3f}",
            )
        )
    return report.markdown_table((name, "median ms a step", "fastest", f"of {first.name}"), rows)


def large() -> bool:
    return jax.devices()[0].platform != "cpu"


# -- models ---------------------------------------------------------------------------------------


def perceptron(steps: int) -> Contest:
    rng = np.random.default_rng(1)
    sizes = [(784, 320), (320, 100), (100, 10)]
    params = [(he(rng, n, m), np.zeros(m, np.float32)) for n, m in sizes]

    def apply(params: Any, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ params[-1][0] + params[-1][1]

    shape = (1000, 784) if large() else (128, 784)
    return classification(apply, params, shape, steps * 10, scanned=steps * 10)


def convnet(steps: int) -> Contest:
    rng = np.random.default_rng(1)
    params = [he(rng, 3, 3, 1, 32), he(rng, 3, 3, 32, 64), he(rng, 3136, 10)]

    def apply(params: Any, x: Any) -> Any:
        for w in params[:2]:
            x = pooled(jax.nn.relu(convolve(x, w)))
        return x.reshape(x.shape[0], -1) @ params[2]

    return classification(apply, params, (256 if large() else 32, 28, 28, 1), steps)


def resnet(steps: int) -> Contest:
    rng = np.random.default_rng(1)
    widths, pixels, batch = (
        ((64, 128, 256, 512), 32, 128) if large() else ((16, 32, 64, 128), 16, 16)
    )
    before = widths[0]
    params: dict[str, Any] = {"stem": he(rng, 3, 3, 3, before), "out": he(rng, widths[-1], 10)}
    blocks = [(number, width) for width in widths for number in (0, 1)]
    for number, width in blocks:
        block = {"first": he(rng, 3, 3, before, width), "second": he(rng, 3, 3, width, width)}
        block |= {"scale": np.ones(width, np.float32)}
        if before != width:
            block["past"] = he(rng, 1, 1, before, width)
        params[f"{width}-{number}"], before = block, width

    def apply(params: Any, x: Any) -> Any:
        x = jax.nn.relu(convolve(x, params["stem"]))
        for number, width in blocks:
            block = params[f"{width}-{number}"]
            stride = 2 if "past" in block else 1
            y = jax.nn.relu(normalised(convolve(x, block["first"], stride), block["scale"]))
            y = normalised(convolve(y, block["second"]), block["scale"])
            x = jax.nn.relu(y + (convolve(x, block["past"], stride) if "past" in block else x))
        return x.mean((1, 2)) @ params["out"]

    return classification(apply, params, (batch, pixels, pixels, 3), steps)


def lstm(steps: int) -> Contest:
    rng = np.random.default_rng(1)
    width, length, batch = (512, 128, 64) if large() else (64, 28, 32)
    params = {
        "w": he(rng, 28 + width, 4 * width),
        "b": np.zeros(4 * width, np.float32),
        "out": he(rng, width, 10),
    }

    def apply(params: Any, x: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            gates = jnp.concatenate([x, h], axis=1) @ params["w"] + params["b"]
            i, f, g, o = jnp.split(gates, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zeros = jnp.zeros((x.shape[0], width))
        (h, _), _ = lax.scan(cell, (zeros, zeros), jnp.swapaxes(x, 0, 1))
        return h @ params["out"]

    return classification(apply, params, (batch, length, 28), steps, scanned=steps)


def gpt(steps: int) -> Contest:
    sizes = (12, 768, 1024) if large() else (2, 128, 64)
    params, loss_fn = gpt_model(*sizes)
    tokens = gpt_tokens(8 if large() else 2, sizes[2])
    elements = [(tokens[i % len(tokens)],) for i in range(steps)]
    return contest(loss_fn, optax.adamw(1e-4), params, elements, scanned=steps)


def he(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5).astype(np.float32)


def convolve(x: Any, w: Any, stride: int = 1) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=dimensions)


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def normalised(x: Any, scale: Any) -> Any:
    mean = x.mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * scale


# -- the same training three ways -----------------------------------------------------------------


def classification(
    apply: Callable[..., Any],
    params: Any,
    shape: tuple[int, ...],
    steps: int,
    scanned: int | None = None,
) -> Contest:
    """A classifier of random images into ten classes, trained by plain SGD."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(steps, *shape)).astype(np.float32)
    labels = rng.integers(0, 10, (steps, shape[0])).astype(np.int32)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    if scanned is None:
        scanned = steps if large() else SLOW
    elements = list(zip(images, labels, strict=True))
    return contest(loss_fn, optax.sgd(RATE), params, elements, scanned)


def contest(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    elements: list[tuple[np.ndarray, ...]],
    scanned: int,
) -> Contest:
    """All of `elements`, one a step, from the host's memory; the scan reads the first `scanned`."""
    steps = len(elements)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    one_step = jax.jit(step, donate_argnums=0)
    loop = jax.jit(lambda carry, batches: lax.scan(step, carry, batches), donate_argnums=0)
    start = lambda: (jax.tree.map(jnp.array, params), optimizer.init(params))  # noqa: E731
    states: dict[str, Any] = {"jit": start(), "scan": start()}
    stacked = [np.stack(leaves) for leaves in zip(*elements[:scanned], strict=True)]

    def by_jit() -> np.ndarray:
        losses = []
        for batch in elements:
            states["jit"], loss = one_step(states["jit"], batch)
            losses.append(loss)
        return np.asarray(losses)

    def by_scan() -> np.ndarray:
        states["scan"], losses = loop(states["scan"], tuple(stacked))
        return np.asarray(losses)

    trainer = tr.Trainer(loss_fn, optimizer, params)
    contenders = [
        Contender("one jit call a step", by_jit),
        Contender("hand-written scan", by_scan),
        Contender("tr.Trainer", lambda: trainer.fit(elements, steps=steps, progress=False).loss),
    ]
    for contender in contenders:
        contender.run()
    report.settle([trainer])
    return dict(zip((c.name for c in contenders), (steps, scanned, steps), strict=True)), contenders


PEERS = (keras_convnet, torch_resnet, torch_gpt)

MODELS = {
    "784-320-100-10": perceptron,
    "convnet": convnet,
    "residual blocks": resnet,
    "lstm": lstm,
    "gpt": gpt,
    "keras convnet": keras_convnet,
    "torch resnet-18": torch_resnet,
    "torch gpt": torch_gpt,
}

if __name__ == "__main__":
    main()
