"""The training state of an engine, wherever it is held.

Before the first program there is a tree of arrays. A program then copies them into buffers of its own,
in its own layout (a pipeline's are spread over devices, optimizer state may be sharded or in host
memory), and the tree is dropped: the state exists once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.jaxprs.marks import path_name
from tailrace.program.memory.first_state import FirstState
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.step.loss_scale import ScaleState
from tailrace.program.step.train_state import OwnState, TrainState
from tailrace.trainer.costs.memory_plan import on_host


class HeldState:
    """The state: a tree until a program is in use, then in that program's buffers.

    Args:
        first: the state to start from, where it is held.
        form: its shapes.
        keeping: how optimizer state is held, if not plainly on the devices.

    Attributes:
        form: the shapes of the state.
    """

    def __init__(self, first: TrainState, form: TrainState, keeping: StateKeeping | None) -> None:
        self._tree: TrainState | None = first
        self._active: tuple[LoopRunner, LoopState] | None = None
        self.form, self._keeping = form, keeping

    @property
    def in_use(self) -> bool:
        """Whether a program holds the state."""
        return self._active is not None

    @property
    def active(self) -> tuple[LoopRunner, LoopState]:
        """The program that holds the state, and its buffers."""
        if self._active is None:
            raise ProgramError("An engine runs the program of a dataset. Call engine.use first.")
        return self._active

    @property
    def held(self) -> TrainState:
        """The state as it is held: optimizer state may be sharded or offloaded."""
        if self._active is not None:
            runner, state = self._active
            return runner.carried(state)
        assert self._tree is not None
        return self._tree

    def whole(self, placement: Placement) -> TrainState:
        """The state with optimizer state as the optimizer knows it."""
        state = self.held
        if self._keeping is None:
            return state
        return state._replace(optimizer_state=self._keeping.whole(state.optimizer_state, placement))

    def move_to(self, runner: LoopRunner, inputs: Sequence[Any], form: TrainState) -> None:
        """Let a program hold the state from now on.

        Args:
            runner: the program.
            inputs: those of a pipeline.
            form: the shapes of the state in the program, which may have made numbers wider.
        """
        if self._active is None or self._active[0] is not runner:
            # Copied into the new program's buffers before the old ones are dropped: for a moment both
            # exist.
            self._active = (runner, runner.begin(jax.tree.map(_widened, self.held, form), inputs))
            self._tree, self.form = None, form
        else:
            runner.read(self._active[1], inputs)

    def swap(self, runner: LoopRunner) -> None:
        """Let another program use the buffers as they are: it must have the same layout."""
        # No copy: a program made by `observing` differs from the current one only in what it emits.
        self._active = (runner, self.active[1])

    def replace(self, leaves: Mapping[int, Any], placement: Placement) -> None:
        """Replace leaves by their index in the tree; values are copied."""
        if self._keeping is not None:
            # Parameters come first in the flattened state, then the optimizer's leaves: `keeping`
            # counts its own from there.
            first = len(jax.tree.leaves(self.form.params))
            leaves = self._keeping.hold_some(leaves, first, placement)
        if self._active is not None:
            runner, state = self._active
            runner.replace(state, leaves)
            return
        # No program yet: there are no buffers to write into, only the tree.
        now, structure = jax.tree.flatten(self._tree)
        if placement.sharding is not None:  # each device gets its part, and none gets the whole
            leaves = {n: jax.device_put(value, now[n].sharding) for n, value in leaves.items()}
        self._tree = jax.tree.unflatten(
            structure, [leaves.get(number, value) for number, value in enumerate(now)]
        )

    def merged_model_state(self) -> Any:
        """Model state for a forward pass, of a model whose replicas each have their own."""
        model_state = self.held.model_state
        if self._active is None:
            return model_state
        return jax.tree.map(_merged, model_state, self.form.model_state)


def begin_state(
    params: Tree,
    first: FirstState,
    model_state: Tree,
    scale: ScaleState | None,
    placement: Placement,
    keeping: StateKeeping | None,
    *,
    pipelined: bool,
) -> HeldState:
    """The state to start from, copied to where it is held.

    Args:
        params: the parameters.
        first: the initial optimizer state, computed leaf by leaf.
        model_state: state that the model updates itself.
        scale: the state of loss scaling.
        placement: the devices.
        keeping: how optimizer state is held, if not plainly on the devices.
        pipelined: whether the model is a pipeline.
    """
    # A pipeline's state is on the host until it is known which device holds what.
    place = on_host if pipelined else placement.own
    if keeping is None:
        leaves = [place(leaf) for leaf in first.leaves()]
        made = jax.tree.unflatten(jax.tree.structure(first.forms), leaves)
    else:
        made = keeping.hold(first.leaves(), placement)
    forms = jax.eval_shape(lambda: (params, model_state, scale))
    held = first.forms if keeping is None else keeping.held_forms
    params, model_state, scale = jax.tree.map(place, (params, model_state, scale))
    start = TrainState(params, made, model_state, scale)
    if placement.sharding is not None:  # by their shapes, programs know where leaves are
        return HeldState(start, jax.tree.map(_form_on_mesh, start), keeping)
    return HeldState(start, TrainState(forms[0], held, *forms[1:]), keeping)


def begin_own_state(state: Tree, placement: Placement) -> HeldState:
    """The state of a step of the user's own, copied to where it is held."""
    form: Any = OwnState(jax.eval_shape(lambda: state))
    return HeldState(cast(Any, OwnState(jax.tree.map(placement.own, state))), form, None)


def _form_on_mesh(value: jax.Array) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(value.aval, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding, weak_type=weak)


def leaves_of_replicas(
    form: TrainState,
    shares: Callable[[str], bool],
    keeping: StateKeeping | None,
    *,
    pipelined: bool,
) -> list[bool]:
    """For each leaf of the state, whether each replica has a value of its own.

    Args:
        form: the shapes of the state.
        shares: whether a leaf of model state, by its name, is combined over replicas.
        keeping: how optimizer state is held, if not plainly on the devices.
        pipelined: whether the model is a pipeline.
    """
    each = [
        path[0].name in ("model_state", "state") and not shares(path_name(path[1:]))
        for path, _ in jax.tree_util.tree_flatten_with_path(form)[0]
    ]
    # Shards are one array over all devices, except in a pipeline: there the mesh has stages as well,
    # and the shard of each replica is a separate row of its stage's buffer.
    if pipelined and keeping is not None:
        first = len(jax.tree.leaves(form.params))
        for place, shared in enumerate(keeping.shared, start=first):
            each[place] |= shared
    return each


def _widened(value: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
    return value if value.dtype == form.dtype else value.astype(form.dtype)


def _merged(value: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
    """One value from those of all replicas: their mean, or the first if a mean is undefined."""
    if value.ndim == len(form.shape):
        return value
    return value.mean(axis=0) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0]
