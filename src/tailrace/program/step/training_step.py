"""One training step: forward, backward, accumulation, reduction over replicas, update.

The step is defined once, here, and traced into the program of a loop. Values of interest are marked
with their names, which costs nothing unless they are observed:

    input/... param/... buffer/...        as they enter
    loss, aux/...                         the results of the loss function
    loss_scale, skipped                   how the loss is scaled, and whether the step was skipped
    grad/...                              of one microbatch
    accumulated/... reduced/...           of the step, before and after replicas are averaged
    update/... updated/... optimizer/...  the results of the optimizer
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.array_trees import check_arrays, dtype_beside
from tailrace.jaxprs.marks import Tag, mark, name_values, path_name
from tailrace.program.in_program import cross_replica_mean, cross_replica_sum
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.memory.state_update import HeldUpdate
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.step import loss_scale as scaling
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import LossScale
from tailrace.program.step.precision import Precision, same_dtypes
from tailrace.program.step.step_sharding import StepSharding
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.update_rule import Extra, Optimizer, apply_rule
from tailrace.taps.catalogue import Entry, matches
from tailrace.taps.tap import AnyTap

if TYPE_CHECKING:
    from tailrace.program.memory.activation_offload import HeldActivations
    from tailrace.program.tracing.trace import Traced

ALONE = "params"
"""The name of parameters that are a single array: `grad/params`."""

Compute = Callable[[Any, Any, Any, Any], Any]
"""`compute(params, model_state, batch, inputs)` returns the values to send out for an element."""


class Yield(NamedTuple):
    """The results of one microbatch other than its gradient."""

    loss: Any
    aux: Any
    weight: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step(ABC):
    """The definition of a training step.

    A `PlainStep` or a `PipelineStep` computes microbatches and accumulates their gradients. What
    happens once per step, the reduction over replicas and the update, is here.

    Attributes:
        loss_fn: `loss_fn(params, *batch)`, or `loss_fn(params, model_state, *batch)`.
        optimizer: an optax transformation; or an object with `init(params)` and `apply(grads, state,
            params)`, which returns the new parameters and state (optimizers of other libraries). It may
            also have `each(grads, params)`, for the gradients of each microbatch (in a pipeline
            `each_alone(name, gradient, value)`, for one at a time), and `unscaled(grads, params)`, for
            the gradients that observers see if the loss is scaled.
        accumulation: the number of microbatches per step, and how their gradients are combined.
        has_model_state: whether `loss_fn` has the second form.
        scalars: the outfeed of the loss, the scalar aux values and the weight of each microbatch.
        share_state: whether the model state is averaged over replicas once per step; or a function that
            decides by the name of a leaf.
        taps: the taps; observed activations are marked before differentiation.
        keeping: how optimizer state is held between updates, if not replicated on the devices.
        hold_activations: differentiates the forward pass with its residuals held elsewhere; None for
            JAX's differentiation.
        loss_scale: the rule of loss scaling; the state then has a scale.
        precision: the dtype of the loss function's computation; None for those of its inputs.
        needs: the extra arguments that the optimizer needs, by optax' names; see `Extra`.
        sends_arrays: whether small arrays of aux leave with the scalars.
        sharding: where the values of a sharded model are; None for a model that is not.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    accumulation: Accumulation
    has_model_state: bool
    scalars: OutfeedQueue
    share_state: bool | Callable[[str], bool] = True
    taps: tuple[AnyTap, ...] = ()
    keeping: StateKeeping | None = None
    hold_activations: HeldActivations | None = None
    loss_scale: LossScale | None = None
    precision: Precision | None = None
    needs: Sequence[str] = ()
    sends_arrays: bool = False
    sharding: StepSharding | None = None

    @property
    def gives_loss(self) -> bool:
        """Whether the optimizer needs the loss of the step."""
        return "value" in self.needs

    def tapped(self, taps: tuple[AnyTap, ...]) -> Step:
        """The same step with other taps."""
        return dataclasses.replace(self, taps=taps)

    # -- what a step of a pipeline does otherwise -----------------------------------------------

    @abstractmethod
    def loop(self, state: TrainState, infeed: Feed, length: int = 1) -> TrainState:
        """`length` steps, fed by `infeed`: the body of a training program."""

    @abstractmethod
    def runner(
        self,
        form: TrainState,
        infeed: Feed,
        placement: Placement,
        each: Sequence[bool],
        kept_from: int,
    ) -> LoopRunner:
        """A runner of steps on elements of `infeed`.

        Args:
            form: the shapes of the state.
            infeed: the feed.
            placement: the devices, as far as they are known before tracing.
            each: for each leaf of the state, whether it differs per replica.
            kept_from: the index of the first leaf that `keeping` is about.
        """

    @abstractmethod
    def evaluating(
        self, compute: Compute, out: OutfeedQueue, infeed: Feed, read: Tree, placement: Placement
    ) -> LoopRunner:
        """A runner that sends out `compute(params, model_state, batch, inputs)` for each element."""

    @abstractmethod
    def begin_evaluating(self, runner: LoopRunner, read: Tree) -> LoopState:
        """The state for dispatches of such a runner."""

    # -- what a step of the user's own does otherwise -------------------------------------------

    def settled(self, form: Any, infeed: Feed, replicas: int) -> Any:
        """The form of the state in a program on elements of `infeed`: the one that it has."""
        return form

    def listed(self, traced: Traced, found: Sequence[Entry]) -> Sequence[Entry]:
        """The activations of a traced step: those that were found and marked before the gradient."""
        return found

    @abstractmethod
    def _called(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> Any:
        """The result of the loss function."""

    # -- the parts of a step --------------------------------------------------------------------

    def forward(
        self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree = ()
    ) -> tuple[Any, Any, Any]:
        """Call the loss function; returns (loss, next model state, aux), checked."""
        if self.precision is not None:
            # Inside the differentiated function, so that the gradient of the cast widens gradients
            # again.
            params, batch, inputs = self.precision.narrow((params, batch, inputs))
        out = self._called(params, model_state, batch, inputs)
        name = getattr(self.loss_fn, "__name__", "the loss function")
        check_arrays(f"{name} returns", out)
        if self.has_model_state:
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple)):
                raise ProgramError(
                    f"With model_state, {name} returns (loss, (new_state, aux)). "
                    f"Received: {_shown(out)}."
                )
            loss, (after, aux) = out
            _check_structure(model_state, after, name)
        else:
            loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
            after = None
        if self.precision is not None:
            loss, aux = self.precision.widen((loss, aux))
            # The loop carries the state: it must leave with the dtype it came with.
            after = same_dtypes(after, model_state)
        rule = "The new model state has the shapes and dtypes of the old one."
        has_state = self.has_model_state
        after = fitting_forms(model_state, after, rule, "model_state", name) if has_state else None
        if loss is None:
            raise ProgramError(
                f"{name} returns one loss, a float scalar, or (loss, aux). Received: None. "
                f"Is its return statement missing?"
            )
        if not jax.tree_util.all_leaves([loss]):
            raise ProgramError(
                f"{name} returns one loss, a float scalar, or (loss, aux). Received: {_shown(loss)}."
            )
        loss = jnp.asarray(loss)
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ProgramError(
                f"{name} returns one loss, a float scalar, or (loss, aux). "
                f"Received a loss of {loss.dtype}{list(loss.shape)}. "
                f"{'Take its mean.' if loss.shape else 'Cast it to a float.'}"
            )
        return loss, after, aux

    def finish(
        self,
        state: TrainState,
        grads: Tree,
        model_state: Tree,
        weight: jax.Array | None = None,
        loss: jax.Array | None = None,
        value_fn: Callable[[Tree], jax.Array] | None = None,
    ) -> TrainState:
        """Reduce over replicas, then update: once per step."""
        grads = self.named_grads("accumulated", grads, state)
        loss = loss if self.gives_loss else None
        if weight is None:
            grads, loss = cross_replica_mean((grads, loss))
        else:
            # Each replica's mean counts by its share of the weight, so that the result is the mean over
            # all examples, however they fell to replicas.
            share = share_of(weight, cross_replica_sum(weight))
            grads, loss = jax.tree.map(
                lambda g: cross_replica_sum(g * share.astype(g.dtype)), (grads, loss)
            )
        taken, scale = None, state.loss_scale
        if self.loss_scale is not None and scale is not None:
            # After the reduction: a replica with a bad gradient makes it bad on all, so that all skip
            # together without another collective.
            taken = scaling.all_finite(grads)
            mark((~taken).astype(jnp.float32), Tag("value", "skipped"))
            grads = scaling.unscaled(grads, scale)
            scale = self.loss_scale.next(scale, taken)
        grads = name_values("reduced", grads, ALONE)
        extra = Extra(loss, tuple(self.needs), value_fn) if self.needs else None
        if self.keeping is not None:
            held = HeldUpdate(self.keeping, self.optimizer, self.taps, grads, state, taken, extra)
            params, after = held.run()
        else:
            params, after = self._updated(grads, state, taken, extra)
            after = name_values("optimizer", after)
        # Once per step, not per microbatch: a collective in each would wait for the slowest replica
        # every time. Integers, such as counters, have no mean.
        model_state = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                cross_replica_mean(x)
                if jnp.issubdtype(x.dtype, jnp.inexact) and self.shares(path_name(path))
                else x
            ),
            model_state,
        )
        if taken is not None:
            model_state = scaling.select(taken, model_state, state.model_state)
        left = TrainState(params, after, model_state, scale)
        return left if self.sharding is None else self.sharding.keep(left)

    def shares(self, name: str) -> bool:
        """Whether the model-state leaf `name` is averaged over replicas."""
        return self.share_state(name) if callable(self.share_state) else self.share_state

    def _updated(
        self, grads: Tree, state: TrainState, taken: jax.Array | None, extra: Extra | None
    ) -> tuple[Any, Any]:
        """The parameters after the optimizer's update, and its new state."""
        updates, params, after = apply_rule(
            self.optimizer, grads, state.optimizer_state, state.params, taken, extra
        )
        name_values("update", updates, ALONE)
        return name_values("updated", params, ALONE), after

    def is_tapped(self, entry: Entry) -> bool:
        """Whether a tap selects the tensor."""
        return any(matches(tap.select, entry) for tap in self.taps)

    def named(self, state: TrainState) -> TrainState:
        """The state with marks on parameters and on the loss scale."""
        scale = state.loss_scale
        if scale is not None:
            scale = scale._replace(scale=mark(scale.scale, Tag("value", scaling.NAME)))
        params = name_values("param", state.params, ALONE)
        return state._replace(params=params, loss_scale=scale)

    def named_grads(self, kind: str, grads: Tree, state: TrainState) -> Tree:
        """Gradients with names; observers see them unscaled."""
        if state.loss_scale is None:
            return name_values(kind, grads, ALONE)
        name_values(kind, scaling.unscaled(grads, state.loss_scale), ALONE)
        return grads

    def weight(self, batch: Tree) -> jax.Array | None:
        """The weight of a microbatch, a float32 scalar; None if all count alike."""
        if self.accumulation.weight is None:
            return None
        weight = jnp.asarray(call_with_element(self.accumulation.weight, (), batch), jnp.float32)
        if weight.shape != ():
            raise ProgramError(
                f"The weight of a microbatch is one number. Received: shape {weight.shape}. "
                f"Sum it over the examples."
            )
        return weight

    def send(self, out: Yield, state: TrainState) -> None:
        """Send the scalars of a microbatch to the outfeed, for the history."""
        own = {}
        if self.loss_scale is not None and state.loss_scale is not None:
            own = {} if self.loss_scale.is_fixed else {scaling.NAME: state.loss_scale.scale}
        # A fixed scale is known from the options.
        scalars = {**_scalars(out.aux, {"loss", *own}), **own}
        sent = {"loss": out.loss, "aux": scalars, "weight": out.weight}
        if self.sends_arrays and (arrays := small_arrays(out.aux)):
            sent["arrays"] = arrays
        self.scalars.enqueue(sent)


