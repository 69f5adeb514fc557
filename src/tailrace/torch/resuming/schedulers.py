"""The schedulers of an optimizer that the user's loop steps itself, between calls."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tailrace.errors import CheckpointError


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made for an optimizer; all but ReduceLROnPlateau count its steps."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def schedulers_of(optimizer: torch.optim.Optimizer, besides: Sequence[Any]) -> list[LRScheduler]:
    """The schedulers of an optimizer, by class; `besides` are known, and not among them.

    An optimizer does not know its schedulers, so all objects are looked through: 0.1 s in a large
    process.
    """
    # By type: `isinstance` asks objects for their class, and some warn when they are asked anything.
    every = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    own = [one for one in every if getattr(one, "optimizer", None) is optimizer]
    known = {id(one) for one in besides}
    inner = {id(part) for one in [*own, *besides] for part in getattr(one, "_schedulers", ())}
    found = [one for one in own if id(one) not in known | inner]
    found.sort(key=lambda one: type(one).__name__)
    names = [type(one).__name__ for one in found]
    if len(set(names)) < len(names):
        raise CheckpointError(
            f"A checkpoint has the states of the optimizer's schedulers, and tells them apart by their "
            f"classes. Received: {', '.join(names)}. Give those that the loop steps to "
            f"model.resume(first, second), always in the same order."
        )
    return found
