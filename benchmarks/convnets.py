"""Whole models on CPU: `tr.Trainer` against one jit call a step and a hand-written scan.

    python -m benchmarks.convnets --only convnet
    python -m benchmarks.convnets --only keras

A small convnet (28x28 digits, two convolutions with pooling, batch 32), a network of residual blocks
(as ResNet-18, a quarter as wide, 16x16 images, batch 16), a multilayer perceptron (784-320-100-10,
batch 128), and the convnet with BatchNorm in Keras: `fit` against the same model in Tailrace.
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
from benchmarks.report import Contender

RATE = 0.01
SCANNED = 2
"""Steps of the hand-written scan, whose convolutions are slow."""


def main(arguments: list[str] | None = None) -> None:
    given = report.common_flags(__doc__, steps=40, repeats=7).parse_args(arguments)
    parts = []
    for name, model in MODELS.items():
        if given.only in name:
            steps, contenders = model(given.steps)
            for contender in contenders:
                contender.run()
            report.measure(contenders, given.repeats)
            parts.append(table(name, contenders, steps))
    only = f" --only {given.only}" if given.only else ""
    command = f"python -m benchmarks.convnets --steps {given.steps} --repeats {given.repeats}{only}"
    path = None if given.no_record else report.RESULTS
    report.publish("Convolutional networks on CPU", command, parts, path=path)


def table(name: str, contenders: list[Contender], steps: dict[str, int]) -> str:
    """Milliseconds a step, and the ratio to the first contender, in neighbouring runs."""
    first = contenders[0]
    rows = []
    for each in contenders:
        scale = steps[first.name] / steps[each.name]
        rows.append(
            (
                each.name,
                f"{each.median / steps[each.name] * 1e3:.2f}",
                f"{min(each.seconds) / steps[each.name] * 1e3:.2f}",
                f"{each.ratio_to(first) * scale:.3f}",
            )
        )
    return report.markdown_table((name, "median ms a step", "fastest", f"of {first.name}"), rows)


# -- plain JAX ------------------------------------------------------------------------------------


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


def convnet(steps: int) -> tuple[dict[str, int], list[Contender]]:
    rng = np.random.default_rng(1)
    params = [he(rng, 3, 3, 1, 32), he(rng, 3, 3, 32, 64), he(rng, 3136, 10)]

    def apply(params: Any, x: Any) -> Any:
        for w in params[:2]:
            x = pooled(jax.nn.relu(convolve(x, w)))
        return x.reshape(x.shape[0], -1) @ params[2]

    return contest(apply, params, (32, 28, 28, 1), steps, SCANNED)


def resnet(steps: int) -> tuple[dict[str, int], list[Contender]]:
    rng = np.random.default_rng(1)
    params: dict[str, Any] = {"stem": he(rng, 3, 3, 3, 16), "out": he(rng, 128, 10)}
    before = 16
    blocks = [(number, width) for width in (16, 32, 64, 128) for number in (0, 1)]
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

    return contest(apply, params, (16, 16, 16, 3), steps, SCANNED)


def perceptron(steps: int) -> tuple[dict[str, int], list[Contender]]:
    rng = np.random.default_rng(1)
    sizes = [(784, 320), (320, 100), (100, 10)]
    params = [(he(rng, n, m), np.zeros(m, np.float32)) for n, m in sizes]

    def apply(params: Any, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ params[-1][0] + params[-1][1]

    return contest(apply, params, (128, 784), steps * 10, steps * 10)


def contest(
    apply: Callable[..., Any], params: Any, shape: tuple[int, ...], steps: int, scanned: int
) -> tuple[dict[str, int], list[Contender]]:
    """The same training three ways: how many steps each makes in a run, and the contenders."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(steps, *shape)).astype(np.float32)
    labels = rng.integers(0, 10, (steps, shape[0])).astype(np.int32)
    elements = list(zip(images, labels, strict=True))
    optimizer = optax.sgd(RATE)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    one_step = jax.jit(step, donate_argnums=0)
    loop = jax.jit(lambda carry, batches: lax.scan(step, carry, batches), donate_argnums=0)
    start = lambda: (jax.tree.map(jnp.array, params), optimizer.init(params))  # noqa: E731

    def by_jit() -> np.ndarray:
        carry, losses = start(), []
        for batch in elements:
            carry, loss = one_step(carry, batch)
            losses.append(loss)
        return np.asarray(losses)

    def by_scan() -> np.ndarray:
        return np.asarray(loop(start(), (images[:scanned], labels[:scanned]))[1])

    trainer = tr.Trainer(loss_fn, optimizer, params, steps_per_execution=steps)
    contenders = [
        Contender("one jit call a step", by_jit),
        Contender("hand-written scan", by_scan),
        Contender("tr.Trainer", lambda: trainer.fit(elements, steps=steps, progress=False).loss),
    ]
    return dict(zip((c.name for c in contenders), (steps, scanned, steps), strict=True)), contenders


# -- Keras ----------------------------------------------------------------------------------------


def keras_convnet(steps: int) -> tuple[dict[str, int], list[Contender]]:
    import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
    import keras

    rng = np.random.default_rng(0)
    images = rng.normal(size=(steps * 32, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, steps * 32).astype(np.int32)

    def fit(adopted: bool, execution: int) -> Callable[[], Any]:
        layers = keras.layers
        stack: list[Any] = [keras.Input((28, 28, 1))]
        for width in (32, 64):
            stack += [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization()]
            stack += [layers.ReLU(), layers.MaxPooling2D()]
        model: Any = keras.Sequential([*stack, layers.Flatten(), layers.Dense(10)])
        model = tk.adopt(model) if adopted else model
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss, steps_per_execution=execution)
        return lambda: model.fit(images, labels, 32, verbose=0, shuffle=False)

    contenders = [
        Contender("Keras fit", fit(False, 1)),
        Contender("tk fit", fit(True, steps)),
    ]
    return {c.name: steps for c in contenders}, contenders


MODELS = {
    "convnet": convnet,
    "residual blocks": resnet,
    "784-320-100-10": perceptron,
    "keras convnet": keras_convnet,
}

if __name__ == "__main__":
    main()