def share_of(weight: jax.Array, total: TensorLike) -> jax.Array:
    """The fraction of a weight in a total; 0 if the total is 0."""
    return weight / jnp.where(total > 0, total, 1)


def _scalars(aux: Tree, own: set[str]) -> dict[str, Any]:
    """The scalar values of `aux` by name, for the history, which also has our `own`."""
    found = jax.tree_util.tree_flatten_with_path(aux)[0]
    names = [path_name(path) or "aux" for path, _ in found]
    return {
        f"aux/{name}" if name in own else name: value
        for name, (_, value) in zip(names, found, strict=True)
        if jnp.ndim(value) == 0
    }


MOST_VALUES = 1024
"""The most values of an array of aux that a history has of each microbatch."""


def small_arrays(aux: Tree) -> dict[str, Any]:
    """The arrays of `aux` by name that are small enough for a history."""
    found = jax.tree_util.tree_flatten_with_path(aux)[0]
    named = {path_name(path) or "aux": value for path, value in found if jnp.ndim(value)}
    # As scalars are: the history has these of its own.
    own = {name: f"aux/{name}" for name in ("loss", scaling.NAME)}
    arrays = {own.get(name, name): value for name, value in named.items()}
    numeric = {
        name: value
        for name, value in arrays.items()
        if not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    }
    kept = {name: value for name, value in numeric.items() if 0 < value.size <= MOST_VALUES}
    if left := [name for name in arrays if name not in kept]:
        note_once(
            f"A history has arrays of aux of up to {MOST_VALUES:,} numbers for each microbatch. Left "
            f"out: {', '.join(map(repr, left))}. Reduce them where they are computed, or observe them: "
            f"observe=[tr.Tap('aux/{left[0]}', reduce='tensor')]."
        )
    return kept


