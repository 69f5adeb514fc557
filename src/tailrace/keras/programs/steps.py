"""Evaluation, prediction, and training with an overridden `train_step`: Keras' steps on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import DeviceError, PipelineError, PlanError, ProgramError, ReplicaError
from tailrace.feeds.feed import HandedFeed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.keras.data.batch_source import Block
from tailrace.keras.handles import settings_of
from tailrace.keras.optimizers.adapter import check_optimizer
from tailrace.keras.optimizers.application import overrides
from tailrace.keras.optimizers.wrappers import Wrapper
from tailrace.keras.outfeed_layers import silent
from tailrace.keras.programs.executions import Executions, as_batch, exact
from tailrace.keras.programs.logs import INSIDE, flat, nested
from tailrace.keras.programs.one_process import placement_of
from tailrace.keras.programs.variables import Layout, for_replicas, merged, on_one_device
from tailrace.pipeline.running.forward_only import ForwardRunner, stages_in
from tailrace.program.compiling.build import Build
from tailrace.program.loops import repeat_with, whole
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.result_packing import on_device
from tailrace.records.history import History


class Looping(Executions, ABC):
    """One of Keras' step functions, `(state, data) -> (results, state)`, in a loop on the device.

    Args:
        model: the model.
    """

    drops_remainder = True
    called = step_called = ""
    """The method that the user calls, and the Keras step that it runs."""
    kinds: tuple[str, ...] = ()
    """The variables of the state, by their attributes in `Layout`."""
    read_only = 1
    """The number of them, from the start, that the step does not change."""

    def __init__(self, model: keras.Model) -> None:
        settings = settings_of(model)
        super().__init__(model, placement_of(settings), settings.replicas)
        self.layout = Layout(model)
        self.variables = [getattr(self.layout, kind) for kind in self.kinds]
        self.out = OutfeedQueue()
        self._pipeline = settings_of(model).forward_pipeline()
        """The stages that the step goes through; None: it runs whole on one device."""
        self.runners: dict[Any, LoopRunner] = {}
        self._active: tuple[LoopRunner, LoopState] | None = None
        self._token = tuple([None] * len(self.kinds))  # a new object, recognised by identity
        self._start: tuple[list[Any], list[Any]] | None = None
        self._read: list[Any] = []
        self._step = 0

    def handed_over(self) -> list[Any]:
        """The variables whose values Keras passes in, in order."""
        if self._active is not None:
            return []
        return [variable for kind in self.variables for variable in kind.all]

    # -- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def step(self, state: tuple[Any, ...], data: Tree) -> tuple[Any, tuple[Any, ...]]:
        """The step; returns the values to send out, and the next state."""

    # -- called by Keras ------------------------------------------------------------------------

    def run_blocks(self, state: Tree, iterator: Iterator[Any]) -> list[Any]:
        """Run one execution; returns the values of each dispatch."""
        # New values from Keras: the loop begins again from them.
        if state is not self._token:
            self._active, self._start = None, self._parts([list(values) for values in state])
            self._read = self._start[1]
        return self.execute(iterator)

    def fill(self) -> None:
        """Write the values to the variables."""
        if self._active is None:
            return
        carried = self._carried()
        for kind, values in zip(self.variables[self.read_only :], carried, strict=True):
            for variable, value in zip(kind.all, values, strict=True):
                variable.assign(self._of_one(variable, value))
        for kind, values in zip(self.variables[: self.read_only], self._read, strict=True):
            for variable, value in zip(kind.all, values, strict=True):
                variable.assign(value)
        self._active = self._start = None

    # -- dispatching ----------------------------------------------------------------------------

    def dispatch(self, block: Block) -> tuple[Any, Any]:
        """Run the batches of a block."""
        runner = self._runner_for(block)
        if self._active is None or self._active[0] is not runner:
            if self._active is None:
                assert self._start is not None
                carried, read = self._start
            else:
                carried, read = self._carried(), self._read
            state: Any = (tuple(carried), tuple(read))
            if isinstance(runner, ForwardRunner):
                # In a pipeline, read values are parameters of stages, and so part of what the
                # devices hold.
                state = ((tuple(read), tuple(carried)), ())
            self._active = (runner, runner.begin(*state))
            self._start = None
        # The devices of a pipeline are known only now.
        self._sharding = runner.placement.shared_out
        staged = block.on(self._sharding, self.replicas)
        passes = block.count // self.replicas
        if isinstance(runner, ForwardRunner):
            passes //= runner.per_pass
            staged = exact(staged)
        else:
            runner.capacity = staged.room if staged.room > 1 else None
        # Always seed 0: random layers of Keras draw from variables, which are part of the state.
        numbers = Numbers(0, self._step)
        emitted, ticket = runner.dispatch(self._active[1], passes, numbers, 0, block=staged)
        self._step += passes
        # Ours is taken out; the rest is for outfeeds in the user's layers.
        value = runner.by_element(emitted.pop(self.out).value)
        runner.traced.deliver(emitted)
        return ticket, self.result(jax.tree.unflatten(self._structure(runner), value))

    def _carried(self) -> Any:
        """The current values that steps change."""
        assert self._active is not None
        runner, state = self._active
        return runner.changed(state) if isinstance(runner, ForwardRunner) else runner.carried(state)

    def result(self, sent: Tree) -> Any:
        """The result of a dispatch from its sent values: metrics, by default."""
        return self.log_series({k: v for k, v in sent.items() if not self.names[k]})

    def _structure(self, runner: LoopRunner) -> Any:
        return runner.traced.outfeeds[self.out].structure

    def _runner_for(self, block: Block) -> LoopRunner:
        form, count = block.form, block.count // self.replicas
        # A pipeline's schedule is compiled for its number of microbatches; a plain loop takes any
        # length.
        key = (form, count) if self._pipeline else form
        if key not in self.runners:
            form.feed.bind_replicas(self.replicas)
            shapes = [[_shape(v) for v in kind.all] for kind in self.variables]
            read, carried = tuple(shapes[: self.read_only]), tuple(shapes[self.read_only :])
            if self._pipeline is not None:
                try:
                    self.runners[key] = self._through_stages(read, carried, form.feed, count)
                except (DeviceError, PipelineError, PlanError, ReplicaError) as error:
                    note_once(
                        f"{self.called} runs the whole model on one device of each replica, not as a "
                        f"pipeline over the stages' devices: {error}"
                    )
                    # For good: the reason (too few devices, an uneven split) will not change, and
                    # is said once.
                    self._pipeline = None
                    return self._runner_for(block)
            else:
                self.runners[key] = self._whole_model(read, carried, form.feed)
            self.runners[key].build = settings_of(self.model).build
        return self.runners[key]

    def _advanced(self, carried: Tree, element: Tree, read: Tree) -> tuple[Any, Any]:
        """The values that one batch sends out, and the next carry."""
        sent, state = self.step((*read, *carried), self.batch(element))
        after = jax.tree.map(
            # A loop's carry keeps its dtypes.
            lambda old, new: jnp.asarray(new, old.dtype),
            carried,
            tuple(list(part) for part in state[self.read_only :]),
        )
        return sent, after

    def _whole_model(self, read: Tree, carried: Tree, feed: HandedFeed) -> LoopRunner:
        """The step in a loop, on one device of each replica."""

        def body(carried: Tree, element: Tree, read: Tree) -> Any:
            sent, after = self._advanced(carried, element, read)
            self.out.enqueue(sent)
            # JAX would turn an unchanged carry into a constant; but each replica has its own value.
            return jax.lax.optimization_barrier(after) if self.replicas > 1 else after

        def program(carried: Tree, read: Tree) -> Any:
            return repeat_with(whole, 1, lambda c, b: body(c, b, read), carried, feed)

        # Every carried value may differ per replica: metrics, seeds and counters do.
        own = [True] * len(jax.tree.leaves(carried))
        return LoopRunner(program, carried, read, self.placement, own)

    def _through_stages(
        self, read: Tree, carried: Tree, feed: HandedFeed, count: int
    ) -> LoopRunner:
        """The step as a pipeline, each stage on its device."""
        assert self._pipeline is not None

        def compute(read: Tree, carried: Tree, element: Tree, _: object) -> Any:
            with settings_of(self.model).in_stages():
                return self._advanced(carried, element, read)

        form = (read, carried, feed.spec().tree(), ())
        # A step that calls layers itself, past the model, meets no boundary.
        if len(stages := stages_in(compute, form, self.replicas)) < 2:
            raise PipelineError(
                f"`{self.step_called}` does not go through the stages of the model. Call the model "
                f"itself in it: `self(x)`."
            )
        return ForwardRunner(
            stages, compute, read, carried, feed, self.out, count, self._pipeline, self.placement
        )

    def batch(self, element: Tree) -> Any:
        """The batch that the step gets."""
        return as_batch(element)

    def _parts(self, values: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        """The initial values of the loop, carried and read."""
        carried, read = values[self.read_only :], values[: self.read_only]
        if self.replicas > 1:
            for part, kind in zip(carried, self.variables[self.read_only :], strict=True):
                for number, variable in enumerate(kind.all):
                    if self.layout.own_of_replicas(kind.names[number]):
                        part[number] = for_replicas(variable, part[number], self.replicas)
        return carried, read

    def _of_one(self, variable: keras.Variable, value: TensorLike) -> Any:
        if value.ndim > len(variable.shape):
            # By identity: variables of Keras compare by value.
            metric = any(variable is one for one in self.layout.metrics.all)
            if metric or not jnp.issubdtype(value.dtype, jnp.inexact):
                return jnp.asarray(merged(variable, np.asarray(value)))
            return jnp.asarray(np.asarray(value).mean(axis=0, dtype=value.dtype))
        return on_one_device(value)


class Measuring(Looping, ABC):
    """A step in a loop whose metrics are what it is about."""

    def run(self, state: Tree, iterator: Iterator[Any]) -> tuple[dict[str, Any], Any]:
        """One execution."""
        return nested(self.logs(self.run_blocks(state, iterator)[-1])), self._token

    def step_logs(
        self, result: Tree, steps: int, step: int, replica: int | None = None
    ) -> dict[str, Any]:
        """The logs of one step of a dispatch, flat, as Keras hands them to callbacks."""
        found = super().step_logs(result, steps, step, replica)
        return {name.rpartition(INSIDE)[2]: value for name, value in found.items()}

    def _sent(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        sent = {name: self._as_array(name, value) for name, value in flat(logs)}
        self.names = {name: value.shape for name, value in sent.items()}
        return sent

    def _as_array(self, name: str, value: Any) -> jax.Array:
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError):
            raise ProgramError(
                f"`{self.step_called}` returns logs: numbers by name, also in dicts of their own. "
                f"Received: {name.replace(INSIDE, '/')}, of type {type(value).__name__}. Leave it out."
            ) from None


class Evaluating(Measuring):
    """`test_step` in a loop."""

    called, step_called = "evaluate", "test_step"
    kinds = ("trainable", "others", "metrics")

    def step(self, state: tuple[Any, ...], data: Tree) -> tuple[Any, tuple[Any, ...]]:
        """One batch."""
        with silent():
            logs, state = self.model.test_step(state, data)
        return self._sent(logs), state


class Stepping(Measuring):
    """An overridden `train_step` in a loop."""

    drops_remainder = False
    called, step_called = "fit", "train_step"
    kinds = ("trainable", "others", "optimizer", "metrics")
    read_only = 0

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._check_optimizer()
        wrong = settings_of(model).for_engine()
        if wrong:
            raise ProgramError(
                f"{self._why()} it runs in a loop on the device, but its gradients cannot be "
                f"separated, so it does not go with {wrong[0]}. Override `compute_loss`, or leave "
                f"{wrong[0]} out."
            )

    def _why(self) -> str:
        """Why Keras' step runs, and not the engine's."""
        for name in ("train_step", "compute_loss_and_updates"):
            if overrides(self.model, name, keras.Model):
                return (
                    f"The function `{name}` for the model {self.model.name!r} has been overridden:"
                )
        return f"Nothing in the model {self.model.name!r} can be trained, so Keras' step is used:"

    def _check_optimizer(self) -> None:
        """Refuse an optimizer whose overridden method the step would ignore."""
        optimizer = self.model.optimizer
        check_optimizer(optimizer)
        # A wrapper calls the overridden method of its wrapped optimizer.
        bare = optimizer is not None and not isinstance(optimizer, Wrapper)
        if bare and overrides(optimizer, "apply_gradients", keras.optimizers.Optimizer):
            raise ProgramError(
                f"The function `train_step` for the model {self.model.name!r} has been overridden: in "
                f"it Keras on JAX calls `optimizer.stateless_apply`, which passes by "
                f"`apply_gradients`. Received: {type(optimizer).__name__}, which overrides "
                f"`apply_gradients`. Override `update_step` or `apply` of the optimizer instead, or "
                f"`compute_loss` of the model instead of `train_step`."
            )

    # -- checkpoints ----------------------------------------------------------------------------

    # Empty: what leaves this loop are the logs of the user's step, whatever they are.
    history = History()

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._step

    def settle(self) -> None:
        """Do nothing: only logs leave the loop."""

    def mark(self) -> Callable[[], Any]:
        """A no-op: there is no run directory."""
        return lambda: None

    def values(self) -> list[Any]:
        """The current values of the variables."""
        if self._active is None:
            return [variable.value for variable in self.layout.variables]
        return jax.tree.leaves(self._carried())

    def fill(self) -> None:
        """Write the values to the variables, also if batches were only counted."""
        if self._active is None and self._start is not None:
            self.put(jax.tree.leaves(self._start[0]))
        super().fill()

    def put(self, values: list[Any], of_replicas: bool = False) -> None:
        """Restore saved values of the variables."""
        del of_replicas
        for variable, value in zip(self.layout.variables, values, strict=True):
            variable.assign(jnp.asarray(value))
        self._active = self._start = None

    @property
    def built(self) -> dict[str, Any]:
        """How the programs are built, ready for JSON."""
        latest = next(reversed(self.runners.values()), None)
        return settings_of(self.model).build.recorded({}) if latest is None else latest.built

    def take_up(
        self, step: int, history: History, run_end: Mapping[str, Any] | None, build: Build
    ) -> None:
        """Resume at this step, with this build."""
        del history, run_end
        self._step = step
        for runner in self.runners.values():
            runner.rebuild(build)

    # -- the step -------------------------------------------------------------------------------

    def step(self, state: tuple[Any, ...], data: Tree) -> tuple[Any, tuple[Any, ...]]:
        """One batch."""
        logs, state = self.model.train_step(state, data)
        return self._sent(logs), state


class Predicting(Looping):
    """`predict_step` in a loop; its result for each batch is sent out."""

    called, step_called = "predict", "predict_step"
    kinds = ("trainable", "others")

    def run(self, state: Tree, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """One execution; returns the outputs of all its batches, joined."""
        parts = self.run_blocks(state, iterator)
        if len(parts) == 1:
            return parts[0], self._token
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts), self._token

    def step(self, state: tuple[Any, ...], data: Tree) -> tuple[Any, tuple[Any, ...]]:
        """One batch."""
        outputs, others = self.model.predict_step(state, data)
        return outputs, (state[0], others)

    def step_logs(
        self, result: Tree, steps: int, step: int, replica: int | None = None
    ) -> dict[str, Any]:
        """The logs of a step: its outputs, or those of one replica."""

        def rows(leaf: object) -> np.ndarray:
            found = np.split(np.asarray(leaf), steps)[step]
            return found if replica is None else np.split(found, self.replicas)[replica]

        return {"outputs": jax.tree.map(rows, result)}

    def result(self, sent: Tree) -> Any:
        """Outputs in the order of the examples: passes, then replicas."""

        def join(leaf: TensorLike) -> Any:
            leaf = on_device(leaf)
            if self.replicas > 1:
                leaf = jnp.swapaxes(leaf, 0, 1)
                leaf = leaf.reshape(-1, *leaf.shape[2:])
            return leaf.reshape(-1, *leaf.shape[2:])

        return jax.tree.map(join, sent)


def _shape(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)
