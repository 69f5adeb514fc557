"""The training step of a model that each replica computes on one device."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.feeds.elements import call_with_element
from tailrace.feeds.feed import Feed
from tailrace.jaxprs.marks import Tag, mark, name_values
from tailrace.program.in_program import microbatch, tracing_training
from tailrace.program.loops import repeat, repeat_with, whole
from tailrace.program.step import loss_scale as scaling
from tailrace.program.step.loss_again import loss_again
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.training_step import ALONE, Yield, share_of
from tailrace.program.step.update_rule import FUNCTIONS
from tailrace.program.step.whole_step import WholeStep
from tailrace.taps.activation_listing import new_listing
from tailrace.taps.probe import probed


@dataclasses.dataclass(frozen=True, eq=False)
class PlainStep(WholeStep):
    """A step whose model is differentiated as a whole."""

    def loop(self, state: TrainState, infeed: Feed, length: int = 1) -> TrainState:
        """`length` steps, fed by `infeed`: the body of a training program."""
        if self.accumulation.microbatches == 1:
            return repeat_with(whole, length, self.plain, state, infeed)
        return repeat(length, lambda s: self.accumulated(s, infeed), state)

    # -- the two kinds of step ------------------------------------------------------------------

    def plain(self, state: TrainState, batch: Tree) -> TrainState:
        """A step of one microbatch."""
        named = self.named(state)
        # Before the loss is traced: it draws the same keys.
        again = loss_again(self, named, batch) if set(self.needs) & set(FUNCTIONS) else None
        grads, model_state, out = self.microbatch(named, batch)
        self.send(out, named)
        # As if one microbatch were added to zeros of that dtype: steps of one and of several
        # microbatches must round alike.
        if self.accumulation.dtype is not None:
            zeros = self.accumulation.zeros(named.params)
            grads = jax.tree.map(lambda grad, zero: grad.astype(zero.dtype), grads, zeros)
        return self.finish(named, grads, model_state, out.weight, out.loss, again)

    def accumulated(self, state: TrainState, infeed: Feed) -> TrainState:
        """A step of several microbatches; the optimizer runs outside their loop."""
        named = self.named(state)
        accumulation = self.accumulation
        weighted = accumulation.weight is not None

        def one(carry: Tree, batch: Tree) -> Any:
            accumulated, model_state, total, mean = carry
            grads, model_state, out = self.microbatch(
                named._replace(model_state=model_state), batch
            )
            self.send(out, named)
            # A running mean, weighted by the share in the weight so far: the sum of all weights is
            # known only at the end, and dividing a large sum then would lose precision.
            after = total + out.weight if weighted else None
            share = share_of(out.weight, after) if weighted else None
            accumulated = accumulation.add(accumulated, grads, microbatch(), share)
            if self.sharding is not None:
                accumulated = self.sharding.keep_gradients(accumulated)
            if mean is not None:
                part = 1 / (microbatch() + 1).astype(jnp.float32) if share is None else share
                mean += (out.loss.astype(jnp.float32) - mean) * part
            return accumulated, model_state, after, mean

        total = jnp.float32(0) if weighted else None
        mean = jnp.float32(0) if self.gives_loss else None
        start = (accumulation.zeros(named.params), named.model_state, total, mean)
        grads, model_state, total, mean = repeat_with(
            whole, accumulation.microbatches, one, start, infeed
        )
        return self.finish(named, grads, model_state, total, mean)

    def microbatch(self, state: TrainState, batch: Tree) -> tuple[Any, Any, Yield]:
        """The gradient, next model state and other results of one microbatch."""
        batch = name_values("input", batch)
        before = name_values("buffer", state.model_state)

        def forward(params: Tree) -> tuple[Any, Any]:
            # Around the loss function alone: `evaluate` calls it without this context, which
            # dropout checks.
            with tracing_training():
                loss, after, aux = self.forward(params, before, batch)
            return loss, (loss, after, aux)

        # Before the loss is scaled: taps of the forward pass then read unscaled values.
        if self.taps:
            forward = probed(forward, self.is_tapped, new_listing())
        if state.loss_scale is not None:
            forward = scaling.scaled(forward, state.loss_scale)
        if self.hold_activations is not None:
            value_and_grad = self.hold_activations.value_and_grad(forward)
        else:
            value_and_grad = jax.value_and_grad(forward, has_aux=True)
        (_, (loss, after, aux)), grads = value_and_grad(state.params)
        if self.sharding is not None:
            grads = self.sharding.scatter(grads)
        # Only named, not replaced: the optimizer has its own rule of scaling and expects scaled
        # gradients.
        if callable(unscaled := getattr(self.optimizer, "unscaled", None)):
            name_values("grad", unscaled(grads, state.params), ALONE)
        else:
            grads = self.named_grads("grad", grads, state)
        if callable(each := getattr(self.optimizer, "each", None)):
            grads = each(grads, state.params)
        loss = mark(loss, Tag("value", "loss"))
        aux = name_values("aux", aux)
        return grads, after, Yield(loss, aux, self.weight(batch))

    def _called(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> Any:
        if self.sharding is not None:
            params = self.sharding.gather(params)
        first = (params, model_state) if self.has_model_state else (params,)
        return call_with_element(self.loss_fn, (*first, *inputs), batch)
