"""The update rules of PyTorch's other optimizers, as functions of one tensor.

Each takes `(p, g, slots, h, step)` in float32 and returns the next value of the parameter; `slots` is
changed. State that PyTorch makes from the numbers of the first step is set where `step` is 1, not when
the program is built: a learning rate that was changed in between counts, as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike


class GroupNumbers(Protocol):
    """The numbers of one parameter group inside the program, by name: `rules.Hypers`."""

    def __getattr__(self, name: str) -> Any: ...


SLOTS = {
    "adadelta": ("square_avg", "acc_delta"),
    "adagrad": ("sum",),
    "adamax": ("exp_avg", "exp_inf"),
    "asgd": ("eta", "mu", "ax"),
    "nadam": ("mu_product", "exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "rprop": ("prev", "step_size"),
}
"""The state tensors of a parameter, by PyTorch's names."""

NUMBERS = frozenset({"mu_product", "eta", "mu"})
"""State that is one number for each parameter, in float32, not a tensor of its shape."""

COLUMNS = {
    "adadelta": ("rho", "rest_rho"),
    "adagrad": ("lr_decay", "initial"),
    "asgd": ("lambd", "t0"),
    "nadam": ("log_decay",),
    "radam": ("longest", "offset"),
    "rprop": ("shrink", "grow", "least", "most"),
}
"""The numbers of a parameter group that only this kind has."""


