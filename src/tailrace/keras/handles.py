"""The link between a Keras model and its `model.Adopted`."""

from __future__ import annotations

from typing import Any

_NAME = "_tailrace"


def attach(model: Any, adopted: Any) -> None:
    """Let a model train on the engine."""
    model.__dict__[_NAME] = adopted  # bypasses Keras' `__setattr__`, which would track it


def attached(model: Any) -> Any:
    """The `Adopted` of a model; None for one that Keras trains."""
    return model.__dict__.get(_NAME)


def settings_of(model: Any) -> Any:
    """The `Settings` of an adopted model."""
    return attached(model).settings
