"""The options that decide the bits of a training, in words: to say which of them have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import CodeType
from typing import Any

from tailrace.base.messages import note_once
from tailrace.program.compiling.build import recorded_text
from tailrace.trainer.engine import Engine
from tailrace.trainer.showing.optimizer_text import optimizer_text


def option_texts(engine: Engine) -> dict[str, str]:
    """Each option that may be another one when a fit is resumed, and then changes its steps."""
    step = engine.step_function
    shares = step.share_state
    return {
        "optimizer": optimizer_text(engine.optimizer),
        "precision": "None" if step.precision is None else str(step.precision.dtype),
        "loss_scale": str(step.loss_scale),
        "weight": function_text(engine.accumulation.weight),
        "replica_state": function_text(shares)
        if callable(shares)
        else ("mean" if shares else "each"),
        "build": recorded_text(engine.built),
    }


def function_text(function: object) -> str:
    """A function by its name and what it does, so that an edited one has another text.

    >>> function_text(lambda x: x + 1) == function_text(lambda x: x + 2)
    False
    """
    if function is None:
        return "None"
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return str(name)
    # Not the values around it: arrays are large, and objects have no text that stays.
    digest = hashlib.sha256(repr(_said(code)).encode()).hexdigest()
    return f"{name} ({digest[:8]})"


def _said(code: CodeType) -> tuple[Any, ...]:
    """What a function computes: its instructions, names and constants; not where it is written."""
    constants = [_said(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def note_changed(
    then: Mapping[str, str], now: Mapping[str, str], directory: str, finished: bool, more: str = ""
) -> None:
    """Say which options are others than those of the checkpoint that is resumed.

    Args:
        then: the texts in the checkpoint; of earlier versions only some.
        now: those of this fit.
        directory: the checkpoint directory.
        finished: whether nothing is left to train.
        more: what else is to be known about a change.
    """
    changed = [name for name in now if name in then and then[name] != now[name]]
    if not changed:
        return
    what = "The finished fit is returned" if finished else "The fit continues with the new one"
    there = ", ".join(f"{name}: {then[name]}" for name in changed)
    here = ", ".join(f"{name}: {now[name]}" for name in changed)
    note_once(
        f"The checkpoint directory {directory!r} was trained with {there}, and this trainer has "
        f"{here}. {what}{more}; a separate training needs another directory.",
        key=f"options {directory} {here}",
    )
