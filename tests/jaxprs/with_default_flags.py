"""Run by `test_default_flags.py` in a process of its own, with XLA's own flags: prints what it finds.

The suite compiles with fewer optimizations and without fusion emitters: a compiler that nobody has.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from residual_models import convnet, perceptron, transformer

import tailrace as tr
from oracles import assert_bits_equal, assert_close

OFF = {"boundaries": False}
STEPS = 3
MODELS = {
    "transformer": lambda: transformer(4),
    "perceptron": lambda: perceptron(5),
    "convnet": lambda: convnet(4),
}


def trained(model, **options):
    loss_fn, params, element = model
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params, steps_per_execution=STEPS, **options)
    history = trainer.fit([element] * STEPS, steps=STEPS)
    return trainer, jax.device_get((trainer.params, history.loss))


def by_hand(model):
    """The hand-written scan."""
    loss_fn, params, element = model

    def step(params, element):
        loss, grads = jax.value_and_grad(loss_fn)(params, element)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    loop = jax.jit(lambda params, elements: jax.lax.scan(step, params, elements))
    return jax.device_get(loop(jax.tree.map(jnp.asarray, params), np.stack([element] * STEPS)))


def outcome(compare, found, expected):
    try:
        compare(found, expected)
    except AssertionError as error:
        return str(error)[:500]
    return "equal"


def compared(name):
    """How the ends of equal trainings compare."""
    model = MODELS[name]()
    trainer, on = trained(model)
    _, off = trained(model, rewrites=OFF)
    # The guard and every tap.
    _, observed = trained(model, observe="*", on_nonfinite="stop", fingerprint=True)
    hand = by_hand(model)
    return {
        "places": trainer.explain(model[2], STEPS).rewrites["boundaries"],
        "off, by hand": outcome(assert_bits_equal, off, hand),
        "on, off": outcome(assert_bits_equal, on, off),
        "on, off, by the table": outcome(assert_close, on, off),
        # Of the state: XLA may sum a loss that is read twice in another order, boundaries or not.
        "observed, on": outcome(assert_bits_equal, observed[0], on[0]),
    }


def lines(depths, rewrites=None):
    """Lines of the compiled program of a perceptron, by its number of layers."""
    texts = []
    plain = jax.stages.Lowered.compile

    def compile(self, *args, **kwargs):
        made = plain(self, *args, **kwargs)
        texts.append(made.as_text())
        return made

    jax.stages.Lowered.compile = compile
    found = []
    for depth in depths:
        texts.clear()
        trained(perceptron(depth), rewrites=rewrites)
        found.append(max(text.count("\n") for text in texts))
    jax.stages.Lowered.compile = plain
    return found


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    result = {name: compared(name) for name in names} if what == "bits" else lines(map(int, names))
    print("RESULT", json.dumps(result))
