"""Optimizers in a pipeline: rules of single tensors see whole tensors, norms span all stages."""

import jax
import numpy as np
import optax
import pytest
from pipelined import check_pipeline, dense_stages, elements, trained

import tailrace as tr

STAGES, PARAMS, LOSS = dense_stages([3, 5, 4, 2])


def kernels_only(params):
    return jax.tree.map(lambda p: p.ndim == 2, params)


def by_kind(params):
    return jax.tree.map(lambda p: "kernel" if p.ndim == 2 else "bias", params)


OPTIMIZERS = {
    "lamb": lambda: optax.lamb(0.02),
    "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=2),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), kernels_only), optax.sgd(0.05)
    ),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 4)),
    "multi_transform": lambda: optax.multi_transform(
        {"kernel": optax.adam(0.01), "bias": optax.sgd(0.1)}, by_kind
    ),
    "noise from a key": lambda: optax.noisy_sgd(0.05, key=jax.random.key(1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_without_a_pipeline(name):
    # Two replicas where a norm spans stages: their gradients are averaged before.
    replicas = 2 if name == "clip_by_global_norm" else 1
    with jax.numpy_dtype_promotion("standard"):
        check_pipeline(
            STAGES,
            LOSS,
            PARAMS,
            elements(12 * replicas, 3),
            optimizer=OPTIMIZERS[name](),
            count=6,
            trainer={"replicas": replicas},
        )


def test_the_global_norm_really_clips():
    """The test above would pass with a norm that never matters."""
    clipped, free = (
        trained(
            tr.Pipeline(STAGES, LOSS, accumulation=6), optimizer, PARAMS, elements(6, 3), steps=1
        )
        for optimizer in (
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
            optax.sgd(1.0),
        )
    )
    start = np.concatenate([np.ravel(p) for p in jax.tree.leaves(PARAMS)])
    steps = [
        np.linalg.norm(np.concatenate([np.ravel(p) for p in jax.tree.leaves(t.params)]) - start)
        for t in (clipped, free)
    ]
    assert steps[0] == pytest.approx(0.1, rel=1e-5)
    assert steps[1] > 0.2


def test_large_tensors_stay_on_their_device():
    """Beyond 64 KiB nothing is copied to all devices; a norm over all still is right."""
    stages, params, loss = dense_stages([3, 180, 180, 2])
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.05, momentum=0.9))
    found, _ = check_pipeline(stages, loss, params, elements(12, 3), optimizer=optimizer, count=6)
    runner = found.engine.runner
    held = runner.assembly.held
    large = [v for v in runner.assembly.carry_in if np.prod(v.aval.shape) == 180 * 180]
    assert len(large) == 2  # the kernel and its momentum
    assert {held[v] for v in large} == {frozenset([1])}
