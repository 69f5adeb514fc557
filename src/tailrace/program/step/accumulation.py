"""Accumulation of the gradients of a step's microbatches into one gradient."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.checks import check_count, member_named, member_of
from tailrace.base.spans.scopes import ACCUMULATION
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.errors import ElementError, OptionError


class Reduction(enum.StrEnum):
    """How a step combines the gradients of its microbatches.

    `RUNNING_MEAN` equals `MEAN` up to rounding; its accumulator stays as small as one gradient, so
    16-bit accumulators do not overflow. Strings are accepted wherever one is expected; an unknown one
    is an `OptionError`.

    >>> import tailrace as tr
    >>> tr.Reduction.parse("MEAN")
    <Reduction.MEAN: 'mean'>
    """

    SUM = "sum"
    MEAN = "mean"
    RUNNING_MEAN = "running_mean"

    @classmethod
    def parse(cls, value: enum.Enum | str) -> Reduction:
        """The member named `value`, in upper or lower case; members of other libraries' enums too."""
        return member_of(cls, value.name if isinstance(value, enum.Enum) else value)

    @classmethod
    def _missing_(cls, value: object) -> Reduction:
        return member_named(cls, value, "A reduction of gradients")


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Dtypes that a function has chosen, by the path of the parameter."""

    by_path: tuple[tuple[str, Any], ...]

    def __call__(self, parameter: object) -> Any:
        """Never called: an `Accumulation` looks its paths up."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Gradients of several microbatches, accumulated into one step.

    Args:
        microbatches: the number of microbatches per step.
        dtype: the dtype of the accumulators. None: that of each parameter; a dtype; or a function of
            the parameter that returns one.
        reduction: "sum", "mean" or "running_mean".
        weight: a function of a microbatch (called like the loss, without the parameters) that
            returns its weight, such as its number of tokens: a number >= 0, not 0 in all of a step.
            The step then uses the weighted mean over microbatches and replicas, which is correct if
            they are unequal; so do `evaluate` and validation, over batches, for the trainer's own
            functions (the loss, `eval_fn`).

    Raises:
        OptionError: an argument has an invalid value.

    >>> import jax.numpy as jnp
    >>> import tailrace as tr
    >>> tr.Accumulation(4, dtype=jnp.float32).reduction
    <Reduction.MEAN: 'mean'>
    """

    microbatches: int = 1
    dtype: Any = None
    reduction: Reduction | str = Reduction.MEAN
    weight: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        count = _check_microbatches("microbatches", self.microbatches)
        object.__setattr__(self, "microbatches", count)
        object.__setattr__(self, "reduction", Reduction.parse(self.reduction))
        if self.weight is not None and not callable(self.weight):
            raise OptionError(
                f"weight= of tr.Accumulation is a function of a microbatch that returns its weight. "
                f"Received: weight={self.weight!r}. For example weight=lambda x, mask: mask.sum()."
            )
        if self.weight is not None and self.reduction is Reduction.SUM:
            raise OptionError(
                "Weights make a weighted mean, so they do not go with reduction='sum'. "
                "Leave the reduction out, or multiply the loss by the weight yourself."
            )
        if self.dtype is not None:
            check_choice(self.dtype, "dtype")

    @classmethod
    def of(cls, value: Accumulation | int | None) -> Accumulation:
        """An `Accumulation`, from one or from a number of microbatches, the option `accumulation`."""
        if isinstance(value, cls):
            return value
        return cls(_check_microbatches("accumulation", 1 if value is None else value))

    def choosing_by(self, variables: Mapping[str, Any]) -> Accumulation:
        """The same, where a function that chooses dtypes is given the variables of another library.

        Args:
            variables: what the function gets, by the path of the parameter.
        """
        if self.dtype is None or _is_dtype(self.dtype):
            return self
        chosen = [
            (path, check_dtype(self.dtype(variable), f"the dtype chosen for {path!r}"))
            for path, variable in variables.items()
        ]
        return dataclasses.replace(self, dtype=_Chosen(tuple(chosen)))

    def dtype_of(self, parameter: TensorLike, name: str = "") -> Any:
        """The dtype of the accumulator of one parameter."""
        if isinstance(self.dtype, _Chosen):
            return dict(self.dtype.by_path).get(name, parameter.dtype)
        if self.dtype is None:
            return parameter.dtype
        if _is_dtype(self.dtype):
            return jnp.dtype(self.dtype)
        return check_dtype(self.dtype(parameter), f"the dtype chosen for {name!r}")

    def zeros(self, params: Tree) -> Tree:
        """Empty accumulators for `params`."""
        return jax.tree_util.tree_map_with_path(
            lambda path, p: jnp.zeros(p.shape, self.dtype_of(p, jax.tree_util.keystr(path))), params
        )

    def add(
        self, accumulated: Tree, grads: Tree, number: jax.Array, share: jax.Array | None = None
    ) -> Tree:
        """Add the gradient of microbatch `number` of the step to the accumulators.

        With weights, `share` is the fraction of this microbatch in the total weight so far.
        """

        def one(acc: jax.Array, grad: jax.Array) -> jax.Array:
            grad = grad.astype(acc.dtype)
            if share is not None:
                # The step towards the new value that makes it the weighted mean so far: the
                # accumulator never exceeds the largest gradient.
                return acc + (grad - acc) * share.astype(acc.dtype)
            if self.reduction is Reduction.SUM:
                return acc + apart(grad, number)
            if self.reduction is Reduction.MEAN:
                # Scaled before it is added: a sum of all microbatches could overflow in 16 bits.
                return acc + grad * jnp.asarray(1 / self.microbatches, acc.dtype)
            n = number.astype(acc.dtype)
            return acc * (n / (n + 1)) + grad * (1 / (n + 1))

        # Profiles find the cost of accumulation by this scope.
        with jax.named_scope(ACCUMULATION):
            return jax.tree.map(one, accumulated, grads)


def apart(grad: jax.Array, number: jax.Array) -> jax.Array:
    """A gradient that XLA computes before it is added to a sum.

    XLA's CPU compiler adds the product of a matrix and a vector to a sum in one kernel, which rounds
    differently from two kernels, but only if nothing else reads the product: a tap would change the
    last bits. A factor of one that the compiler cannot foresee keeps them apart; barriers have been
    removed by then. (A mean has a factor anyway.)
    """
    if devices.platform() != "cpu":
        return grad
    return grad * jnp.where(number >= 0, 1, 0).astype(grad.dtype)


def check_weights(weights: np.ndarray, where: Callable[[tuple[int, ...]], str]) -> None:
    """Refuse weights with which there is no mean: below 0, not finite, or of one row all 0.

    Args:
        weights: one row for each mean.
        where: describes the place of a bad one, for the message, from its index.
    """
    rule = "Weights of microbatches, Accumulation(weight=), are numbers >= 0, not all 0 in one mean"
    bad = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        index = tuple(int(n) for n in bad[0])
        raise ElementError(
            f"{rule}. Received: {weights[index]!s} for {where(index)}. Return a number >= 0, such as "
            f"the number of valid tokens."
        )
    empty = np.flatnonzero(weights.reshape(len(weights), -1).sum(axis=1) == 0)
    if len(empty):
        raise ElementError(
            f"{rule}. Received: only 0 for {where((int(empty[0]),))}. Leave such data out of the "
            f"dataset, or give it a small weight."
        )


def _check_microbatches(name: str, count: object) -> int:
    more = ": a step has at least one microbatch"
    return check_count(name, count, at_least=1, error=OptionError, more=more)


def _is_dtype(value: Any) -> bool:
    try:
        jnp.dtype(value)
    except (TypeError, ValueError, KeyError):
        return False
    return True


def check_choice(dtype: Any, what: str) -> Any:
    """The dtype of accumulators by its name, or the function that chooses it."""
    # A dtype class such as jnp.float32 is callable too, so dtypes are tested first.
    if callable(dtype) and not _is_dtype(dtype):
        return dtype
    return str(check_dtype(dtype, what))


def check_dtype(dtype: DTypeLike, what: str) -> Any:
    """`dtype`, if an accumulator of it can hold a gradient."""
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError, KeyError):
        raise OptionError(
            f"{what} must be a dtype, or a function that returns one. Received: {dtype!r}."
        ) from None
    if not jnp.issubdtype(found, jnp.inexact):
        raise OptionError(
            f"An accumulator must be able to hold a gradient, so its dtype is a float. "
            f"Received: {what} = {found}. Use float32."
        )
    return found
