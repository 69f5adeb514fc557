"""A trainer of a step that the user wrote: its engine, and the options that it cannot have.

Nothing is known of such a step but a function of a state and a batch, so what needs a loss, gradients
or an optimizer of its own is refused by name, with what to write in the step instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.program.compiling.build import Build
from tailrace.program.step.own_step import InTheStep, OwnStep
from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Observe, parse_taps, stop_on_nonfinite
from tailrace.trainer.engine import Engine
from tailrace.trainer.modules.own_state import BoundStep, OwnBinding, TreeBinding
from tailrace.trainer.observation.logged_values import NORM, taps_of

_OPTIMIZER = "Make its state with optimizer.init, keep it in the state, and update in the step."
_MESH = (
    "The state of a step of your own is whole on each replica: use replicas= and tr.cross_replica_mean "
    "to train on several devices, or a loss and an optimizer: tr.Trainer(..., mesh=, shard=)."
)
_MEMORY = "Only the step knows which of its state is an optimizer's."

REFUSED = {
    "loss_fn": "The step computes its losses itself: call jax.value_and_grad in it.",
    "optimizer": _OPTIMIZER,
    "params": "Put the parameters into the state, under a name of your own.",
    "model_state": "Put it into the state: the step returns all of it.",
    "accumulation": (
        "The step decides what it does with its batch: give it [microbatches, rows, ...] and sum the "
        "gradients in a jax.lax.scan, or use optax.MultiSteps as its optimizer."
    ),
    "loss_scale": (
        "The step has its own losses: multiply one before jax.grad, divide the gradients after it, and "
        "keep the scale in the state."
    ),
    "precision": (
        "The step decides what it computes in: cast parameters and batch in it, as in "
        "jax.tree.map(lambda x: x.astype('bfloat16'), params)."
    ),
    "offload_optimizer_state": f"{_MEMORY} Move it there with jax.device_put and a memory kind.",
    "shard_optimizer_state": f"{_MEMORY} Reduce memory with an optimizer that keeps less.",
    "offload_activations": (
        "The step differentiates its losses itself: put jax.checkpoint around layers in it."
    ),
    "ema": (
        "Keep the average in the state: optax.incremental_update(params, average, 0.001) in the step; "
        "eval_fn(state, *batch) then uses it."
    ),
    "mesh": _MESH,
    "shard": _MESH,
    "batch_axes": _MESH,
    "device": "tr.configure chooses the devices of the process; a step of your own is on the first.",
}
"""The options of `tr.Trainer` that a step of the user's own cannot have, and what to write instead."""


def bind_state(state: Tree) -> OwnBinding:
    """The binding of a state: that of Flax NNX if there is anything of it inside."""
    if "flax.nnx" in sys.modules:
        from tailrace.trainer.modules.nnx_own_state import NnxOwnBinding, holds_modules

        if holds_modules(state):
            return NnxOwnBinding(state)
    return TreeBinding(state)


def engine_of_step(
    step_fn: Callable[..., Any],
    binding: OwnBinding,
    *,
    observe: Observe,
    logged: Mapping[str, Any],
    on_nonfinite: str | None,
    replica_state: str | Callable[[str], str] | None,
    rewrites: Mapping[str, bool] | None,
    compiler_options: Mapping[str, Any] | None,
    **options: Any,
) -> Engine:
    """The engine of a step; arguments as for `tr.Trainer.from_step`."""
    if not callable(step_fn):
        raise OptionError(f"step_fn is a function of state and batch. Received: {step_fn!r}.")
    if NORM in logged:
        raise OptionError(
            "log='grad_norm' is of gradients that the trainer computes. Received: a step of your own. "
            "Return it as a metric: {'grad_norm': optax.global_norm(grads)}."
        )
    return Engine(
        BoundStep(binding, step_fn),
        InTheStep(),
        None,
        model_state=binding.model_state,
        replica_state=_each(replica_state),
        observe=[*parse_taps(observe), *_guards(on_nonfinite), *taps_of(logged)],
        build=Build.of(rewrites, compiler_options),
        **options,
    )


def check_evaluates(engine: Engine, eval_fn: object) -> None:
    """Refuse an evaluation of a step that has no loss, before the steps that come first."""
    if isinstance(engine.step_function, OwnStep) and eval_fn is None:
        raise OptionError(
            "A step of your own has no loss to evaluate. Received: no eval_fn. Give eval_fn= to "
            "tr.Trainer.from_step, or call trainer.evaluate(dataset, fn); both are called as fn(state, "
            "*batch)."
        )


def check_has_params(engine: Engine, what: str) -> None:
    """Refuse what is about parameters, for a step whose state nobody else can read."""
    if isinstance(engine.step_function, OwnStep):
        raise OptionError(
            f"{what} of tr.Trainer is about parameters. Received: a trainer of a step of your own, "
            f"whose state is one tree. Set trainer.state for other values; your averages are in it."
        )


def check_has_loss(engine: Engine) -> None:
    """Refuse to explain a step of a trainer that knows no loss of a row."""
    if isinstance(engine.step_function, OwnStep):
        raise OptionError(
            "explain_step calls the loss function with one row at a time. Received: a step of your "
            "own, which has none. Use trainer.replay with taps, or mark the losses of rows: "
            "tr.mark(losses, 'loss/rows')."
        )


def _each(rule: object) -> str | Callable[[str], str]:
    """Which leaves of the state each replica has for itself, in the engine's words."""
    if callable(rule):
        return lambda name: "each" if rule(name) == "each" else "mean"
    if rule not in (None, "each"):
        raise OptionError(
            f"replica_state is None (the step keeps the state equal on all replicas), 'each' (every "
            f"replica has its own), or a function of a leaf's name that returns one of them. Received: "
            f"replica_state={rule!r}. Call tr.cross_replica_mean in the step for what is averaged."
        )
    return "mean" if rule is None else "each"


def _guards(on_nonfinite: str | None) -> list[Any]:
    """The guard that `on_nonfinite=` asks for: of metrics, and of gradients that the step marks."""
    if on_nonfinite is None:
        return []
    # A step that is skipped must be known to be bad by more than its metrics, which are mostly computed
    # before the update.
    select = [_is_metric, MarkedGradients()] if on_nonfinite == "skip" else _is_guarded
    return [stop_on_nonfinite(select, on_nonfinite)]


class MarkedGradients:
    """The selection of what a step has marked as gradients, which there must be."""

    unmatched = (
        "on_nonfinite='skip' leaves out steps whose gradients are not finite. Received: a step of your "
        "own that marks none. Mark them: grads = tr.mark(grads, 'grad/generator'); or guard the new "
        "state: observe=[tr.stop_on_nonfinite('updated/*', on_nonfinite='skip')]."
    )

    def __call__(self, entry: Entry) -> bool:
        """Whether a tensor is one."""
        return entry.kind == "grad"


def _is_metric(entry: Entry) -> bool:
    return entry.kind in ("loss", "aux")


def _is_guarded(entry: Entry) -> bool:
    return _is_metric(entry) or entry.kind == "grad"
