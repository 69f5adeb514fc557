"""A histogram of all gradients of a network, to see which number formats would hold them.

The gradients never leave the device: it counts them by their binary exponent, and the counts are
what arrives. The picture marks where float16, bfloat16 and the two float8 formats end.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from tailrace.records.float_formats import FORMATS, format_shares

SIZES = (784, 320, 100, 10)
ZERO_BIN = 257
"""Where a histogram counts zeros; exponent e is in bin 127 + e."""


def create_model(seed=0):
    random = np.random.default_rng(seed)
    return {
        f"fc{number}": {
            "weight": random.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32),
            "bias": np.zeros(fan_out, np.float32),
        }
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise(SIZES), start=1)
    }


def forward(params, images):
    x = images.reshape(len(images), -1).astype(jnp.float32) / 127.5 - 1
    for name in ("fc1", "fc2"):
        with jax.named_scope(name):
            x = jax.nn.relu(x @ params[name]["weight"] + params[name]["bias"])
    with jax.named_scope("fc3"):
        x = x @ params["fc3"]["weight"] + params["fc3"]["bias"]
    return jax.nn.log_softmax(x)


def loss_fn(params, images, labels):
    predicted = forward(params, images)
    return -jnp.take_along_axis(predicted, labels[:, None], axis=1).mean()


def train(batch_size, epochs):
    """One record a tensor: the gradients of the last step, counted by exponent."""
    dataset = tr.batches(tr.data.digits("train"), batch_size, shuffle=True, seed=0)
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.01),
        create_model(),
        observe=[tr.Tap("grad/*", mode="final", reduce="histogram")],
    )
    images, labels = next(iter(dataset))
    print("tensor names:", ", ".join(trainer.tensors((images, labels)).filter("grad/*").names))
    history = trainer.fit(dataset, epochs=epochs, progress=False)
    print(f"Loss: {history.loss[-1]:.4f}")
    return trainer.records


def draw(counts, picture):
    """Bars by exponent, zeros two places to the left of the smallest, and the formats' limits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    exponents = np.flatnonzero(counts[:255]) - 127
    figure, axes = plt.subplots(figsize=(9, 5), tight_layout=True)
    axes.bar(exponents, counts[exponents + 127], width=1, align="edge", color="0.6")
    axes.bar(exponents.min() - 2, counts[ZERO_BIN], width=1, align="edge", color="0.2")
    styles = {"smallest": ":", "smallest_normal": "--", "largest": "-"}
    for number, form in enumerate(FORMATS):
        axes.plot([], [], color=f"C{number}", label=form.name)
        for limit, style in styles.items():
            at = np.log2(getattr(form, limit))
            axes.axvline(at, color=f"C{number}", linestyle=style, linewidth=1)
    for limit, style in styles.items():
        axes.plot([], [], color="0.3", linestyle=style, label=limit.replace("_", " "))
    axes.set_xlim(exponents.min() - 4, 20)
    axes.set(title="Gradient Histogram", xlabel="log2 |gradient| (dark: zero)", ylabel="Frequency")
    axes.legend(loc="center right")
    figure.savefig(picture)
    plt.close(figure)
    print(f"Saved histogram to {picture}")


def main(batch_size=1000, epochs=1, picture="GradientHistogram.png"):
    records = train(batch_size, epochs)
    counts = sum(records[name].values[-1] for name in records.names)
    print(
        f"{counts.sum():,} gradients of {len(records)} tensors, {counts[ZERO_BIN]:,} of them zero"
    )
    for scale in (0, 10):
        print(f"\ntimes 2^{scale}:" if scale else "\nas they are:")
        for name, shares in format_shares(counts, scale).items():
            lost, part, beyond = (shares[k] for k in ("underflow", "subnormal", "overflow_most"))
            print(f"  {name:14} {lost:7.2%} vanish {part:7.2%} subnormal {beyond:7.2%} overflow")
    draw(counts, picture)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--picture", default="GradientHistogram.png")
    main(**vars(parser.parse_args()))