def further_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Those numbers of a parameter group, computed in double precision."""
    rho = float(group.get("rho", 0.0))
    shrink, grow = group.get("etas", (0.0, 0.0))
    least, most = group.get("step_sizes", (0.0, 0.0))
    beta2 = float(group.get("betas", (0.0, 0.5))[1])
    longest = 2 / (1 - beta2) - 1
    inverse = -2 / math.log(beta2) if 0 < beta2 < 1 else 0.0
    return {
        "rho": rho,
        "rest_rho": 1 - rho,
        "lr_decay": float(group.get("lr_decay", 0.0)),
        "initial": float(group.get("initial_accumulator_value", 0.0)),
        "lambd": float(group.get("lambd", 0.0)),
        "t0": float(group.get("t0", 0.0)),
        # 0.96 is a constant of PyTorch's, 0.96 ** (step * momentum_decay).
        "log_decay": math.log(0.96) * float(group.get("momentum_decay", 0.0)),
        "longest": longest,
        "offset": longest - inverse,
        "shrink": float(shrink),
        "grow": float(grow),
        "least": float(least),
        "most": float(most),
    }


def moments(g: TensorLike, slots: dict[str, Any], h: GroupNumbers) -> tuple[Any, Any]:
    """The next two moments of Adam and its relatives."""
    # As `lerp`, which PyTorch uses here, and not as a weighted sum: the digits differ.
    first = slots["exp_avg"] + h.rest1 * (g - slots["exp_avg"])
    second = h.beta2 * slots["exp_avg_sq"] + h.rest2 * g * g
    slots.update(exp_avg=first, exp_avg_sq=second)
    return first, second


def correction(log_beta: TensorLike, step: jax.Array) -> Any:
    """1 - beta**step, without the cancellation that it would have in single precision."""
    return -jnp.expm1(step.astype(jnp.float32) * log_beta)


def _adadelta(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    square = slots["square_avg"] = h.rho * slots["square_avg"] + h.rest_rho * g * g
    delta = jnp.sqrt(slots["acc_delta"] + h.eps) / jnp.sqrt(square + h.eps) * g
    slots["acc_delta"] = h.rho * slots["acc_delta"] + h.rest_rho * delta * delta
    return p - h.lr * delta


def _adagrad(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    # State is made with zeros; the initial value of the group takes their place in the first step.
    total = slots["sum"] = jnp.where(step == 1, h.initial, slots["sum"]) + g * g
    rate = h.lr / (1 + (step - 1).astype(jnp.float32) * h.lr_decay)
    return p - rate * g / (jnp.sqrt(total) + h.eps)


def _adamax(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    first = slots["exp_avg"] = slots["exp_avg"] + h.rest1 * (g - slots["exp_avg"])
    largest = jnp.maximum(h.beta2 * slots["exp_inf"], jnp.abs(g) + h.eps)
    slots["exp_inf"] = largest
    return p - (h.lr / correction(h.log_beta1, step)) * first / largest


def _asgd(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    # PyTorch uses the rate that the step before has computed, and in the first step the learning
    # rate.
    rate = jnp.where(step == 1, h.lr, slots["eta"])
    # 1 means that averaging has not begun: the average is the parameter itself.
    share = jnp.where(step == 1, 1, slots["mu"])
    p = p * (1 - h.lambd * rate) - rate * g
    slots["ax"] = jnp.where(share == 1, p, slots["ax"] + (p - slots["ax"]) * share)
    t = step.astype(jnp.float32)
    slots["eta"] = h.lr / (1 + h.lambd * h.lr * t) ** h.alpha
    slots["mu"] = 1 / jnp.maximum(1, t - h.t0)
    return p


def _nadam(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    t = step.astype(jnp.float32)
    now = h.beta1 * (1 - 0.5 * jnp.exp(t * h.log_decay))
    following = h.beta1 * (1 - 0.5 * jnp.exp((t + 1) * h.log_decay))
    # State, because the rate of each step depends on those of all steps before it.
    product = slots["mu_product"] = jnp.where(step == 1, 1, slots["mu_product"]) * now
    first, second = moments(g, slots, h)
    root = jnp.sqrt(second / correction(h.log_beta2, step)) + h.eps
    p = p - h.lr * (1 - now) / (1 - product) * g / root
    return p - h.lr * following / (1 - product * following) * first / root


def _radam(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    first, second = moments(g, slots, h)
    correction2 = correction(h.log_beta2, step)
    update = first / correction(h.log_beta1, step)
    length = _length(h, step)
    known = length > 5
    safe = jnp.where(known, length, 6)  # the root is taken of what is not chosen, too
    share = (safe - 4) * (safe - 2) * h.longest
    share = jnp.sqrt(share / ((h.longest - 4) * (h.longest - 2) * safe))
    adapted = share * jnp.sqrt(correction2) / (jnp.sqrt(second) + h.eps)
    return p - h.lr * update * jnp.where(known, adapted, 1)


def _length(h: GroupNumbers, step: jax.Array) -> Any:
    """RAdam's length of the moving average: longest - 2 t b**t / (1 - b**t), for b = beta2.

    It is the difference of two numbers near 2 / (1 - b) while t is small, and decides at 5 whether a
    step is rectified. With x = -t log b, 2 t / (exp(x) - 1) is a series whose first term, -2 / log b,
    is taken off in double precision.
    """
    t = step.astype(jnp.float32)
    x = -t * h.log_beta2
    series = 1 - x / 6 + x**3 / 360 - x**5 / 15120 + x**7 / 604800
    direct = h.longest - 2 * t / jnp.expm1(x)
    return jnp.where(x < 1, h.offset + t * series, direct)


def _rprop(
    p: TensorLike, g: TensorLike, slots: dict[str, Any], h: GroupNumbers, step: jax.Array
) -> Any:
    sign = jnp.sign(g * slots["prev"])
    factor = jnp.where(sign > 0, h.grow, jnp.where(sign < 0, h.shrink, 1))
    size = jnp.where(step == 1, h.lr, slots["step_size"]) * factor
    size = slots["step_size"] = jnp.clip(size, h.least, h.most)
    # Where the sign has turned, this step does nothing, and the next one does not shrink again.
    slots["prev"] = g = jnp.where(sign < 0, 0, g)
    return p - jnp.sign(g) * size


FURTHER: dict[str, Callable[..., Any]] = {
    "adadelta": _adadelta,
    "adagrad": _adagrad,
    "adamax": _adamax,
    "asgd": _asgd,
    "nadam": _nadam,
    "radam": _radam,
    "rprop": _rprop,
}
"""The rules by the name of their kind."""
