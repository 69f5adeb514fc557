"""A step of training that a session runs: a program of its own, with what the session feeds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tailrace.compat.ipu.strategy.calls import Calls
from tailrace.compat.tensorflow.v1.deferred import Feed, Step


def run_step(step: Step, feed: Feed) -> None:
    """Run a step of training in a program that is kept with it."""
    if step.program is None:
        step.program = functools.partial(
            _run, Calls(one_device=True), functools.partial(_in_program, step)
        )
    step.program(feed)


def _run(calls: Calls, function: Callable[..., Any], feed: Feed) -> None:
    calls(function, [list(feed.fed.values())], {"keys": tuple(feed.fed)})


def _in_program(step: Step, values: list[Any], keys: tuple[int, ...]) -> Any:
    loss = step.loss.value(Feed(zip(keys, values, strict=True)))
    step.minimize(loss)
    return loss
