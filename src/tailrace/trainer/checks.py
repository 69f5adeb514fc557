"""Checks of a trainer's arguments, before anything is traced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.jaxprs.array_trees import dtype_beside, not_an_array
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.pipeline import Pipeline
from tailrace.program.memory.optimizer_state import is_tapped
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import LossScale
from tailrace.program.step.own_step import StepFunction
from tailrace.program.step.precision import Precision
from tailrace.program.step.update_rule import Optimizer
from tailrace.taps.tap import AnyTap, StopOnNonfinite
from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.modules.recognition import without_values
from tailrace.trainer.observation.monitoring import Monitor
from tailrace.trainer.optax_kinds import check_kind


def check_model(
    loss_fn: object,
    optimizer: Optimizer,
    params: Tree,
    model_state: Tree,
    pipeline: Pipeline | None,
    accumulation: Accumulation | int,
) -> tuple[Any, Any]:
    """Check the model; returns the accumulation and the parameters (a pipeline's by stage)."""
    if not callable(loss_fn):
        raise OptionError(f"loss_fn is a function of parameters and batch. Received: {loss_fn!r}.")
    if isinstance(loss_fn, StepFunction):  # its state is a model's that changes itself
        check_values("state", model_state)
        return accumulation, None
    check_optimizer(optimizer)
    if pipeline is not None:
        check_pipeline(accumulation)
        accumulation, params = pipeline.accumulation, pipeline.untie(params)
    check_params(params)
    check_values("model_state", model_state)
    check_kind(optimizer, params)
    return accumulation, params


def check_replica_state(rule: object) -> bool | Callable[[str], bool]:
    """Whether replicas share the model state: for all leaves, or by a leaf's name."""
    if callable(rule):
        return lambda name: rule(name) == "mean"
    if rule not in ("mean", "each"):
        raise OptionError(f"replica_state is 'mean' or 'each'. Received: replica_state={rule!r}.")
    return rule == "mean"


def check_fingerprint(fingerprint: object) -> bool:
    """Refuse values other than True and False."""
    if not isinstance(fingerprint, bool):
        raise OptionError(f"fingerprint is True or False. Received: fingerprint={fingerprint!r}.")
    return fingerprint


def check_numbers(
    loss_scale: LossScale | float | str | None,
    precision: DTypeLike,
    taps: Sequence[AnyTap],
    params: Tree,
) -> tuple[LossScale | None, Precision | None]:
    """Parse the loss scale and the precision."""
    scale, precision = LossScale.of(loss_scale), Precision.of(precision)
    # 6e-8 is the smallest float16 above 0, and many gradients are smaller.
    if scale is None and precision is not None and precision.dtype == jnp.float16:
        note_once(
            "precision='float16' without a loss scale: gradients below 6e-8 become zero. Give "
            "loss_scale='dynamic'."
        )
    # Scaled gradients overflow now and then, and the scale recovers: a guard would end the training,
    # or count the step among those that it skips.
    guards = [tap for tap in taps if isinstance(tap, StopOnNonfinite)] if scale else []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        for kind in ("grad", "accumulated", "reduced"):
            name = f"{kind}/{path_name(path) or 'params'}"
            for guard in guards:
                if is_tapped([guard], name, jax.typeof(leaf)):
                    raise _guarded_twice(guard, name)
    return scale, precision


def check_guards(taps: Sequence[AnyTap]) -> StopOnNonfinite | None:
    """The guards as one: what each selects, the smallest limit, the one bundle; None without any."""
    guards = [tap for tap in taps if isinstance(tap, StopOnNonfinite)]
    if len(guards) < 2:
        return guards[0] if guards else None
    if len({guard.skips for guard in guards}) > 1:
        each = ", ".join(f"{guard.select!r}: {guard.on_nonfinite!r}" for guard in guards)
        raise OptionError(
            f"A bad step is skipped or it stops the training, so the guards of a trainer all skip or "
            f"all stop. Received: {each}. Give them the same on_nonfinite=; with 'skip', limit= says "
            f"after how many bad steps to stop."
        )
    bundles = list(dict.fromkeys(os.fspath(g.bundle) for g in guards if g.bundle is not None))
    if len(bundles) > 1:
        raise OptionError(
            f"A bad step stops the training once, and is written to one bundle. Received: bundle="
            f"{bundles[0]!r} and bundle={bundles[1]!r}. Give one of them."
        )
    every = [guard.select for guard in guards]
    limit = min(guard.limit for guard in guards)
    return StopOnNonfinite(every, guards[0].on_nonfinite, limit, bundles[0] if bundles else None)


def _guarded_twice(guard: StopOnNonfinite, name: str) -> OptionError:
    """The error about a guard of gradients whose overflows are the business of a loss scale."""
    rule = "With loss_scale, a step whose gradients are not finite is skipped"
    if guard.skips:
        return OptionError(
            f"{rule} already, and the scale is lowered; on_nonfinite='skip' would count it as a bad "
            f"step, of which there may be {guard.limit}. Received: a guard of {name!r} that skips. "
            f"Leave on_nonfinite='skip' out, or guard the loss alone: "
            f"observe=[tr.stop_on_nonfinite('loss', on_nonfinite='skip')]."
        )
    return OptionError(
        f"{rule}, and the scale is lowered; tr.stop_on_nonfinite would end the training there. "
        f"Received: a guard of {name!r}. Guard what must be finite all the same: "
        f"tr.stop_on_nonfinite('loss')."
    )


def check_ema(ema: object) -> Any:
    """The decay as a float, an optax transformation, or None."""
    if ema is None or callable(getattr(ema, "update", None)):
        return ema
    if isinstance(ema, bool) or not isinstance(ema, int | float) or not 0 <= ema < 1:
        raise OptionError(
            f"ema= is the decay of the averaged parameters, at least 0 and less than 1, or an optax "
            f"transformation such as optax.ema(0.999). Received: ema={ema!r}. Use ema=0.999."
        )
    return float(ema)


def check_like_params(now: Tree, given: Tree) -> Any:
    """Check that parameters for an evaluation have the form of the trained ones."""
    old, new = jax.tree.structure(now), jax.tree.structure(given)
    if old != new:
        raise OptionError(
            f"params= is a tree like trainer.params, {old}. Received: {new}. Change leaves of "
            f"trainer.params, which is a copy."
        )

    def leaf(path: tuple[Any, ...], form: Any, value: TensorLike) -> Any:
        dtype = dtype_beside(form, value)
        if jnp.shape(value) != form.shape or dtype != form.dtype:
            raise OptionError(
                f"params= has the shapes and dtypes of trainer.params: {path_name(path) or 'params'!r} "
                f"is {form.dtype}{list(form.shape)}. Received: {dtype}{list(jnp.shape(value))}."
            )
        return jnp.asarray(value, form.dtype)

    return jax.tree_util.tree_map_with_path(leaf, now, given)


def check_optimizer(optimizer: object) -> None:
    """An optimizer has `init` and `update`; those of front ends have `apply` instead."""
    has = [callable(getattr(optimizer, name, None)) for name in ("init", "update", "apply")]
    if not (has[0] and (has[1] or has[2])):
        raise OptionError(
            f"optimizer is an optax transformation, with init and update. Received: {optimizer!r}. "
            f"For example optax.sgd(0.01)."
        )


def check_pipeline(accumulation: object) -> None:
    """Refuse options that a pipeline decides itself."""
    if accumulation != 1:
        raise OptionError(
            f"The microbatches of a pipeline are given to it: tr.Pipeline(..., accumulation=...). "
            f"Received: Trainer(accumulation={accumulation!r}) as well. Leave it out there."
        )


def check_params(params: Tree) -> None:
    """Check that there are parameters, and that they are floats."""
    check_values("params", params)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise ProgramError(f"There are no parameters to train. Received: params={params!r}.")
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ProgramError(
                f"Parameters are floats, so that they have a gradient. Received: "
                f"{path_name(path) or 'params'!r} of {dtype}{list(jnp.shape(leaf))}. Keep integers "
                f"in model_state, or close over them."
            )


def check_state(now: Tree, given: Tree) -> Any:
    """Check that a state has the form of the current one; numbers become arrays."""
    if jax.tree.structure(now) != jax.tree.structure(given):
        raise ProgramError(
            f"The state that is set has the structure of trainer.state, {jax.tree.structure(now)}. "
            f"Received: {jax.tree.structure(given)}. Change leaves of trainer.state, which is a copy."
        )

    def leaf(path: tuple[Any, ...], old: jax.Array, new: TensorLike) -> TensorLike:
        dtype = dtype_beside(old, new)
        if jnp.shape(new) != old.shape or dtype != old.dtype:
            raise ProgramError(
                f"The state that is set has the shapes and dtypes of trainer.state: "
                f"{path_name(path)!r} is {old.dtype}{list(old.shape)}. Received: "
                f"{dtype}{list(jnp.shape(new))}."
            )
        return new if hasattr(new, "dtype") else jnp.asarray(new, dtype)

    return jax.tree_util.tree_map_with_path(leaf, now, given)


def check_values(what: str, tree: Tree) -> None:
    """Check that a tree has only arrays and numbers; a module without values is called so."""
    try:
        found = not_an_array(tree)
    except ValueError as error:  # keys that cannot be sorted
        raise ProgramError(f"{what} is a tree that JAX can flatten. It says: {error}.") from None
    if found is not None:
        path, leaf = found
        raise ProgramError(
            f"{what} is a tree of arrays. Received: {path_name(path) or what!r}, "
            f"{without_values(leaf) or _no_array(leaf)}"
        )


def _no_array(leaf: object) -> str:
    """What a leaf is that JAX has no array of, and what to give instead."""
    if not isinstance(leaf, np.ndarray):
        return f"a {type(leaf).__name__}. Give the arrays only and close over the rest."
    if not leaf.dtype.isnative:
        return (
            f"an array in the byte order of other machines (dtype {leaf.dtype.str}). Convert it: "
            f"x.astype(x.dtype.newbyteorder('='))."
        )
    return f"an array of dtype {leaf.dtype}. Give arrays of numbers and close over the rest."


def check_eval_fn(eval_fn: object) -> Any:
    """A function like the loss function, or None."""
    if eval_fn is not None and not callable(eval_fn):
        raise OptionError(
            f"eval_fn is a function of parameters and batch, like loss_fn. Received: {eval_fn!r}."
        )
    return eval_fn


def check_callbacks(
    callbacks: Callback | Iterable[Callback], has_validation: bool
) -> list[Callback]:
    """Callbacks are a list of objects with the methods of `tr.Callback`, and watch what there is."""
    if not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    found = list(callbacks)
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    for one in found:
        # By its methods: a class of the user's need not derive from ours.
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in methods):
            raise OptionError(
                f"A callback is an object with the methods of tr.Callback. Received: {one!r}. "
                f"Derive a class from tr.Callback, override what you need, and give an object of it "
                f"in callbacks=."
            )
        if isinstance(watched := getattr(one, "watched", None), Monitor):
            watched.check_validates(type(one).__name__, "monitor", has_validation)
    return found


def check_config(config: object) -> dict[str, Any]:
    """Parse the value of `config=`, which is stored as JSON."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
        raise OptionError(
            f"config= is a dict of your own, with names as keys: config={{'rate': 0.1}}. "
            f"Received: {config!r}."
        )
    # A copy: a run directory gets it when a fit begins, and the user's dict may change before.
    return dict(config)
