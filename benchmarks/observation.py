"""What observing costs: the statistics of six gradients, every step and every tenth.

The model is 784-320-100-10, at batch 1000 and at batch 32. Data stay on the device for all
contenders, so that nothing but the step and the observation is measured.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from benchmarks.report import (
    RESULTS,
    Contender,
    chosen,
    common_flags,
    markdown_table,
    measure,
    publish,
    timing_table,
)

SIZES = (784, 320, 100, 10)
PER_EXECUTION = 1000
"""Steps of one dispatch, for all that loop on the device; fewer if a run has fewer."""
BASELINE = "tailrace, no taps"
FEWER = 10
"""Slow contenders run fewer steps, by this factor."""
SHORTER: dict[str, int] = {}
"""Which ones do."""


def main() -> None:
    parser = common_flags(__doc__, steps=0, repeats=7)
    parser.add_argument("--batch", type=int, action="append", help="batch sizes (1000 and 32)")
    flags = parser.parse_args()
    parts = []
    for batch in flags.batch or [1000, 32]:
        slow = jax.default_backend() == "cpu"
        steps = flags.steps or ((100 if batch >= 500 else 1000) if slow else 10_000)
        contenders = tailrace_contenders(batch, steps)
        if not flags.no_peers:
            contenders += [*jax_contenders(batch, steps), *torch_contenders(batch, steps)]
            contenders += keras_contenders(batch, steps)
        contenders = chosen(contenders, flags.only, BASELINE)
        for contender in contenders:
            contender.run()  # compile
        measure(contenders, flags.repeats)
        for contender in contenders:
            if contender.name in SHORTER:  # as if it had run them all
                contender.seconds = [s * SHORTER[contender.name] for s in contender.seconds]
        baseline = next(c for c in contenders if c.name == BASELINE)
        parts.append(f"### batch {batch}, {steps} steps\n")
        parts.append(timing_table(contenders, baseline, steps, "step"))
    if not flags.only:
        parts.append(full_tensors())
    path = None if flags.no_record else RESULTS
    publish("Observation", "python -m benchmarks.observation", parts, path=path)


def initial() -> dict[str, Any]:
    """The parameters: a kernel and a bias for each layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        f"dense_{n}": {
            "kernel": jax.random.normal(key, (i, o)) / np.sqrt(i),
            "bias": jnp.zeros(o),
        }
        for n, (key, i, o) in enumerate(zip(keys, SIZES[:-1], SIZES[1:], strict=True))
    }


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    for number, layer in enumerate(params.values()):
        with jax.named_scope(f"dense_{number}"):
            x = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.relu(x) if number < 2 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()


def arrays(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, SIZES[0])).astype(np.float32)
    return x, rng.integers(0, SIZES[-1], batch).astype(np.int32)


class Steps:
    """A dataset of nothing but step numbers: the data are constants of the program."""

    def __iter__(self) -> Any:
        return (np.int32(i) for i in range(1 << 30))


# -- Tailrace -----------------------------------------------------------------------------------


def tailrace_contenders(batch: int, steps: int) -> list[Contender]:
    x, y = (jnp.asarray(a) for a in arrays(batch))

    def loss(params: Any, number: Any) -> Any:
        # The product with 1 + 0 * number keeps XLA from moving work out of the loop.
        return loss_fn(params, x * (1 + 0 * number.astype(jnp.float32)), y)

    def trainer(observe: Any) -> Callable[[], Any]:
        made = tr.Trainer(
            loss,
            optax.sgd(0.01),
            initial(),
            steps_per_execution=min(PER_EXECUTION, steps),
            observe=observe,
        )
        return partial(run, made)

    def run(made: tr.Trainer) -> None:
        made.fit(Steps(), steps=steps)

    every = tr.every(10)
    return [
        Contender(BASELINE, trainer([])),
        Contender("tailrace, stats every step", trainer([tr.Tap("grad/*")])),
        Contender("tailrace, stats every tenth", trainer([tr.Tap("grad/*", mode=every)])),
        Contender("tailrace, norms every step", trainer([tr.Tap("grad/*", reduce="norm")])),
        Contender(
            "tailrace, histograms every tenth",
            trainer([tr.Tap("grad/*", mode=every, reduce="histogram")]),
        ),
        Contender("tailrace, stop on non-finite", trainer([tr.stop_on_nonfinite("grad/*")])),
    ]


# -- what else people use -----------------------------------------------------------------------


def statistics(grad: Any) -> Any:
    return jnp.stack(
        [
            grad.mean(),
            grad.std(),
            grad.min(),
            grad.max(),
            jnp.isnan(grad).sum().astype(jnp.float32),
            jnp.isinf(grad).sum().astype(jnp.float32),
        ]
    )


