"""Models get Tailrace's trainer: an object beside each of them, which Keras' methods ask for.

Classes of models stay as they are, so files, pickles and clones are those of plain Keras.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import keras

from tailrace.errors import OptionError
from tailrace.keras.handles import attach, attached
from tailrace.keras.keras_internals import PLAIN, functional_class, hook
from tailrace.keras.model import ASSET, Adopted
from tailrace.keras.pipelines.assignment import stages_of
from tailrace.keras.scopes import Scopes
from tailrace.keras.settings.options import Options, Settings

scopes = Scopes("tailrace_strategies")
"""The scopes of strategies, each with a function that adopts the models made in it."""

_HOOKED = (
    "compile",
    "fit",
    "evaluate",
    "predict",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "jax_state_sync",
    "compute_loss_and_updates",
    "get_metrics_result",
)
_ADDED = (
    "records",
    "tensors",
    "save_assets",
    "set_gradient_accumulation_options",
    "set_pipelining_options",
    "set_infeed_queue_options",
    "set_outfeed_queue_options",
    "set_replication_options",
    "set_asynchronous_callbacks",
    "get_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
    "reset_pipeline_stage_assignment",
    "print_pipeline_stage_assignment_summary",
)


def adopt(model: Any, replicas: int = 1) -> Any:
    """Give a Keras model Tailrace's trainer; returns the same model.

    Everything about it stays: class, layers, weights, name, what it was compiled with. `fit`,
    `evaluate` and `predict` then run `steps_per_execution` batches in one program on the device.

    Args:
        model: a Sequential, Functional or subclassed model, built or not.
        replicas: how many copies of it train side by side, each on batches of its own.

    Example:
        >>> import keras, numpy as np, tailrace.keras as tk
        >>> model = tk.adopt(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        >>> model.compile("sgd", "mse", steps_per_execution=4)
        >>> x = np.ones((32, 3), "float32")
        >>> history = model.fit(x, x[:, :1], batch_size=4, verbose=0)
        >>> sorted(history.history)
        ['loss']
    """
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"tk.adopt takes a Keras model: Sequential, Functional or a subclass of keras.Model. "
            f"Received: {type(model).__name__}."
        )
    adopted = attached(model)
    if adopted is None:
        take_over(model, replicas)
    else:
        adopted.settings.replicas = replicas
        adopted.forget_programs()
    return model


def of(model: Any) -> Adopted:
    """What Tailrace adds to an adopted model, also where the model has names of its own for it.

    `model.records` is what the class of the model says, if it says anything: `tk.of(model).records`
    is ours.

    Example:
        >>> import keras, tailrace.keras as tk
        >>> class Library(keras.Model):
        ...     records = ("Blue", "Hejira")
        >>> model = tk.adopt(Library())
        >>> model.records
        ('Blue', 'Hejira')
        >>> tk.of(model).set_gradient_accumulation_options(4)
    """
    adopted = attached(model) if isinstance(model, keras.Model) else None
    if adopted is None:
        raise OptionError(
            f"tk.of takes a model that trains on the engine: made in the scope of a tk.Strategy, or "
            f"given to tk.adopt. Received: {type(model).__name__}."
        )
    return adopted


def take_over(model: Any, replicas: int, kind: type[Settings] = Settings) -> Settings:
    """Let a model train on the engine; returns what it is set to."""
    settings = kind(model, replicas)
    adopted = Adopted(model, settings)
    attach(model, adopted)
    adopted.forget_programs()
    return settings


# -- hooks in Keras, made once ------------------------------------------------------------------


class _Added:
    """An attribute of adopted models. It hides nothing: what a class or a model has comes first."""

    def __init__(self, name: str, inside: str) -> None:
        self._name, self._inside = name, inside
        self.__doc__ = getattr(Adopted, inside, Settings).__doc__

    def __get__(self, model: Any, kind: Any = None) -> Any:
        if model is None:
            return self
        adopted = attached(model)
        if adopted is None:
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        return getattr(adopted, self._inside)


def _made(make: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Make a model, which the scope around adopts."""
    make(model, *args, **kwargs)
    adopting = scopes.innermost()
    if adopting is not None and attached(model) is None:
        adopting(model)


def _functional_made(make: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Make a Functional model: all of its layers have a stage, or none."""
    make(model, *args, **kwargs)
    if attached(model) is not None and scopes.innermost() is not None:
        stages_of(model)


def _asked(name: str) -> Any:
    def around(plain: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        adopted = attached(model)
        if adopted is None:
            return plain(model, *args, **kwargs)
        return getattr(adopted, name)(*args, **kwargs)

    return around


def _load_assets(model: Any, directory: str | None) -> None:
    """Adopt a model that was saved as an adopted one; called by Keras while it is loaded."""
    path = pathlib.Path(directory, ASSET) if directory else None
    if path is None or not path.exists():
        return
    kept = json.loads(path.read_text())
    adopt(model, kept["replicas"])
    attached(model).settings.options = Options.restored(kept["options"])


@functools.cache
def install() -> None:
    """Hook Keras; once."""
    functional: Any = functional_class()
    hook(keras.Model, "__init__", _made)
    hook(functional, "__init__", _functional_made)
    for name in _HOOKED:
        PLAIN[name] = hook(keras.Model, name, _asked(name))
    for name in _ADDED:
        setattr(keras.Model, name, _Added(name, name))
    keras.Model.tailrace = _Added("tailrace", "settings")  # type: ignore[attr-defined]
    keras.Model.load_assets = _load_assets  # type: ignore[attr-defined]


install()
