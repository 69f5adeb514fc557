"""The update rules of the optimizers in JAX, with PyTorch's arithmetic, step by step.

Options that decide which tensors exist (momentum or none, Nesterov or not) are fixed when a model is
compiled. Every number (learning rates, betas, decays) is an input of the program: changing one costs
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.torch.optim import further_rules
from tailrace.torch.optim.further_rules import correction, further_numbers, moments

COLUMNS = (
    "lr",
    "weight_decay",
    "momentum",
    "undamped",
    "beta1",
    "rest1",
    "log_beta1",
    "beta2",
    "rest2",
    "log_beta2",
    "eps",
    "alpha",
    "rest_alpha",
    "max_weight_norm",
    "loss_scaling",
    "max_grad_norm",
)
"""The numbers of one parameter group, in the order of the device array."""


def columns_of(kind: str) -> tuple[str, ...]:
    """The numbers of one parameter group of a kind of optimizer, in the order of the device array.

    Those that one kind has come last: files saved by the others keep their form.
    """
    return COLUMNS + further_rules.COLUMNS.get(kind, ())


def row_of(
    group: Mapping[str, Any], kind: str, loss_scaling: float, max_grad_norm: float
) -> list[float]:
    """The numbers of a parameter group; differences and logarithms are computed in double precision."""
    # PyTorch computes 1 - beta in double precision. In float32, 1 - 0.999 is wrong from the fifth
    # digit on.
    beta1, beta2 = (float(beta) for beta in group.get("betas", (0.0, 0.0)))
    alpha = float(group.get("alpha", 0.0))
    values = {
        "lr": float(group["lr"]),
        "weight_decay": float(group.get("weight_decay", 0.0)),
        "momentum": float(group.get("momentum", 0.0)),
        "undamped": 1.0 - float(group.get("dampening", 0.0)),
        "beta1": beta1,
        "rest1": 1 - beta1,
        "log_beta1": math.log(beta1) if beta1 > 0 else -np.inf,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "log_beta2": math.log(beta2) if beta2 > 0 else -np.inf,
        "eps": float(group.get("eps", 0.0)),
        "alpha": alpha,
        "rest_alpha": 1 - alpha,
        "max_weight_norm": float(group.get("max_weight_norm", 0.0) or 0.0),
        "loss_scaling": loss_scaling,
        "max_grad_norm": max_grad_norm,
    }
    # Before every call, so only for the kinds that have any.
    if kind in further_rules.COLUMNS:
        values |= further_numbers(group)
    return [values[name] for name in columns_of(kind)]


class Hypers:
    """The numbers of one group inside the program, by name."""

    def __init__(self, row: TensorLike, kind: str) -> None:
        self._row, self._columns = row, columns_of(kind)

    def __getattr__(self, name: str) -> Any:
        # A sum of one number, not a slice: XLA hoists it out of the loop, while a slice would be a
        # separate kernel in each step on a GPU.
        one = np.arange(len(self._columns)) == self._columns.index(name)
        found = self.__dict__[name] = jnp.sum(jnp.where(one, self._row, 0))
        return found


@dataclasses.dataclass(frozen=True)
class GroupRule:
    """The update rule of one parameter group.

    Attributes:
        kind: "sgd", "adam", "rmsprop", "lamb", or one of `further_rules`.
        params: their names.
        flags: the options that decide which tensors exist.
    """

    kind: str
    params: tuple[str, ...]
    flags: frozenset[str]

    @property
    def slots(self) -> tuple[str, ...]:
        """The state tensors that each parameter has, by PyTorch's names."""
        has = self.flags.__contains__
        if self.kind in further_rules.SLOTS:
            return further_rules.SLOTS[self.kind]
        if self.kind == "sgd":
            return ("momentum_buffer",) if has("momentum") else ()
        if self.kind in ("adam", "lamb"):
            return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if has("amsgrad") else []))
        return (
            "square_avg",
            *(["grad_avg"] if has("centered") else []),
            *(["momentum_buffer"] if has("momentum") else []),
        )

    def start(self, slot: str) -> float:
        """The initial value of a state tensor."""
        return 1.0 if slot == "square_avg" and "tf" in self.flags else 0.0

    def update(
        self, p: TensorLike, g: TensorLike, slots: dict[str, Any], h: Hypers, step: jax.Array
    ) -> Any:
        """The next value of a parameter; `slots` is changed. All in float32; `step` counts from 1."""
        if "maximize" in self.flags:
            g = -g
        if "weight_decay" in self.flags and "decoupled" not in self.flags:
            g = g + h.weight_decay * p
        elif "weight_decay" in self.flags and self.kind != "lamb":  # which has it in its update
            p = p * (1 - h.lr * h.weight_decay)
        further = further_rules.FURTHER.get(self.kind)
        rule = further or getattr(self, f"_{self.kind}")
        return rule(p, g, slots, h, step)

    def _sgd(
        self, p: TensorLike, g: TensorLike, slots: dict[str, Any], h: Hypers, step: jax.Array
    ) -> Any:
        if "momentum" in self.flags:
            added = h.undamped * g if "dampening" in self.flags else g
            buffer = h.momentum * slots["momentum_buffer"] + added
            if "dampening" in self.flags:
                buffer = jnp.where(step == 1, g, buffer)  # PyTorch does not damp the first step
            slots["momentum_buffer"] = buffer
            g = g + h.momentum * buffer if "nesterov" in self.flags else buffer
        return p - h.lr * g

    def _corrections(self, h: Hypers, step: jax.Array) -> tuple[Any, Any]:
        if "uncorrected" in self.flags:
            return jnp.float32(1), jnp.float32(1)
        return correction(h.log_beta1, step), correction(h.log_beta2, step)

    def _adam(
        self, p: TensorLike, g: TensorLike, slots: dict[str, Any], h: Hypers, step: jax.Array
    ) -> Any:
        first, second = moments(g, slots, h)
        correction1, correction2 = self._corrections(h, step)
        if "amsgrad" in self.flags:
            second = slots["max_exp_avg_sq"] = jnp.maximum(slots["max_exp_avg_sq"], second)
        # Two roots and not one of the quotient, as PyTorch: `eps` is added after the correction.
        denominator = jnp.sqrt(second) / jnp.sqrt(correction2) + h.eps
        return p - (h.lr / correction1) * first / denominator

    def _lamb(
        self, p: TensorLike, g: TensorLike, slots: dict[str, Any], h: Hypers, step: jax.Array
    ) -> Any:
        first, second = moments(g, slots, h)
        correction1, correction2 = self._corrections(h, step)
        update = (first / correction1) / (jnp.sqrt(second / correction2) + h.eps)
        update = update + h.weight_decay * p
        # No trust ratio for weights of zeros: a new bias would never move.
        weight_norm = jnp.minimum(jnp.sqrt(jnp.sum(p * p)), h.max_weight_norm)
        update_norm = jnp.sqrt(jnp.sum(update * update))
        usable = (weight_norm > 0) & (update_norm > 0)
        trust = jnp.where(usable, weight_norm / jnp.where(usable, update_norm, 1), 1)
        return p - h.lr * trust * update

    def _rmsprop(
        self, p: TensorLike, g: TensorLike, slots: dict[str, Any], h: Hypers, step: jax.Array
    ) -> Any:
        square = slots["square_avg"] = h.alpha * slots["square_avg"] + h.rest_alpha * g * g
        if "centered" in self.flags:
            # As `lerp_` in PyTorch, start + weight * (end - start): two products would round
            # otherwise.
            mean = slots["grad_avg"] = slots["grad_avg"] + h.rest_alpha * (g - slots["grad_avg"])
            square = square - mean * mean
        tf = "tf" in self.flags
        # TensorFlow adds `eps` inside of the root, and applies the rate before momentum.
        root = jnp.sqrt(square + h.eps) if tf else jnp.sqrt(square) + h.eps
        change = g / root
        if "momentum" not in self.flags:
            return p - h.lr * change
        change = h.lr * change if tf else change
        buffer = slots["momentum_buffer"] = h.momentum * slots["momentum_buffer"] + change
        return p - buffer if tf else p - h.lr * buffer
