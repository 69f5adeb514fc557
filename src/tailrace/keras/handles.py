"""The link between a Keras model and its `model.Adopted`."""

from __future__ import annotations

from typing import Any

import keras

_NAME = "_tailrace"

AnyAdopted = Any
"""A `model.Adopted`. Its file is above those that need this name; see `callbacks.AnyTrainer`."""


def attach(model: keras.Model, adopted: AnyAdopted) -> None:
    """Let a model train on the engine."""
    model.__dict__[_NAME] = adopted  # bypasses Keras' `__setattr__`, which would track it


def attached(model: keras.Model) -> AnyAdopted:
    """The `Adopted` of a model; None for one that Keras trains."""
    return model.__dict__.get(_NAME)


def settings_of(model: keras.Model) -> Any:
    """The `Settings` of an adopted model."""
    return attached(model).settings
