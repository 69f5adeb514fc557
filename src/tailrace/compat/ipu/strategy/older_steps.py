"""Steps of TensorFlow's Keras, `train_step(self, data)`, as those of Keras 3 on JAX.

There a step changes variables and returns what to show. Here it gets their values and returns the new
ones: `train_step(state, data)` returns `(logs, state)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.compat.ipu.graph.discovery import keras_scope
from tailrace.compat.ipu.graph.gradients import evaluate
from tailrace.compat.ipu.graph.state import Found, Scope, scope_of

if TYPE_CHECKING:
    import keras

_KINDS = {
    "train_step": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test_step": ("trainable", "non_trainable", "metrics"),
    "predict_step": ("trainable", "non_trainable"),
}
"""Whose values a step gets, in Keras' order."""


def adapt(model: keras.Model) -> None:
    """Let steps of a model that take data alone take the state as well."""
    for name in _KINDS:
        step = getattr(type(model), name)
        if takes_data_alone(step):
            note_once(
                f"{type(model).__name__}.{name}(self, data) is a step of TensorFlow's Keras. In Keras "
                f"3 on JAX it is {name}(self, state, data) and returns (logs, state)."
            )
            # Past Keras' `__setattr__`, which tracks attributes.
            model.__dict__[name] = functools.partial(_step, model, name, step)


def takes_data_alone(step: Callable[..., Any]) -> bool:
    """Whether a step of a model has one argument, as in TensorFlow's Keras."""
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = {parameter.kind for parameter in parameters}
    return len(parameters) == 1 and kinds <= {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    }


def _step(
    model: keras.Model, name: str, step: Callable[..., Any], state: Tree, data: TensorLike
) -> Any:
    groups = [_variables(model, kind) for kind in _KINDS[name]]
    variables = [variable for group in groups for variable in group]
    known = {id(variable): variable for variable in variables}

    def run(values: Sequence[Any], data: TensorLike) -> Any:
        # Everything may be written: which variables such a step changes is not known, and Keras
        # takes all of them back.
        scope = Scope(Found(variables=known, written=known), looking=False)
        scope.values.update(zip(known, values, strict=True))
        with keras_scope(), scope_of(scope):
            out = step(model, data)
            return out, [scope.read(variable) for variable in variables]

    given = [value for group in state for value in group]
    # Traced first: gradients asked for by a tape are answered from the traced equations.
    closed, form = jax.make_jaxpr(run, return_shape=True)(given, data)
    found = evaluate(closed, jax.tree.leaves((given, data)))
    out, values = jax.tree.unflatten(jax.tree.structure(form), found)
    rest = iter(values)
    after = tuple([next(rest) for _ in group] for group in groups)
    # Keras takes back only the non-trainable variables from `predict_step`.
    return out, after[1] if name == "predict_step" else after


def _variables(model: keras.Model, kind: str) -> list[Any]:
    if kind == "optimizer":
        return list(model.optimizer.variables)
    return list(getattr(model, f"{kind}_variables"))
