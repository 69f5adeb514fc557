"""A loop reads its elements where they lie: no second copy of all of them is made."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr


@pytest.mark.cpu
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("period", [1, 5])
def test_elements_are_not_copied_before_the_loop(microbatches, period):
    def loss_fn(w, x):
        return jnp.tanh(x @ w).sum()

    element = np.ones((64, 32), np.float32)
    tap = tr.Tap("loss", mode=tr.every(period) if period > 1 else "all", reduce="tensor")
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.1), jnp.ones((32, 4)), accumulation=microbatches, observe=[tap]
    )
    steps = 20
    engine = trainer.engine
    engine.use([element])
    made = engine.runner.compiled(engine.loop_state, steps, engine.sight.period)
    total = element.nbytes * steps * microbatches
    assert made.compiled.memory_analysis().argument_size_in_bytes > total
    # Those of one step and what it computes with them, twice over.
    assert made.compiled.memory_analysis().temp_size_in_bytes < total / 4
