"""PyTorch's schedulers, advanced once a step: the numbers of an optimizer for each step of a call.

A scheduler is Python, and may be anybody's, so it runs on the host: before a call it is stepped as
often as the call has steps, and what the optimizer's groups hold each time (learning rates, and with
`OneCycleLR` momentum or betas) becomes a row of a table. The program reads a row in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tailrace.errors import OptionError
from tailrace.torch.errors import UsageError


class Schedule:
    """The schedulers of a training model, given as `scheduler=`.

    Args:
        given: a scheduler, or several, which are stepped in this order.
        optimizer: the optimizer whose numbers they set.

    Attributes:
        schedulers: the schedulers.
    """

    def __init__(self, given: Any, optimizer: torch.optim.Optimizer) -> None:
        self.schedulers = tuple(given) if isinstance(given, list | tuple) else (given,)
        self.optimizer = optimizer
        for scheduler in self.schedulers:
            _check(scheduler, optimizer)
        self._noted = self._counts()
        self._before: Any = None

    def rows(
        self, steps: int, numbers: Callable[[], np.ndarray], flags: Callable[[], Any]
    ) -> np.ndarray:
        """Advance by `steps` steps; the numbers in each of them, [steps, groups, numbers].

        Args:
            steps: the steps of a call.
            numbers: the current numbers of the optimizer.
            flags: what the program is compiled for.
        """
        self._check_not_stepped()
        before = self._before = self._state()
        # The optimizer's steps are made on the device, where schedulers do not see them.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        rows, compiled = [], flags()
        try:
            for number in range(steps):
                if flags() != compiled:
                    raise UsageError(
                        f"A schedule changes the numbers of an optimizer, and which tensors its state "
                        f"has is fixed when the model is compiled: in step {number} of this call, "
                        f"momentum, dampening or weight_decay became 0, or is no longer 0. Let it end "
                        f"with a small number instead."
                    )
                rows.append(numbers())
                for scheduler in self.schedulers:
                    _step(scheduler)
        except BaseException:
            self._put(before)
            raise
        self._noted = self._counts()
        return np.stack(rows)

    def settle(self, steps: int, of: int) -> None:
        """After a call that made only `steps` of its steps: the schedulers are those after these."""
        before, self._before = self._before, None
        if before is None or steps == of:
            return
        self._put(before)
        for _ in range(steps):
            for scheduler in self.schedulers:
                _step(scheduler)
        self._noted = self._counts()

    def states(self) -> list[dict[str, Any]]:
        """The states of the schedulers, as `state_dict` gives them."""
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of `states()`."""
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._noted = self._counts()

    def _check_not_stepped(self) -> None:
        pairs = zip(self.schedulers, self._noted, self._counts(), strict=True)
        for scheduler, noted, now in pairs:
            # Other counts are those of a state that was loaded.
            if noted is not None and now == noted + 1:
                raise UsageError(
                    f"The scheduler that is given as scheduler= is advanced by the calls of the model, "
                    f"once a step. {type(scheduler).__name__}.step() was called besides. Remove that "
                    f"call; for a schedule by epochs, leave scheduler= out and call step() after each "
                    f"epoch."
                )

    def _counts(self) -> list[int | None]:
        return [_count(scheduler) for scheduler in self.schedulers]

    def _state(self) -> Any:
        return _copied((self.states(), list(numbers_of(self.optimizer))))

    def _put(self, state: Any) -> None:
        states, groups = _copied(state)  # a scheduler goes on with the lists that it is given
        put_numbers(self.optimizer, groups)
        self.load(states)


def numbers_of(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """What each group of an optimizer holds besides its parameters."""
    for group in optimizer.param_groups:
        yield {name: value for name, value in group.items() if name != "params"}


def put_numbers(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Put back what `numbers_of` gave."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for name, value in numbers.items():
            now = group.get(name)
            # A rate in a tensor stays in that tensor: others may hold it.
            if isinstance(now, torch.Tensor):
                now.copy_(torch.as_tensor(value))
            else:
                group[name] = value


def _check(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptionError(
            "scheduler= is advanced once a step, in the calls of the model, and ReduceLROnPlateau "
            "needs a metric for each step. Leave it out, and call scheduler.step(metric) after a call: "
            "the next one trains with its rates."
        )
    if not (isinstance(scheduler, LRScheduler) and callable(getattr(scheduler, "step", None))):
        raise OptionError(
            f"scheduler must be a scheduler of torch.optim.lr_scheduler, or a list of them, got {kind}."
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise OptionError(
            f"scheduler= sets the rates of the optimizer that the model trains with. The {kind} was "
            f"made for another one. Make it with the optimizer that is given to the model."
        )


def _step(scheduler: Any) -> None:
    try:
        scheduler.step()
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"The scheduler {type(scheduler).__name__} is advanced once a step, and refuses the next "
            f"one: {error} Make it for all steps of the training (device_iterations in a call), and "
            f"with a step() that needs no arguments."
        ) from error


def _count(scheduler: Any) -> int | None:
    """How often a scheduler has been stepped, as far as it says so."""
    found = getattr(scheduler, "last_epoch", None)
    if found is None:  # a `ChainedScheduler` leaves counting to those in it
        inner = getattr(scheduler, "_schedulers", None)
        return _count(inner[0]) if inner else None
    return found if isinstance(found, int) else None


def _copied(value: Any) -> Any:
    """A copy of containers and tensors; other objects, such as functions, stay themselves."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: _copied(one) for key, one in value.items()})
        return copied
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value
