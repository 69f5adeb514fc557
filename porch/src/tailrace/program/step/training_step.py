"""One training step: forward, backward, accumulation, reduction over replicas, update.

The step is written once, here, and traced into the program of a loop. Each value that people want to
see is marked with its name on the way, which costs nothing unless somebody observes it:

    input/... param/... buffer/...        as they enter
    loss, aux/...                         what the loss function yields
    loss_scale, skipped                   how the loss is scaled, and whether the step was skipped
    grad/...                              of one microbatch
    accumulated/... reduced/...           of the step, before and after replicas are averaged
    update/... updated/... optimizer/...  what the optimizer makes of it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import Tag, mark, name_values, path_name
from tailrace.program.in_program import (
    cross_replica_mean,
    cross_replica_sum,
    microbatch,
    tracing_training,
)
from tailrace.program.loops import repeat, repeat_with, whole
from tailrace.program.running.executable import Placement
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.step import loss_scale as scaling
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import LossScale, ScaleState
from tailrace.program.step.precision import Precision, same_dtypes
from tailrace.spans.scopes import OPTIMIZER
from tailrace.taps.activation_listing import new_listing
from tailrace.taps.catalogue import Entry, matches
from tailrace.taps.probe import probed
from tailrace.taps.tap import Tap

if TYPE_CHECKING:
    from tailrace.program.memory.activation_offload import HeldActivations
    from tailrace.program.memory.optimizer_state import StateKeeping

_ALONE = "params"
"""What parameters are called that are one single array: `grad/params`."""


class TrainState(NamedTuple):
    """What training carries from step to step."""

    params: Any
    optimizer_state: Any
    model_state: Any = None
    loss_scale: ScaleState | None = None


class Yield(NamedTuple):
    """What one microbatch yields besides its gradient."""

    loss: Any
    aux: Any
    weight: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """How a step is computed.

    Attributes:
        loss_fn: `loss_fn(params, *batch)`, or `loss_fn(params, model_state, *batch)`.
        optimizer: an optax transformation; or an object with `init(params)` and `apply(grads, state,
            params)`, which returns the new parameters and state (optimizers of other libraries). It
            may also have `each(grads, params)`, for the gradients of each microbatch (in a pipeline
            `each_alone(name, gradient, value)`, for one at a time), and `unscaled(grads, params)`,
            for what observers see where the loss is scaled.
        accumulation: how many microbatches make a step, and how.
        has_model_state: which of the two forms `loss_fn` has.
        scalars: where the loss, the scalar aux values and the weight of each microbatch go.
        share_state: whether the model state is averaged over replicas once a step; a function of the
            name of a leaf decides leaf by leaf.
        taps: what is observed; activations among it are marked before differentiation.
        keeping: where the optimizer's state lies between updates, if not whole on each device.
        hold_activations: differentiates the forward pass so that what the backward pass needs of it
            is held elsewhere; None leaves that to JAX.
        loss_scale: how the loss is scaled; the state then has a scale.
        precision: in which dtype the loss function computes; None: in those it is given.
    """

    loss_fn: Callable[..., Any]
    optimizer: Any
    accumulation: Accumulation
    has_model_state: bool
    scalars: OutfeedQueue
    share_state: bool | Callable[[str], bool] = True
    taps: tuple[Tap, ...] = ()
    keeping: StateKeeping | None = None
    hold_activations: HeldActivations | None = None
    loss_scale: LossScale | None = None
    precision: Precision | None = None

    def tapped(self, taps: tuple[Tap, ...]) -> Step:
        """The same step, observed otherwise."""
        return dataclasses.replace(self, taps=taps)

    def loop(self, state: TrainState, infeed: Feed, length: int = 1) -> TrainState:
        """`length` steps, fed by `infeed`: the body of a training program."""
        if self.accumulation.microbatches == 1:
            return repeat_with(whole, length, self.plain, state, infeed)
        return repeat(length, lambda s: self.accumulated(s, infeed), state)

    def runner(
        self, form: Any, infeed: Feed, placement: Placement, each: Any, kept_from: int
    ) -> LoopRunner:
        """What runs the steps on elements of `infeed`; `form` is that of the state."""

        def train(state: TrainState, _: Any) -> TrainState:
            return self.loop(state, infeed)

        return LoopRunner(train, form, (), placement, each, self.keeping, kept_from)

    def evaluating(
        self, compute: Any, out: OutfeedQueue, infeed: Feed, read: Any, placement: Placement
    ) -> LoopRunner:
        """What sends out `compute(params, model_state, batch, inputs)` of each element."""

        def program(_: Any, read: Any) -> Any:
            def one(carry: Any, batch: Any) -> Any:
                out.enqueue(compute(*read, batch, ()))
                return carry

            return repeat_with(whole, 1, one, (), infeed)

        return LoopRunner(program, (), read, placement)

    def begin_evaluating(self, runner: LoopRunner, read: Any) -> LoopState:
        """The values that such a runner's dispatches work on."""
        return runner.begin((), read)

    # -- the two kinds of step ------------------------------------------------------------------

    def plain(self, state: TrainState, batch: Any) -> TrainState:
        """A step of one microbatch."""
        named = self._named(state)
        grads, model_state, out = self.microbatch(named, batch)
        self._send(out, named)
        if self.accumulation.dtype is not None:
            zeros = self.accumulation.zeros(named.params)
            grads = jax.tree.map(lambda grad, zero: grad.astype(zero.dtype), grads, zeros)
        return self.finish(named, grads, model_state, out.weight)

    def accumulated(self, state: TrainState, infeed: Feed) -> TrainState:
        """A step of several microbatches; the optimizer stands outside their loop."""
        named = self._named(state)
        accumulation = self.accumulation
        weighted = accumulation.weight is not None

        def one(carry: Any, batch: Any) -> Any:
            accumulated, model_state, total = carry
            grads, model_state, out = self.microbatch(
                named._replace(model_state=model_state), batch
            )
            self._send(out, named)
            after = total + out.weight if weighted else None
            share = share_of(out.weight, after) if weighted else None
            accumulated = accumulation.add(accumulated, grads, microbatch(), share)
            return accumulated, model_state, after

        total = jnp.float32(0) if weighted else None
        start = (accumulation.zeros(named.params), named.model_state, total)
        grads, model_state, total = repeat_with(
            whole, accumulation.microbatches, one, start, infeed
        )
        return self.finish(named, grads, model_state, total)

    # -- their parts ----------------------------------------------------------------------------

    def microbatch(self, state: TrainState, batch: Any) -> tuple[Any, Any, Yield]:
        """Gradient, next model state and yield of one microbatch."""
        batch = name_values("input", batch)
        before = name_values("buffer", state.model_state)

        def forward(params: Any) -> tuple[Any, Any]:
            with tracing_training():
                loss, after, aux = self.forward(params, before, batch)
            return loss, (loss, after, aux)

        if self.taps:
            forward = probed(forward, self._is_tapped, new_listing())
        if state.loss_scale is not None:
            forward = scaling.scaled(forward, state.loss_scale)
        if self.hold_activations is not None:
            value_and_grad = self.hold_activations.value_and_grad(forward)
        else:
            value_and_grad = jax.value_and_grad(forward, has_aux=True)
        (_, (loss, after, aux)), grads = value_and_grad(state.params)
        if callable(unscaled := getattr(self.optimizer, "unscaled", None)):
            name_values("grad", unscaled(grads, state.params), _ALONE)
        else:
            grads = self._named_grads("grad", grads, state)
        if callable(each := getattr(self.optimizer, "each", None)):
            grads = each(grads, state.params)
        loss = mark(loss, Tag("value", "loss"))
        aux = name_values("aux", aux)
        return grads, after, Yield(loss, aux, self._weight(batch))

    def forward(
        self, params: Any, model_state: Any, batch: Any, inputs: Any = ()
    ) -> tuple[Any, Any, Any]:
        """Call the loss function; returns (loss, next model state, aux), checked."""
        if self.precision is not None:
            params, batch, inputs = self.precision.narrow((params, batch, inputs))
        out = self._called(params, model_state, batch, inputs)
        name = getattr(self.loss_fn, "__name__", "the loss function")
        if self.has_model_state:
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple)):
                raise ProgramError(
                    f"With model_state, {name} returns (loss, (new_state, aux)). "
                    f"Received: {_shown(out)}."
                )
            loss, (after, aux) = out
            _same_state(model_state, after, name)
        else:
            loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
            after = None
        if self.precision is not None:
            loss, aux = self.precision.widen((loss, aux))
            after = same_dtypes(after, model_state)
        loss = jnp.asarray(loss)
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ProgramError(
                f"{name} returns one loss, a float scalar, or (loss, aux). "
                f"Received a loss of {loss.dtype}{list(loss.shape)}. Take its mean."
            )
        return loss, after, aux

    def _called(self, params: Any, model_state: Any, batch: Any, inputs: Any) -> Any:
        first = (params, model_state) if self.has_model_state else (params,)
        return call_with_element(self.loss_fn, (*first, *inputs), batch)

    def finish(
        self, state: TrainState, grads: Any, model_state: Any, weight: Any = None
    ) -> TrainState:
        """Reduce over replicas, then update: once a step."""
        grads = self._named_grads("accumulated", grads, state)
        if weight is None:
            grads = cross_replica_mean(grads)
        else:
            share = share_of(weight, cross_replica_sum(weight))
            grads = jax.tree.map(lambda g: cross_replica_sum(g * share.astype(g.dtype)), grads)
        taken, scale = None, state.loss_scale
        if self.loss_scale is not None and scale is not None:
            taken = scaling.all_finite(grads)
            mark((~taken).astype(jnp.float32), Tag("value", "skipped"))
            grads = scaling.unscaled(grads, scale)
            scale = self.loss_scale.next(scale, taken)
        grads = name_values("reduced", grads, _ALONE)
        if self.keeping is not None:
            params, after = self.keeping.update(self, grads, state, taken)
        else:
            params, after = self._updated(grads, state, taken)
            after = name_values("optimizer", after)
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
        return TrainState(params, after, model_state, scale)

    def shares(self, name: str) -> bool:
        """Whether replicas share the leaf of the model state that is called `name`."""
        return self.share_state(name) if callable(self.share_state) else self.share_state

    def _updated(self, grads: Any, state: TrainState, taken: Any) -> tuple[Any, Any]:
        """The parameters after the optimizer, and its state."""
        updates, params, after = apply_rule(
            self.optimizer, grads, state.optimizer_state, state.params, taken
        )
        name_values("update", updates, _ALONE)
        return name_values("updated", params, _ALONE), after

    def _is_tapped(self, entry: Entry) -> bool:
        return any(matches(tap.select, entry) for tap in self.taps)

    def _named(self, state: TrainState) -> TrainState:
        scale = state.loss_scale
        if scale is not None:
            scale = scale._replace(scale=mark(scale.scale, Tag("value", scaling.NAME)))
        params = name_values("param", state.params, _ALONE)
        return state._replace(params=params, loss_scale=scale)

    def _named_grads(self, kind: str, grads: Any, state: TrainState) -> Any:
        """Gradients, which observers see without the scale."""
        if state.loss_scale is None:
            return name_values(kind, grads, _ALONE)
        name_values(kind, scaling.unscaled(grads, state.loss_scale), _ALONE)
        return grads

    def _weight(self, batch: Any) -> Any:
        if self.accumulation.weight is None:
            return None
        weight = jnp.asarray(call_with_element(self.accumulation.weight, (), batch), jnp.float32)
        if weight.shape != ():
            raise ProgramError(
                f"The weight of a microbatch is one number. Received: shape {weight.shape}. "
                f"Sum it over the examples."
            )
        return weight

    def _send(self, out: Yield, state: TrainState) -> None:
        own = {}
        if self.loss_scale is not None and state.loss_scale is not None:
            own = {} if self.loss_scale.is_fixed else {scaling.NAME: state.loss_scale.scale}
        scalars = {**_scalars(out.aux, {"loss", *own}), **own}
        self.scalars.enqueue({"loss": out.loss, "aux": scalars, "weight": out.weight})