def _check_structure(before: Tree, after: Tree, name: str) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ProgramError(
            f"The new model state has the structure of the old one, {jax.tree.structure(before)}. "
            f"Received from {name}: {jax.tree.structure(after)}."
        )


def fitting_forms(before: Tree, after: Tree, rule: str, alone: str, name: str) -> Tree:
    """What a step leaves, of the shapes and dtypes of what it got; numbers become arrays.

    Args:
        before: what it got.
        after: what it leaves, of the same structure.
        rule: the sentence that an error begins with.
        alone: the name of a tree that is a single leaf.
        name: the function that made it.
    """

    def leaf(path: tuple[Any, ...], old: jax.Array, new: TensorLike) -> jax.Array:
        if hasattr(new, "dtype") and not isinstance(new, jax.Array):
            new = jnp.asarray(new)  # float64 of NumPy is float32 here
        dtype = dtype_beside(old, new)
        if jnp.shape(new) != old.shape or dtype != old.dtype:
            raise ProgramError(
                f"{rule} {path_name(path) or alone} was {old.dtype}{list(old.shape)} and came back as "
                f"{dtype}{list(jnp.shape(new))} from {name}. Cast or reshape it there, or start with "
                f"the other form."
            )
        return new if isinstance(new, jax.Array) else jnp.asarray(new, dtype)

    return jax.tree_util.tree_map_with_path(leaf, before, after)


def _shown(value: object) -> str:
    return str(jax.tree.structure(value))
