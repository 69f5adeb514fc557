"""Which value of a forward pass is the loss.

A loss is what one of PyTorch's loss functions returns, or what `tt.identity_loss` marks. All of them
must feed into one final loss, which need not be returned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from tailrace.errors import ProgramError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Jaxpr
from tailrace.jaxprs.operations import keeps_value, stops_gradient
from tailrace.torch.capture import marked as marked  # defines its operation
from tailrace.torch.errors import UsageError
from tailrace.torch.tracing.gradient_reach import inputs_with_gradient
from tailrace.torch.tracing.watch import current_watch

LOSS_FUNCTIONS = frozenset(
    getattr(functional, name)
    for name in (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    )
)
"""PyTorch's own; the modules (`nn.NLLLoss`, ...) call these."""


class LossError(ProgramError):
    """The loss of a forward pass cannot be determined."""


def identity_loss(x: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Mark a tensor as the loss, reduced by "sum", "mean" or not at all ("none").

    For losses written by hand, and for sums of several losses. Outside a wrapped model it only
    reduces.

    Args:
        x: the tensor.
        reduction: "sum", "mean" or "none".

    Raises:
        UsageError: there is no such reduction.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> tt.identity_loss(torch.tensor([1.0, 3.0]), reduction="mean")
    tensor(2.)
    """
    if reduction == "sum":
        out = x.sum()
    elif reduction == "mean":
        out = x.mean()
    elif reduction == "none":
        # A value of its own: marking `x` itself would mark it wherever else it is used.
        out = x.clone()
    else:
        raise UsageError(
            f"Unsupported reduction type! The reduction of a loss is 'sum', 'mean' or 'none'. "
            f"Received: reduction={reduction!r}."
        )
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.tailrace.marked_loss(out)
    watch = current_watch()
    return out if watch is None else watch.mark_loss(out)


def final_loss(jaxpr: Jaxpr, losses: Sequence[Any], trained: Collection[Any]) -> int:
    """Which of the variables `losses` is the final one, into which all others feed.

    One that depends on nothing that trains, such as a metric computed without gradients, does not
    count, as long as another one does.

    Args:
        jaxpr: the forward pass, traced.
        losses: the results of loss functions in it, in the order they were computed.
        trained: its inputs that are parameters with a gradient.
    """
    if not losses:
        raise LossError(
            "Couldn't find a loss in graph. Training needs one: compute it in forward with a loss of "
            "torch.nn (such as nn.CrossEntropyLoss), or mark a value of your own with "
            "tt.identity_loss(x, reduction='mean')."
        )
    # For each variable, the losses that it is computed from. One pass is enough: equations are in the
    # order of computation.
    behind: dict[Any, frozenset[int]] = {}
    numbers: dict[Any, list[int]] = {}
    for number, var in enumerate(losses):
        numbers.setdefault(var, []).append(number)
    for eqn in jaxpr.eqns:
        reached: frozenset[int] = frozenset().union(
            *(behind.get(v, frozenset()) for v in eqn.invars if isinstance(v, internals.Var))
        )
        for out in eqn.outvars:
            behind[out] = reached.union(numbers.get(out, ()))
    # A loss under `no_grad`, or of constants, is a metric.
    training = {var for var in numbers if inputs_with_gradient(jaxpr, [var]).intersection(trained)}
    counted = training or set(numbers)
    feeding = {number for var in set(numbers) - counted for number in numbers[var]}
    for var in counted:
        own = set(numbers[var])
        feeding |= behind.get(var, frozenset()) - own
        # The same variable may be marked several times (a loss function, then `identity_loss`).
        feeding |= {n for n in own if n != max(own)}
    final = [number for number in range(len(losses)) if number not in feeding]
    # Which of several to train by is the user's choice: their sum would be a guess.
    if len(final) != 1:
        raise LossError(
            f"Multiple independent losses found in graph. Graph must have one final loss. Wrap final "
            f"graph loss in identity_loss: tt.identity_loss(total, reduction='mean'), where total is "
            f"computed from all of them, such as real_loss + fake_loss of a discriminator. Received: "
            f"{len(losses)} losses, of which {len(final)} feed into no other."
        )
    return final[0]


def computed_after(jaxpr: Jaxpr, loss: internals.Atom, results: Sequence[Any]) -> list[int]:
    """Which of `results` are computed from `loss`, with a gradient, and are not the loss itself."""
    reached, same = {loss}, {loss}
    for eqn in jaxpr.eqns:
        sources = internals.variables(eqn.invars)
        if reached.isdisjoint(sources) or stops_gradient(eqn):
            continue
        reached.update(eqn.outvars)
        # A cast or reshape of the loss is still the loss, and needs no note.
        if keeps_value(eqn) and not same.isdisjoint(sources):
            same.update(eqn.outvars)
    found = enumerate(results)
    return [n for n, var in found if isinstance(var, internals.Var) and var in reached - same]
