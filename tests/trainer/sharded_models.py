"""Models that are trained sharded, and the plain programs that they are compared with."""

import collections
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 10


@dataclass(frozen=True)
class Model:
    """A model: `loss(params, x, y)`, or with state `loss(params, state, x, y)`."""

    loss: Any
    params: Any
    x: Any
    y: Any
    state: Any = None
    shard: Any = None  # rules over the axis "model"

    @property
    def data(self):
        return self.x, self.y


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def normal(key, shape, scale=0.2):
    return scale * jax.random.normal(jax.random.key(key), shape)


@functools.cache
def mlp():
    def loss(params, x, y):
        hidden = jax.nn.relu(x @ params["in"]["w"] + params["in"]["b"])
        return ((hidden @ params["out"]["w"] - y) ** 2).mean()

    params = {
        "in": {"w": normal(0, (16, 512)), "b": jnp.zeros(512)},
        "out": {"w": normal(1, (512, 8))},
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * 16, 16)).astype(np.float32)
    y = rng.normal(size=(STEPS * 16, 8)).astype(np.float32)
    rules = {"in/w": P(None, "model"), "out/w": P("model")}
    return Model(loss, params, x, y, shard=rules)


@functools.cache
def convnet():
    """With the running means of BatchNorm as model state."""

    def loss(params, state, x, y):
        dims = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=dims)
        mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
        h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-3) * params["scale"])
        logits = h.mean((1, 2)) @ params["out"]
        found = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        after = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
        return found, (after, {"spread": var.mean()})

    params = {"conv": normal(2, (3, 3, 8, 64)), "scale": jnp.ones(64), "out": normal(3, (64, 16))}
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS * 16, 6, 6, 8)).astype(np.float32)
    y = rng.integers(0, 16, STEPS * 16).astype(np.int32)
    state = {"mean": jnp.zeros(64), "var": jnp.ones(64)}
    rules = {"conv": P(None, None, None, "model"), "out": P("model")}
    return Model(loss, params, x, y, state, rules)


@functools.cache
def gpt():
    """One block of a decoder."""
    vocabulary, width, heads, length = 64, 64, 4, 8

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(params, x, y):
        h = params["embedding"][x]
        q, k, v = jnp.split(norm(h) @ params["qkv"], 3, axis=-1)
        q, k, v = (z.reshape(*z.shape[:2], heads, -1) for z in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / heads)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        h = h + mixed @ params["proj"]
        h = h + jax.nn.gelu(norm(h) @ params["up"]) @ params["down"]
        logits = norm(h) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = {
        "embedding": normal(4, (vocabulary, width)),
        "qkv": normal(5, (width, 3 * width), 0.1),
        "proj": normal(6, (width, width), 0.1),
        "up": normal(7, (width, 4 * width), 0.1),
        "down": normal(8, (4 * width, width), 0.1),
    }
    tokens = np.random.default_rng(2).integers(0, vocabulary, (STEPS * 16, length + 1))
    tokens = tokens.astype(np.int32)
    rules = {"qkv": P(None, "model"), "proj": P("model"), "up": P(None, "model")}
    rules |= {"down": P("model")}
    return Model(loss, params, tokens[:, :-1], tokens[:, 1:], shard=rules)


MODELS = {"mlp": mlp, "convnet": convnet, "gpt": gpt}

MESHES = {
    "data": ((8,), ("data",), None),
    "fsdp": ((8,), ("fsdp",), "fsdp"),
    "data x model": ((2, 4), ("data", "model"), "rules"),
    "data x fsdp x model": ((2, 2, 2), ("data", "fsdp", "model"), "both"),
}
"""Name: sizes, names of axes, and what `shard=` is."""


def layout(model, name):
    """The mesh of that name, and `shard=` for a model."""
    sizes, names, shard = MESHES[name]
    rules = {"rules": model.shard, "both": {n: both(p) for n, p in model.shard.items()}}
    return mesh_of(sizes, names), rules.get(shard, shard)


def both(spec):
    """The same, with the dim beside the one over "model" divided over "fsdp"."""
    if spec == P(None, "model"):
        return P("fsdp", "model")
    return P("model", "fsdp") if spec == P("model") else spec


def whole(params):
    """What `shard="fsdp"` means: parameters are gathered before the loss reads them."""
    return jax.lax.with_sharding_constraint(
        params, jax.tree.map(lambda x: P(*[None] * x.ndim), params)
    )


def hand_written(model, optimizer, mesh, specs, axes, gathered=None):
    """The losses of a jitted `lax.scan` over steps with the same shardings, and the compiled scan.

    `specs` are those of the parameters; `gathered` is applied to them before the loss.
    """
    place = functools.partial(NamedSharding, mesh)
    shardings = jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
    params = jax.tree.map(jax.device_put, model.params, shardings)
    state = jax.tree.map(lambda x: jax.device_put(x, place(P())), model.state)
    held = optax.tree_map_params(
        optimizer,
        jax.device_put,
        jax.jit(optimizer.init)(params),
        shardings,
        transform_non_params=lambda x: jax.device_put(x, place(P())),
    )
    kept = jax.tree.map(lambda x: x.sharding, (params, held, state))

    def step(carry, batch):
        params, held, state = carry

        def loss(params):
            params = params if gathered is None else gathered(params)
            if state is None:
                return model.loss(params, *batch), (None, None)
            return model.loss(params, state, *batch)

        (found, (after, aux)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, left = optimizer.update(grads, held, params)
        carry = optax.apply_updates(params, updates), left, after
        return jax.lax.with_sharding_constraint(carry, kept), (found, aux)

    batches = [
        jax.device_put(a.reshape(STEPS, 16, *a.shape[1:]), place(P(None, axes))) for a in model.data
    ]
    with jax.set_mesh(mesh):
        steps = jax.jit(functools.partial(jax.lax.scan, step), out_shardings=(kept, None))
        compiled = steps.lower((params, held, state), batches).compile()
    return np.asarray(compiled((params, held, state), batches)[1][0]), compiled


def collectives(compiled):
    """How many collectives of each kind a compiled program has, and the bytes of their results."""
    found = collections.Counter()
    for line in compiled.as_text().splitlines():
        made = re.search(
            r" = (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(",
            line,
        )
        if made:
            sizes = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", made[1])
            total = sum(
                max(1, int(bits or 8) // 8) * math.prod(int(n) for n in dims.split(",") if n)
                for _, bits, dims in sizes
            )
            found[made[2]] += 1
            found[made[2], "bytes"] += total
    return found
