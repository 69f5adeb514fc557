"""The oracle of observation: one step after the other in plain JAX, every tensor kept by name."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def network(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "hidden": {
            "kernel": rng.normal(size=(3, 5)).astype(np.float32),
            "bias": rng.normal(size=(5,)).astype(np.float32),
        },
        "out": {"kernel": rng.normal(size=(5, 2)).astype(np.float32)},
    }


def elements(count: int, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4, 3)).astype(np.float32)
    y = rng.normal(size=(count, 4, 2)).astype(np.float32)
    return list(zip(x, y, strict=True))


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """What is trained: the scopes name its activations."""
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    with jax.named_scope("out"):
        z = h @ params["out"]["kernel"]
    error = z - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


def perturbed(params: Any, shift: Any, x: Any, y: Any) -> Any:
    """The same by hand, with something added to each activation: its gradient is the cotangent."""
    a = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    h = jnp.tanh(a) + shift["hidden"]
    z = h @ params["out"]["kernel"] + shift["out"]
    error = z - y
    mae = jnp.abs(error).mean()
    return (error**2).mean(), ({"mae": mae}, {"hidden": h, "out": z})


@functools.cache
def _differentiated() -> Any:
    return jax.jit(jax.value_and_grad(perturbed, argnums=(0, 1), has_aux=True))


def named(kind: str, tree: Any) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}": np.asarray(leaf)
        for path, leaf in found
    }


Table = dict[str, dict[tuple[int, int, int], np.ndarray]]


def all_tensors(
    optimizer: Any, params: Any, data: list[Any], steps: int, microbatches: int, replicas: int
) -> tuple[Any, Table]:
    """Parameters at the end, and every tensor: name -> (step, microbatch, replica) -> value.

    A microbatch or replica of -1 says that there is one value for all of them.
    """
    table: Table = {}

    def keep(values: dict[str, np.ndarray], where: tuple[int, int, int]) -> None:
        for name, value in values.items():
            table.setdefault(name, {})[where] = value

    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    zero = {"hidden": jnp.zeros((4, 5)), "out": jnp.zeros((4, 2))}
    for t in range(steps):
        keep(named("param", params), (t, -1, -1))
        accumulated = []
        for r in range(replicas):
            total = jax.tree.map(np.zeros_like, jax.tree.map(np.asarray, params))
            for m in range(microbatches):
                x, y = data[(t * microbatches + m) * replicas + r]
                (loss, (aux, acts)), (grads, cots) = _differentiated()(params, zero, x, y)
                values = {"input/0": x, "input/1": y, "loss": np.asarray(loss)}
                values |= named("aux", aux) | named("grad", grads)
                values |= named("activation", acts) | named("cotangent", cots)
                keep(values, (t, m, r if replicas > 1 else -1))
                total = jax.tree.map(lambda a, g: a + np.asarray(g), total, grads)
            total = jax.tree.map(lambda a: a / np.float32(microbatches), total)
            keep(named("accumulated", total), (t, -1, r if replicas > 1 else -1))
            accumulated.append(total)
        reduced = jax.tree.map(lambda *g: jnp.asarray(sum(g) / np.float32(replicas)), *accumulated)
        keep(named("reduced", reduced), (t, -1, -1))
        updates, state = optimizer.update(reduced, state, params)
        params = optax.apply_updates(params, updates)
        keep(named("update", updates) | named("updated", params), (t, -1, -1))
        keep(named("optimizer", state), (t, -1, -1))
    return params, table


STATS = ("mean", "std", "min", "max", "nan", "inf", "zero")


def statistics(value: Any) -> dict[str, float]:
    """What `reduce="stats"` promises, with numpy in float64."""
    wide = np.asarray(value).astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    empty = not finite.size
    return {
        "mean": np.nan if empty else finite.mean(),
        "std": np.nan if empty else finite.std(),
        "min": np.nan if empty else finite.min(),
        "max": np.nan if empty else finite.max(),
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
        "zero": (wide == 0).sum() / wide.size,
    }


def exponents(value: Any) -> np.ndarray:
    """What `reduce="histogram"` promises, through `np.frexp`."""
    wide = np.asarray(value).astype(np.float32).ravel()
    counts = np.zeros(258, np.int64)
    counts[256], counts[257] = np.isnan(wide).sum(), (wide == 0).sum()
    counts[255] = np.isinf(wide).sum()
    rest = wide[np.isfinite(wide) & (wide != 0)].astype(np.float64)
    biased = np.frexp(np.abs(rest))[1] - 1 + 127
    np.add.at(counts, np.maximum(biased, 0), 1)
    return counts
