"""The seed's workload in plain JAX: a classifier 784-128-10, batches of 32, SGD."""

import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 32
RATE = 0.01
POOL = 1000  # batches that exist; an iteration goes over them again and again
ALIGNMENT = 64  # a CPU device uses an array that starts on such a boundary without copying it


class HostBatches:
    """`count` batches of images and labels: the per-batch iterable that everybody reads."""

    def __init__(self, count: int, pool: int = POOL) -> None:
        random = np.random.default_rng(0)
        examples = min(pool, count) * BATCH
        # Ten blurred patterns and noise: something to learn, without a package that holds digits.
        patterns = random.random((10, 784), np.float32)
        self.labels = random.integers(0, 10, examples, np.int32)
        self.images = 0.5 * (patterns[self.labels] + random.random((examples, 784), np.float32))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        available = len(self.images) // BATCH
        for number in range(self.count):
            rows = slice(number % available * BATCH, (number % available + 1) * BATCH)
            yield self.images[rows], self.labels[rows]


def init_params(hidden: int = 128) -> list[tuple[Any, Any]]:
    sizes = (784, hidden, 10)
    random = np.random.default_rng(1)
    return [
        (
            jnp.asarray(random.normal(0, (2 / n) ** 0.5, (n, m)), jnp.float32),
            jnp.zeros(m, jnp.float32),
        )
        for n, m in itertools.pairwise(sizes)
    ]


def loss_fn(params: Any, images: Any, labels: Any) -> Any:
    (w1, b1), (w2, b2) = params
    logits = jax.nn.relu(images @ w1 + b1) @ w2 + b2
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def sgd_step(params: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def fresh(params: Any) -> Any:
    """A copy that a donating program may overwrite."""
    return jax.tree.map(jnp.copy, params)


# -- the hand-written loop: what an experienced user of JAX would write ---------------------------


def empty_aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def chunks(batches: Any, size: int) -> Iterator[tuple[Any, ...]]:
    """Chunks of `size` stacked batches on the device, prepared one ahead by a thread."""
    ready: queue.Queue = queue.Queue(maxsize=1)

    def produce() -> None:
        source = iter(batches)
        while True:
            chunk: list[np.ndarray] | None = None
            filled = 0
            for element in source:
                if chunk is None:
                    chunk = [empty_aligned((size, *a.shape), a.dtype) for a in element]
                for target, leaf in zip(chunk, element, strict=True):
                    target[filled] = leaf
                filled += 1
                if filled == size:
                    break
            if chunk is None:
                return ready.put(None)
            ready.put(tuple(jax.device_put(a[:filled]) for a in chunk))

    threading.Thread(target=produce, daemon=True).start()
    while (chunk := ready.get()) is not None:
        yield chunk


def scan(step: Any) -> Any:
    """`scanned(state, elements) -> (state, losses)`: one `lax.scan`, which overwrites the state."""

    def scanned(state: Any, elements: Any) -> Any:
        return jax.lax.scan(lambda s, element: step(s, *element), state, elements)

    return jax.jit(scanned, donate_argnums=0)


def scan_loop(step: Any, chunk: int) -> Any:
    """`run(state, batches) -> losses`: one dispatch for each chunk."""
    return chunked(scan(step), chunk)


def chunked(compiled: Any, chunk: int) -> Any:
    """`run(state, batches) -> losses`, with `compiled` called on each chunk of batches."""

    def run(state: Any, batches: Any) -> np.ndarray:
        losses = []
        for elements in chunks(batches, chunk):
            state, part = compiled(state, elements)
            losses.append(part)
        return np.concatenate([np.asarray(part) for part in losses])

    return run
