"""Rates that follow from the number of steps: `tf.train.exponential_decay` and others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.deferred import describing, running
from tailrace.compat.ipu.graph.state import is_variable, value_of
from tailrace.compat.tensorflow.operations.table import OPERATIONS, operation


def _decay(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put a rule into the table: of a graph or program a rate, elsewhere a function that gives it."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        computed = operation(*(f"train.{name}" for name in names))(rule)

        @functools.wraps(rule)
        def rate(*args: Any, **kwargs: Any) -> Any:
            # Elsewhere TensorFlow 2 gives a function, which an optimizer calls in each step.
            if describing() or running() is not None:
                return computed(*args, **kwargs)
            return lambda: computed(*args, **kwargs)

        for name in names:
            OPERATIONS[f"train.{name}"] = rate
        return rate

    return enter


def _number(step: TensorLike) -> Any:
    # Steps are integers; TensorFlow computes rates in the dtype of the rate.
    return jnp.asarray(value_of(step) if is_variable(step) else step, jnp.float32)


def _passed(step: TensorLike, decay_steps: TensorLike, staircase: bool) -> Any:
    passed = _number(step) / _number(decay_steps)
    return jnp.floor(passed) if staircase else passed


@_decay("exponential_decay")
def exponential_decay(
    learning_rate: TensorLike,
    global_step: TensorLike,
    decay_steps: TensorLike,
    decay_rate: TensorLike,
    staircase: bool = False,
) -> Any:
    """`learning_rate * decay_rate ** (global_step / decay_steps)`."""
    return learning_rate * jnp.power(
        _number(decay_rate), _passed(global_step, decay_steps, staircase)
    )


@_decay("natural_exp_decay")
def natural_exp_decay(
    learning_rate: TensorLike,
    global_step: TensorLike,
    decay_steps: TensorLike,
    decay_rate: TensorLike,
    staircase: bool = False,
) -> Any:
    """`learning_rate * exp(-decay_rate * global_step / decay_steps)`."""
    return learning_rate * jnp.exp(-decay_rate * _passed(global_step, decay_steps, staircase))


@_decay("inverse_time_decay")
def inverse_time_decay(
    learning_rate: TensorLike,
    global_step: TensorLike,
    decay_steps: TensorLike,
    decay_rate: TensorLike,
    staircase: bool = False,
) -> Any:
    """`learning_rate / (1 + decay_rate * global_step / decay_steps)`."""
    return learning_rate / (1 + decay_rate * _passed(global_step, decay_steps, staircase))


@_decay("polynomial_decay")
def polynomial_decay(
    learning_rate: TensorLike,
    global_step: TensorLike,
    decay_steps: TensorLike,
    end_learning_rate: TensorLike = 0.0001,
    power: TensorLike = 1.0,
    cycle: bool = False,
) -> Any:
    """From one rate to another, along a power of the part of the steps that is left."""
    step, steps = _number(global_step), _number(decay_steps)
    # A cycle stretches the decay to the next multiple that the step has not passed.
    steps = steps * jnp.maximum(1.0, jnp.ceil(step / steps)) if cycle else steps
    left = 1 - jnp.minimum(step, steps) / steps
    return (learning_rate - end_learning_rate) * jnp.power(left, power) + end_learning_rate


@_decay("cosine_decay")
def cosine_decay(
    learning_rate: TensorLike,
    global_step: TensorLike,
    decay_steps: TensorLike,
    alpha: TensorLike = 0.0,
) -> Any:
    """Along half a cosine, to `alpha` of the rate."""
    part = jnp.minimum(_passed(global_step, decay_steps, False), 1.0)
    return learning_rate * ((1 - alpha) * 0.5 * (1 + jnp.cos(math.pi * part)) + alpha)


@_decay("piecewise_constant", "piecewise_constant_decay")
def piecewise_constant(
    x: TensorLike, boundaries: Sequence[TensorLike], values: Sequence[TensorLike]
) -> Any:
    """The value of the interval that the step is in; a boundary belongs to the one before it."""
    place = sum((_number(x) > _number(end)).astype(jnp.int32) for end in boundaries)
    return jnp.asarray(values, jnp.float32)[place]
