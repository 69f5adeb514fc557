"""The loss of a step's batch as a function of parameters, for optimizers that evaluate it again.

A line search, SAM and estimates of the Hessian compare the loss at several points, so all else must
be equal: the batch, the model state and the keys, which are numbered by the calls of `tr.key()`.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

from tailrace.base.spans.scopes import LOSS_AGAIN
from tailrace.base.trees import Tree
from tailrace.jaxprs.marks import current_trace
from tailrace.program.in_program import tracing_training
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.training_step import Step


def loss_again(step: Step, state: TrainState, batch: Tree) -> Callable[[Tree], jax.Array]:
    """The loss of a batch, as a function of parameters. Call it before that of the step is traced."""
    trace = current_trace("The update of an optimizer")
    first_call = copy.copy(trace.calls)

    def value(params: Tree) -> Any:
        usual, trace.calls = trace.calls, copy.copy(first_call)
        try:
            with tracing_training(), jax.named_scope(LOSS_AGAIN):
                loss = step.forward(params, state.model_state, batch)[0]
        finally:
            trace.calls = usual
        return loss

    return value