def jax_contenders(batch: int, steps: int) -> list[Contender]:
    x, y = (jnp.asarray(a) for a in arrays(batch))
    optimizer = optax.sgd(0.01)
    seen: list[Any] = []

    def scan(observe: str) -> Callable[[], Any]:
        def step(carry: Any, number: Any) -> Any:
            params, state = carry
            scaled = x * (1 + 0 * number.astype(jnp.float32))
            loss, grads = jax.value_and_grad(loss_fn)(params, scaled, y)
            out = None
            if observe:
                out = jax.tree.map(statistics, grads)
            if observe == "callback":
                jax.debug.callback(lambda s: seen.append(s), out)
                out = None
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (loss, out)

        length = min(PER_EXECUTION, steps)
        program = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs), donate_argnums=0)

        def run() -> None:
            seen.clear()
            carry = (initial(), optimizer.init(initial()))
            results = []
            for first in range(0, steps, length):
                carry, out = program(carry, jnp.arange(first, first + length))
                results.append(out)
            jax.tree.map(np.asarray, results)
            jax.effects_barrier()

        return run

    return [
        Contender("lax.scan, statistics by hand", scan("stacked")),
        Contender("lax.scan, jax.debug.callback", scan("callback")),
    ]


def torch_contenders(batch: int, steps: int) -> list[Contender]:
    steps //= FEWER
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = arrays(batch)
    inputs, labels = torch.tensor(x, device=device), torch.tensor(y, device=device).long()

    def make(observe: str) -> Callable[[], Any]:
        layers = []
        for i, o in itertools.pairwise(SIZES):
            layers += [torch.nn.Linear(i, o), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers[:-1]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        seen: list[Any] = []
        writer: Any = None
        if observe == "hooks":
            for parameter in model.parameters():
                parameter.register_hook(
                    lambda g: seen.append(
                        torch.stack(
                            [g.mean(), g.std(), g.min(), g.max(), g.isnan().sum(), g.isinf().sum()]
                        )
                    )
                )
        if observe == "tensorboard":
            import tempfile

            from tensorboardX import SummaryWriter

            writer = SummaryWriter(tempfile.mkdtemp())

        def run() -> None:
            seen.clear()
            for number in range(steps):
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                if writer is not None:
                    for name, parameter in model.named_parameters():
                        writer.add_histogram(name, parameter.grad.cpu().numpy(), number)
                optimizer.step()
            _ = [s.cpu() for s in seen]
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    found = [("torch eager", ""), ("torch eager, hooks", "hooks")]
    if importlib.util.find_spec("tensorboardX") is not None:
        found.append(("torch eager, TensorBoard histograms", "tensorboard"))
    SHORTER.update(dict.fromkeys((name for name, _ in found), FEWER))
    note = f"runs a {FEWER}th of the steps; its time is multiplied"
    return [Contender(name, make(kind), note) for name, kind in found]


def keras_contenders(batch: int, steps: int) -> list[Contender]:
    """Keras has no hook for gradients: a callback that looks at the weights after each batch."""
    if importlib.util.find_spec("keras") is None:
        return []
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    if keras.backend.backend() != "jax":
        return []
    x, y = arrays(batch)
    model = keras.Sequential(
        [
            keras.layers.Dense(320, activation="relu"),
            keras.layers.Dense(100, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            for weight in self.model.get_weights():
                _ = (weight.mean(), weight.std(), weight.min(), weight.max())
                _ = (np.isnan(weight).sum(), np.isinf(weight).sum())

    def data() -> Any:
        for _ in range(steps):
            yield x, y

    steps //= FEWER
    SHORTER.update(dict.fromkeys(("Keras fit", "Keras fit, callback on the weights"), FEWER))

    def fit(callbacks: Any) -> Callable[[], Any]:
        return lambda: model.fit(data(), steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    return [
        Contender("Keras fit", fit([])),
        Contender("Keras fit, callback on the weights", fit([Watch()])),
    ]


# -- whole tensors ------------------------------------------------------------------------------


def full_tensors() -> str:
    """Whole gradients, every step: bytes a second, beside a plain copy of as many bytes."""
    x, y = (jnp.asarray(a) for a in arrays(32))

    def loss(params: Any, number: Any) -> Any:
        return loss_fn(params, x * (1 + 0 * number.astype(jnp.float32)), y)

    steps, per_execution = 200, 100
    rows = []
    times = {}
    for name, observe in (("none", []), ("whole", [tr.Tap("grad/*", reduce="tensor")])):
        made = tr.Trainer(
            loss, optax.sgd(0.01), initial(), steps_per_execution=per_execution, observe=observe
        )
        made.fit(Steps(), steps=steps)
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            made.fit(Steps(), steps=steps)
            taken.append(time.perf_counter() - started)
        times[name] = sorted(taken)[2]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(initial())) * steps
    source = jnp.ones(size // 4, jnp.float32)
    copies = []
    for _ in range(5):
        fresh = source + 1
        fresh.block_until_ready()
        started = time.perf_counter()
        np.array(fresh)
        copies.append(time.perf_counter() - started)
    rows.append(("observed", f"{size / (times['whole'] - times['none']) / 1e9:.2f}"))
    rows.append(("plain copy to the host", f"{size / sorted(copies)[2] / 1e9:.2f}"))
    table = markdown_table(("whole gradients, every step", "GB/s"), rows)
    return f"### whole tensors, batch 32\n\n{table}"


if __name__ == "__main__":
    main()
