"""Gives models Tailrace's trainer: an object attached to each, which hooked Keras methods look up.

The classes of models do not change, so files, pickles and clones are those of plain Keras.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tailrace.errors import OptionError
from tailrace.keras.handles import attach, attached
from tailrace.keras.keras_internals import PLAIN, functional_class, hook
from tailrace.keras.model import ASSET, Adopted
from tailrace.keras.pipelines.stages import stages_of
from tailrace.keras.scopes import Scopes
from tailrace.keras.settings.options import Options, Settings
from tailrace.program.compiling.build import DEFAULT, Build, Option

scopes = Scopes("tailrace_strategies")
"""The open scopes of strategies, each with a function that adopts models created in it."""

# In Keras' own classes: overrides of a user's class come first, and reach these by `super()`.
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
    "_symbolic_build",
)
_ADDED = (
    "records",
    "tensors",
    "replay",
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


def adopt(
    model: keras.Model,
    replicas: int = 1,
    *,
    rewrites: Mapping[str, bool] | None = None,
    compiler_options: Mapping[str, Option] | None = None,
) -> Any:
    """Give a Keras model Tailrace's trainer; returns the same model.

    Its class, layers, weights, name and compile arguments do not change. `fit`, `evaluate` and
    `predict` then run `steps_per_execution` batches in one program on the device.

    Args:
        model: a Sequential, Functional or subclassed model, built or not.
        replicas: the number of copies that train in parallel, each on different batches.
        rewrites: rewrites of its programs to switch off, such as `{"boundaries": False}`.
        compiler_options: options of XLA's compiler for its programs, by their names in `XLA_FLAGS`.

    Raises:
        OptionError: it is not a Keras model, or there is no such rewrite or option.

    Example:
        >>> import tailrace.keras as tk, keras, numpy as np
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
    build = Build.of(rewrites, compiler_options)
    adopted = attached(model)
    if adopted is None:
        take_over(model, replicas, build=build)
    else:
        adopted.settings.replicas, adopted.settings.build = replicas, build
        # Programs are traced for a number of replicas.
        adopted.forget_programs()
    return model


def of(model: keras.Model) -> Adopted:
    """What Tailrace adds to an adopted model, even if the model's class uses the same names.

    `model.records` is that of the model's class, if it has one: `tk.of(model).records` is ours.

    Raises:
        OptionError: the model was not adopted.

    Example:
        >>> import tailrace.keras as tk, keras
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


def take_over(
    model: keras.Model,
    replicas: int,
    kind: type[Settings] = Settings,
    build: Build = DEFAULT,
) -> Settings:
    """Let a model train on the engine; returns its settings."""
    settings = kind(model, replicas)
    settings.build = build
    adopted = Adopted(model, settings)
    attach(model, adopted)
    adopted.forget_programs()
    return settings


# -- hooks in Keras, installed once -------------------------------------------------------------


class _Added:
    """An attribute of adopted models. Attributes of the class or the model take precedence."""

    def __init__(self, name: str, inside: str) -> None:
        self._name, self._inside = name, inside
        self.__doc__ = getattr(Adopted, inside, Settings).__doc__

    def __get__(self, model: keras.Model, kind: type | None = None) -> Any:
        if model is None:
            return self
        adopted = attached(model)
        if adopted is None:
            # For other models the name must not exist: `hasattr` and a user's own `__getattr__`
            # rely on that.
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        return getattr(adopted, self._inside)


def _made(make: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> None:
    """Create a model, and let an open scope adopt it."""
    make(model, *args, **kwargs)
    adopting = scopes.innermost()
    # A model's `__init__` may call that of its base classes, each of which comes here.
    if adopting is not None and attached(model) is None:
        adopting(model)


def _functional_made(
    make: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> None:
    """Create a Functional model: either all of its layers have a stage, or none."""
    make(model, *args, **kwargs)
    if attached(model) is not None and scopes.innermost() is not None:
        stages_of(model)


def _asked(name: str) -> Any:
    def around(plain: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        # Asked in each call: models may be adopted at any time, and others run Keras' own methods.
        adopted = attached(model)
        if adopted is None:
            return plain(model, *args, **kwargs)
        return getattr(adopted, name)(*args, **kwargs)

    return around


def _load_assets(model: keras.Model, directory: str | None) -> None:
    """Adopt a model that was saved as adopted; called by Keras while it loads one."""
    path = pathlib.Path(directory, ASSET) if directory else None
    if path is None or not path.exists():
        return
    kept = json.loads(path.read_text())
    adopt(model, kept["replicas"])
    attached(model).settings.options = Options.restored(kept["options"])


@functools.cache
def install() -> None:
    """Install the hooks, once."""
    functional: Any = functional_class()
    hook(keras.Model, "__init__", _made)
    # A Functional model knows its layers when it is made; a subclassed one does not, and is checked
    # later.
    hook(functional, "__init__", _functional_made)
    for name in _HOOKED:
        PLAIN[name] = hook(keras.Model, name, _asked(name))
    for name in _ADDED:
        setattr(keras.Model, name, _Added(name, name))
    keras.Model.tailrace = _Added("tailrace", "settings")  # type: ignore[attr-defined]
    keras.Model.load_assets = _load_assets  # type: ignore[attr-defined]


install()
