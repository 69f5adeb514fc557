"""Everything this front end relies on in Keras beyond its public interface, with a probe for each.

The probes run when `tailrace.keras` is imported, except those that build a model, which run before
their first use. Not everything can be probed: that Keras slices arrays in order, and that a trainer's
state is passed from batch to batch as a tuple, is known only for tested versions. So there is an upper
bound.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tailrace.base.seams import Package, Seam

PACKAGE = Package("Keras", "keras", keras.__version__, newest="3.15.1")
BELOW = 4
"""The first major version that is refused without a test."""


def check() -> None:
    """Raise a `VersionError` if Keras does not behave as expected."""
    if int(PACKAGE.version.split(".")[0]) >= BELOW:
        raise PACKAGE.unknown("its major version")
    PACKAGE.check(seam for seam in SEAMS if not seam.late)


@functools.cache
def check_graphs() -> None:
    """The same for the graph of functional models, before one is read."""
    PACKAGE.check([_GRAPHS])


def _constants(function: Callable[..., Any]) -> tuple[Any, ...]:
    # In the compiled code: the source may be missing, and a call would need a model.
    code = inspect.unwrap(function).__code__
    names = code.co_names + code.co_varnames + code.co_freevars
    return (*code.co_consts, *names)


def _has(owner: object, *names: str) -> bool:
    return all(hasattr(owner, name) for name in names)


def _losses() -> bool:
    names = list(inspect.signature(keras.Model.compute_loss_and_updates).parameters)  # type: ignore[attr-defined]
    first = ["self", "trainable_variables", "non_trainable_variables", "metrics_variables"]
    return names[:7] == [*first, "x", "y", "sample_weight"]


def _functions() -> bool:
    names = ("make_train_function", "make_test_function", "make_predict_function")
    return _has(keras.Model, *names, "jax_state_sync", "stateless_call")


def _seeds() -> bool:
    return keras.random.SeedGenerator(0).state.path.endswith("seed_generator_state")


def _scaling() -> bool:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([])
    return _has(optimizer, "inner_optimizer", "dynamic_scale", "initial_scale")


def _cached_validation() -> bool:
    return "_use_cached_eval_dataset" in _constants(keras.Model.evaluate)


def _first_batches() -> bool:
    names = list(inspect.signature(keras.Model._symbolic_build).parameters)  # type: ignore[attr-defined]
    return names == ["self", "iterator", "data_batch"]


@contextlib.contextmanager
def _tensorflow_unasked() -> Iterator[None]:
    """Inside, Keras describes values without TensorFlow.

    It asks whether each of them is one of TensorFlow's shapes, and imports it for that, which takes
    seconds. No value of the probe is.
    """
    lazy: Any = keras.saving.serialize_keras_object.__globals__.get("tf")
    if getattr(lazy, "_available", True) is not None:  # it has been asked, or Keras has changed
        yield
        return
    lazy._available = False
    try:
        yield
    finally:
        lazy._available = None


def _graph_description() -> bool:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with _tensorflow_unasked():
        node = model.get_config()["layers"][1]["inbound_nodes"][0]
    tensor = node["args"][0]
    described = tensor["class_name"] == "__keras_tensor__" and "kwargs" in node
    return described and len(tensor["config"]["keras_history"]) == 3


_GRAPHS = Seam("the description of functional models", "pipelines", _graph_description, late=True)

SEAMS = (
    Seam("the functions of a trainer", "fit, evaluate, predict", _functions),
    Seam("compute_loss_and_updates' parameters", "every training step", _losses),
    Seam("the name of a seed's variable", "random layers", _seeds),
    Seam("LossScaleOptimizer's variables", "mixed precision", _scaling),
    Seam(
        "the list of callbacks",
        "checkpoints",
        lambda: _has(keras.callbacks.CallbackList(), "_flush_futures", "callbacks"),
    ),
    Seam("the way that fit validates", "validation_data", _cached_validation),
    Seam("the batch that a model is built from", "fit(timeout_s=)", _first_batches),
    Seam(
        "the aggregation of variables", "replicas", lambda: _has(keras.Variable(0.0), "aggregation")
    ),
    Seam(
        "StatelessScope's interface",
        "state on the device",
        lambda: _has(keras.StatelessScope, "get_current_value", "add_update"),
    ),
    _GRAPHS,
)


def probed() -> tuple[tuple[Package, tuple[Seam, ...]], ...]:
    """What is relied on, for `tailrace doctor`."""
    return ((PACKAGE, SEAMS),)
