"""A training step that the user wrote: a function of a state and a batch.

Nothing is known of it but that function: no loss, no gradients, no optimizer. So whatever needs those
is refused (`trainer/own_steps.py`), and all else is as in any step. Marks name what enters and leaves:

    input/...   state/...     as they enter
    loss, aux/...             the metrics: one of the name `loss`, and the others
    updated/...               the state after the step

Activations and their gradients are found in the traced program, where scopes show them.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.feeds.feed import Feed
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.control import scan_of
from tailrace.jaxprs.marks import (
    ProgramTrace,
    Tag,
    inside_loop,
    mark,
    name_values,
    path_name,
    tracing,
)
from tailrace.program.in_program import tracing_training
from tailrace.program.loops import repeat_with, whole
from tailrace.program.step.train_state import OwnState
from tailrace.program.step.training_step import fitting_forms, small_arrays
from tailrace.program.step.whole_step import WholeStep
from tailrace.program.tracing.trace import Traced, top_loops
from tailrace.taps.catalogue import Entry
from tailrace.taps.naming import Namer

ALONE = "state"
"""The name of a state that is a single array: `state/state`."""

_NUMBERS = ((jnp.bool_, False), (jnp.integer, 0), (jnp.floating, 0.0), (jnp.complexfloating, 0j))
"""A number of Python of each kind: what a weak type is to JAX's promotion."""


class StepFunction(abc.ABC):
    """A step of the user's own, as a function of trees of arrays.

    Attributes:
        __name__: its name in messages.
    """

    __name__: str

    @abc.abstractmethod
    def __call__(self, state: Tree, element: Tree) -> tuple[Tree, Tree]:
        """The new state, of the same structure, and the metrics."""


class InTheStep:
    """The optimizer of a step of the user's own: whatever it is, it is in the step."""

    in_words = "in the step"

    def init(self, params: Tree) -> None:
        """No state beside that of the step."""
        return None

    def apply(self, grads: Tree, state: Tree, params: Tree) -> NoReturn:
        """Never called: such a step has no gradients to apply."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class OwnStep(WholeStep):
    """A step of the user's own; `loss_fn` is its `StepFunction`."""

    def loop(self, state: Any, infeed: Feed, length: int = 1) -> Any:
        """`length` steps, fed by `infeed`: the body of a training program."""
        return repeat_with(whole, length, self.once, state, infeed)

    def listed(self, traced: Traced, found: Sequence[Entry]) -> Sequence[Entry]:
        """The activations of the program: read from it, for the step itself differentiates."""
        (number,) = top_loops(traced)
        scan = scan_of(traced.jaxpr.eqns[number])
        assert scan is not None
        # Of the loop's body: what is around it is ours.
        here = (number, scan.body.number)
        entries = Namer(enter_custom=True).entries(scan.body.jaxpr)
        return [dataclasses.replace(e, position=(*here, *e.position)) for e in entries]

    def settled(self, form: Any, infeed: Feed, replicas: int) -> Any:
        """The form that the state has after a step, where it began as a number of Python.

        As `lax.scan` does: a weakly typed leaf that comes back wider begins wide.
        """
        if not any(leaf.weak_type for leaf in jax.tree.leaves(form)):
            return form
        trace = ProgramTrace(replicas=replicas)

        def once(state: Tree, element: Tree) -> Tree:
            with tracing(trace), inside_loop(trace), tracing_training():
                after, _ = self.loss_fn(state, element)
            return jax.tree.map(jnp.asarray, after)

        after = jax.eval_shape(once, form.state, infeed.spec().tree())
        return OwnState(jax.tree.map(_promoted, form.state, after))

    # -- one step -------------------------------------------------------------------------------

    def once(self, state: OwnState, element: Tree) -> OwnState:
        """One step; its metrics go to the history."""
        element = name_values("input", element)
        before = name_values("state", state.state, ALONE)
        with tracing_training():
            after, metrics = self.loss_fn(before, element)
        after = self._fitting(before, after)
        scalars, metrics = self._metrics(metrics)
        sent: dict[str, Any] = {"aux": scalars, "weight": None}
        if arrays := small_arrays(metrics):
            sent["arrays"] = arrays
        self.scalars.enqueue(sent)
        return OwnState(name_values("updated", after, ALONE))

    def _fitting(self, before: Tree, after: Tree) -> Tree:
        """The new state, of the shapes and dtypes of the old one; numbers become arrays."""
        rule = "A step returns the state in the shapes and dtypes that it got."
        return fitting_forms(before, after, rule, "The state", self.loss_fn.__name__)

    def _metrics(self, metrics: Tree) -> tuple[dict[str, jax.Array], Tree]:
        """The scalars among the metrics by name (a single one is the loss), and all as observed."""
        name = self.loss_fn.__name__
        check_arrays(f"The metrics that {name} returns are", metrics)
        found: dict[str, jax.Array] = {}

        def named(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
            called = path_name(path) or "loss"
            value = mark(value, Tag("value", called if called == "loss" else f"aux/{called}"))
            if value.ndim == 0:
                found[called] = value
            return value

        metrics = jax.tree_util.tree_map_with_path(named, metrics)
        if not found:
            raise ProgramError(
                f"A step returns (state, metrics), with at least one scalar among the metrics: they "
                f"are the history. Received from {name}: {jax.tree.structure(metrics)} without one. "
                f"Return {{'loss': loss}}, or whatever tells how training goes."
            )
        return found, metrics

    def _called(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> NoReturn:
        raise ProgramError(
            "A step of your own has no loss to evaluate. Give eval_fn= to tr.Trainer.from_step, or "
            "call trainer.evaluate(dataset, fn); both are called as fn(state, *batch)."
        )


def _promoted(before: jax.ShapeDtypeStruct, after: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not before.weak_type or before.dtype == after.dtype:
        return before
    # Numbers of Python stand for weak types: shapes have none that `result_type` would see.
    found = [
        value if leaf.weak_type else leaf.dtype
        for leaf in (before, after)
        for kind, value in _NUMBERS
        if jnp.issubdtype(leaf.dtype, kind)
    ]
    with jax.numpy_dtype_promotion("standard"):  # a strict one raises where a number does not fit
        dtype = jnp.result_type(*found) if len(found) == 2 else before.dtype
    return jax.ShapeDtypeStruct(before.shape, dtype)