def apply_rule(
    optimizer: Any, grads: Any, state: Any, params: Any, taken: Any = None
) -> tuple[Any, Any, Any]:
    """What the optimizer adds to the parameters, the parameters after it, and its state.

    Where `taken` is false, nothing is added and all stays as it was.
    """
    if taken is None:
        return _applied(optimizer, grads, state, params)

    def rule(grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        return _applied(optimizer, grads, state, params)

    nothing = jax.tree.map(jnp.zeros_like, params)
    return scaling.unless_skipped(rule, (grads, state, params), taken, (nothing, params, state))


def _applied(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
    if callable(apply := getattr(optimizer, "apply", None)):
        with jax.named_scope(OPTIMIZER):
            applied: Any = apply(grads, state, params)
            after, new_state = applied
            updates = jax.tree.map(jnp.subtract, after, params)
    else:
        import optax  # late: it takes a fifth as long to import as JAX itself

        with jax.named_scope(OPTIMIZER):
            updates, new_state = optimizer.update(grads, state, params)
            after = optax.apply_updates(params, updates)
    return updates, after, jax.tree.map(_keep_dtype, state, new_state)


def share_of(weight: Any, total: Any) -> Any:
    """The share of a weight in a total; 0 where nothing has any weight."""
    return weight / jnp.where(total > 0, total, 1)


def _scalars(aux: Any, own: set[str]) -> dict[str, Any]:
    """The scalar values of `aux` by name; these make up the history, beside our `own`."""
    found = jax.tree_util.tree_flatten_with_path(aux)[0]
    names = [path_name(path) or "aux" for path, _ in found]
    return {
        f"aux/{name}" if name in own else name: value
        for name, (_, value) in zip(names, found, strict=True)
        if jnp.ndim(value) == 0
    }


def _keep_dtype(before: Any, after: Any) -> Any:
    """Optimizer state keeps its dtype, whatever the dtype of the gradient was."""
    return jnp.asarray(after, jnp.asarray(before).dtype)


def _same_state(before: Any, after: Any, name: str) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ProgramError(
            f"The new model state has the structure of the old one, {jax.tree.structure(before)}. "
            f"Received from {name}: {jax.tree.structure(after)}."
        )


def _shown(value: Any) -> str:
    return str(jax.tree.structure(value))
