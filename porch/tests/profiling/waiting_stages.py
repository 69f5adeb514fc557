"""Pipelines whose stages wait a given time instead of computing: no core is needed for them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr


def _wait(x, seconds):
    def host(x, seconds):
        time.sleep(float(seconds))
        return np.asarray(x)

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, seconds)


@jax.custom_vjp
def waiting(x, forward, backward):
    return _wait(x, forward)


def _forward(x, forward, backward):
    return _wait(x, forward), backward


def _backward(backward, gradient):
    return _wait(gradient, backward), jnp.zeros_like(backward), jnp.zeros_like(backward)


waiting.defvjp(_forward, _backward)


def waiting_trainer(stages, microbatches, schedule, steps=6):
    """A trainer on elements (x, times): times[0] are those of forwards, times[1] of backwards."""

    def model(params, x, times):
        for number in range(stages):
            x = waiting(x * params[number], times[0, number], times[1, number])
            if number < stages - 1:
                x = tr.stage_boundary(x)
        return (x**2).mean()

    pipeline = tr.Pipeline(model, accumulation=microbatches, schedule=schedule)
    params = [np.float32(1)] * stages
    return tr.Trainer(pipeline, optax.sgd(0.1), params, steps_per_execution=steps)


def elements(times):
    """A dataset that gives these times for ever."""

    def data():
        while True:
            yield np.ones((2, 2), np.float32), times

    return data
