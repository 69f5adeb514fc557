"""Which models train on the engine: each of them carries an object of ours, a `model.Adopted`."""

from __future__ import annotations

from typing import Any

_NAME = "_tailrace"


def attach(model: Any, adopted: Any) -> None:
    """Let a model train on the engine."""
    model.__dict__[_NAME] = adopted  # past Keras' `__setattr__`, which tracks what it is given


def attached(model: Any) -> Any:
    """What was attached to a model; None for one that Keras trains."""
    return model.__dict__.get(_NAME)


def settings_of(model: Any) -> Any:
    """What an adopted model is set to: its `Settings`."""
    return attached(model).settings
