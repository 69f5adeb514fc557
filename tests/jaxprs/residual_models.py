"""Models with a residual stream, in plain JAX: loss function, parameters and an element of each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH = 32


def _drawn(rng, *shape):
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)


def perceptron(layers, rows=32):
    """Two products a layer, behind a norm."""
    rng = np.random.default_rng(0)
    params = [
        {"up": _drawn(rng, WIDTH, 2 * WIDTH), "down": _drawn(rng, 2 * WIDTH, WIDTH)}
        for _ in range(layers)
    ]
    return residual_loss, params, rng.normal(size=(rows, WIDTH)).astype(np.float32)


def residual_loss(params, x):
    return (residual_sum(params, x) ** 2).mean()


def residual_sum(params, x):
    for number, layer in enumerate(params):
        with jax.named_scope(f"layer{number}"):
            x = x + jnp.tanh(_norm(x, 1.0) @ layer["up"]) @ layer["down"]
    return x


def transformer(layers, rows=4, length=12, vocabulary=48):
    """Attention and two products a layer, each behind a norm."""
    rng = np.random.default_rng(0)
    params = {
        "embedding": _drawn(rng, vocabulary, WIDTH),
        "layers": [
            {
                "norms": np.ones((2, WIDTH), np.float32),
                "qkv": _drawn(rng, WIDTH, 3 * WIDTH),
                "out": _drawn(rng, WIDTH, WIDTH),
                "up": _drawn(rng, WIDTH, 2 * WIDTH),
                "down": _drawn(rng, 2 * WIDTH, WIDTH),
            }
            for _ in range(layers)
        ],
    }
    tokens = rng.integers(0, vocabulary, (rows, length + 1)).astype(np.int32)

    def loss_fn(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{number}"):
                parts = jnp.split(_norm(x, layer["norms"][0]) @ layer["qkv"], 3, -1)
                q, k, v = (part.reshape(rows, length, 2, -1) for part in parts)
                seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
                x = x + seen.reshape(x.shape) @ layer["out"]
                hidden = jax.nn.gelu(_norm(x, layer["norms"][1]) @ layer["up"])
                x = x + hidden @ layer["down"]
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return loss_fn, params, tokens


def convnet(blocks, rows=2, pixels=8, features=8):
    """Convolutions behind a norm over rows and pixels."""
    rng = np.random.default_rng(0)
    params = {
        "stem": _drawn(rng, 3, 3, 3, features),
        "blocks": [_drawn(rng, 3, 3, features, features) for _ in range(blocks)],
    }

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_fn(params, x):
        x = convolve(x, params["stem"])
        for w in params["blocks"]:
            x = x + convolve(jax.nn.relu(_norm(x, 1.0, (0, 1, 2))), w)
        return (x**2).mean()

    return loss_fn, params, rng.normal(size=(rows, pixels, pixels, 3)).astype(np.float32)


def _norm(x, scale, axes=-1):
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale
