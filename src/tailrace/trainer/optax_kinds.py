"""Which of optax' optimizers a step can run, and what it gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs.array_trees import returning_arrays
from tailrace.program.optimizers import AccumulationState
from tailrace.program.step.update_rule import FUNCTIONS, Optimizer, example_extra

_NEEDS: tuple[tuple[str, ...], ...] = (
    (),
    ("value",),
    ("value", "grad", "value_fn"),
    ("grad_fn",),
    ("obj_fn",),
)
"""Extra arguments that optimizers of optax need, the fewest first."""


def check_kind(optimizer: Optimizer, params: Tree) -> None:
    """Refuse optimizers that a step cannot run as they are: by the types in their state."""
    import optax

    init = returning_arrays("optimizer.init returns", optimizer.init)
    state = jax.eval_shape(init, params)
    kinds = (
        AccumulationState,
        optax.MultiStepsState,
        optax.LookaheadState,
        optax.contrib.DifferentiallyPrivateAggregateState,
    )

    def is_one(part: object) -> bool:
        return isinstance(part, kinds)

    # Anywhere inside a chain.
    found = {type(part) for part in jax.tree.leaves(state, is_leaf=is_one) if is_one(part)}
    if AccumulationState in found:
        raise OptionError(
            "Gradients are accumulated once, by the trainer: its optimizer accumulates them too. "
            "Give the bare optimizer and Trainer(accumulation=...). "
            "tr.optimizers.gradient_accumulation is for hand-written loops."
        )
    if optax.contrib.DifferentiallyPrivateAggregateState in found:
        raise OptionError(
            "optax.contrib.differentially_private_aggregate clips the gradient of each example, and "
            "tr.Trainer computes that of a batch. Write the step with jax.vmap(jax.grad(loss_fn), ...) "
            "and train it with tr.Trainer.from_step."
        )
    # With an `AttributeError`, its own update would say so, in every step.
    if (optax.LookaheadState in found) != isinstance(params, optax.LookaheadParams):
        raise OptionError(
            "optax.lookahead and its parameters go together: tr.Trainer(loss_fn, "
            "optax.lookahead(...), optax.LookaheadParams.init_synced(params)). Received: "
            + ("other parameters." if optax.LookaheadState in found else "another optimizer.")
        )
    if optax.MultiStepsState in found and _accumulates(optimizer):
        note_once(
            "optax.MultiSteps updates parameters and optimizer state in each of its steps, by zero in "
            "most of them. Trainer(accumulation=...) does it once, and is cheaper."
        )


def _accumulates(optimizer: object) -> bool:
    """Whether it is known to update in each step: optax keeps the number in a function."""
    schedule = getattr(optimizer, "_every_k_schedule", None)
    return not (callable(schedule) and schedule(0) == 1)


def needs_of(
    optimizer: Optimizer, params: Tree, microbatches: int, replicas: int, *, pipelined: bool
) -> Sequence[str]:
    """The extra arguments that the optimizer needs; refuse one that needs others."""
    import optax

    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return ()
    state = jax.eval_shape(optimizer.init, params)
    first: Exception | None = None
    # Asked by a call: a chain takes any arguments, and only its parts know what they need.
    for names in _NEEDS:
        problem = _problem(optimizer, params, state, names)
        if problem is None:
            _check_given(names, microbatches, replicas, pipelined)
            return names
        first = first or problem
    if not isinstance(first, TypeError):
        return ()  # of no argument: the step, in which it may be fine, says so
    raise OptionError(
        f"An optimizer gets gradients, its state and parameters and, if it needs them, optax' value=, "
        f"grad=, value_fn=, grad_fn= or obj_fn=. Received: an optimizer whose update says "
        f"{str(first)!r}. Write the step, and train it with tr.Trainer.from_step."
    ) from first


def promoting(optimizer: Any, params: Tree, needs: Sequence[str]) -> Callable[[Tree], Tree]:
    """The optimizer's `init`, with Python's numbers in the dtypes that an update gives them.

    A state that starts with 0 and counts in halves is a float, as in a `lax.scan` that carries it.
    """
    init: Callable[[Tree], Tree] = optimizer.init
    before, structure = jax.tree.flatten(jax.eval_shape(init, params))
    if not callable(getattr(optimizer, "update", None)) or not any(x.weak_type for x in before):
        return init

    def update(state: Tree) -> Tree:
        return optimizer.update(params, state, params, **example_extra(needs, params))[1]

    try:
        after, form = jax.tree.flatten(jax.eval_shape(update, jax.eval_shape(init, params)))
    except Exception:  # the step, in which it may be fine, says so
        return init
    wanted = [
        new.dtype if old.weak_type and not new.weak_type else None
        for old, new in zip(before, after, strict=False)
    ]
    if form != structure or not any(wanted):
        return init

    def promoted(params: Tree) -> Tree:
        leaves = [
            leaf if dtype is None else jnp.asarray(leaf, dtype)
            for leaf, dtype in zip(jax.tree.leaves(init(params)), wanted, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    return promoted


def _problem(optimizer: Any, params: Tree, state: Tree, names: Sequence[str]) -> Exception | None:
    """What the update raises with these extra arguments."""

    def update(grads: Tree, state: Tree, params: Tree) -> Any:
        return optimizer.update(grads, state, params, **example_extra(names, params))

    try:
        jax.eval_shape(update, params, state, params)
    except Exception as error:
        return error
    return None


def _check_given(names: Sequence[str], microbatches: int, replicas: int, pipelined: bool) -> None:
    if pipelined and names:
        raise OptionError(
            f"In a pipeline the optimizer gets nothing but gradients, its state and parameters. "
            f"Received: one that needs {', '.join(names)} (as optax.contrib.reduce_on_plateau and line "
            f"searches do). Use a schedule of the step."
        )
    functions = [name for name in names if name in FUNCTIONS]
    if functions and (microbatches > 1 or replicas > 1):
        raise OptionError(
            f"This optimizer evaluates the loss of the step again, by {functions[0]}=, as a line "
            f"search does: of one microbatch on one replica. Received: accumulation={microbatches}, "
            f"replicas={replicas}. Use 1 for both, with larger batches."
        )
