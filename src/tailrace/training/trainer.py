"""`tr.Trainer`: training with optax, many steps to a dispatch."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tailrace.data.adapters import as_dataset
from tailrace.devices import resolve_replicas
from tailrace.errors import DataError, DataExhausted, OptionError, ProgramError, TailraceError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.marks import path_name
from tailrace.notes import logger, note_once
from tailrace.observe.records import Records, take_records
from tailrace.program.accumulation import Accumulation
from tailrace.program.executable import STOPPED, Numbers, Placement
from tailrace.program.explain import Explanation, explain
from tailrace.program.optimizers import AccumulationState
from tailrace.program.pieces import LIVE_S, next_piece
from tailrace.program.runner import LoopRunner
from tailrace.program.sight import Sight, look
from tailrace.program.step import Step, TrainState
from tailrace.program.traced import trace_program
from tailrace.tensors.catalogue import Catalogue, Entry
from tailrace.tensors.frame import Emission
from tailrace.tensors.taps import (
    MOST_BYTES,
    StopOnNonfinite,
    Tap,
    bytes_per_step,
    check_bytes,
    parse_taps,
)
from tailrace.training.callbacks import Callback, Execution, tell
from tailrace.training.evaluation import Evaluator
from tailrace.training.guard import diagnose, first_bad_step
from tailrace.training.history import History, split_emission
from tailrace.training.pace import TARGET_S, Pace, parse_steps
from tailrace.training.progress import ProgressBar


class Trainer:
    """Trains parameters with an optax optimizer, on the device, many steps to an execution.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the loss or `(loss, aux)`; with `model_state`,
            `loss_fn(params, model_state, *batch)` returns `(loss, (new_state, aux))`. Scalars in
            `aux` become part of the history.
        optimizer: an optax transformation.
        params: the parameters to start from, a tree of float arrays. They are copied.
        steps_per_execution: how many steps one dispatch runs; "auto" finds out.
        accumulation: how many microbatches make a step, or a `tr.Accumulation`.
        replicas: how many copies train side by side. None: as many as there are devices.
        offload_optimizer_state: keep the optimizer's state off the device; not available yet.
        model_state: state that the model updates itself, such as that of BatchNorm. It advances
            with each microbatch.
        replica_state: what becomes of the model state over replicas: "mean" averages its floats
            once a step; with "each" every replica keeps its own, and `trainer.model_state` has the
            replicas as dim 0 (`evaluate` and `predict` then use their mean).
        seed: where the keys of `tr.key()` come from.
        observe: taps (`tr.Tap`), or selections whose statistics are wanted. Their records are in
            `trainer.records`.
        observe_bytes: the most that the records of one execution may take on the device.

    Example:
        >>> import optax, numpy as np, tailrace as tr
        >>> def loss_fn(w, x, y):
        ...     return ((x * w - y) ** 2).mean()
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)
        >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.5), np.float32(0.0))
        >>> history = trainer.fit(tr.batches((x, 3 * x), 16, repeat=True), steps=100)
        >>> round(float(trainer.params), 2), len(history.loss)
        (3.0, 100)
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        params: Any,
        *,
        steps_per_execution: int | str = "auto",
        accumulation: Accumulation | int = 1,
        replicas: int | None = 1,
        offload_optimizer_state: bool = False,
        model_state: Any = None,
        replica_state: str = "mean",
        seed: int = 0,
        observe: Any = (),
        observe_bytes: int = MOST_BYTES,
    ) -> None:
        if not callable(loss_fn):
            raise OptionError(
                f"loss_fn is a function of parameters and batch. Received: {loss_fn!r}."
            )
        _check_optimizer(optimizer)
        _check_accumulates_once(optimizer, params)
        if offload_optimizer_state:
            raise OptionError(
                "offload_optimizer_state=True is not available in this version. Leave it out."
            )
        if replica_state not in ("mean", "each"):
            raise OptionError(
                f"replica_state is 'mean' or 'each'. Received: replica_state={replica_state!r}."
            )
        self.accumulation = Accumulation.of(accumulation)
        self.placement = Placement(resolve_replicas(replicas))
        self.seed = seed
        self.history = History()
        self.step = 0
        self._steps_per_execution = parse_steps(steps_per_execution)
        self._scalars = OutfeedQueue()
        self.taps = parse_taps(observe)
        self.records = Records()
        self._observe_bytes = observe_bytes
        self._step = Step(
            loss_fn,
            optimizer,
            self.accumulation,
            model_state is not None,
            self._scalars,
            replica_state == "mean",
            tuple(self.taps),
            [] if self.taps else None,
        )
        params = jax.tree.map(jnp.asarray, params)
        _check_params(params)
        model_state = jax.tree.map(jnp.asarray, model_state)
        state = TrainState(params, optimizer.init(params), model_state)
        self._form = jax.eval_shape(lambda: state)
        self._state: TrainState | None = jax.tree.map(self.placement.own, state)
        self._runners: dict[ElementSpec, LoopRunner] = {}
        self._sights: dict[ElementSpec, Sight] = {}
        self._active: tuple[LoopRunner, dict[Any, Any]] | None = None
        self._evaluator = Evaluator(self._step, self.placement, seed)
        self._stopping = False
        self._left: tuple[Any, InfeedQueue] | None = None
        self.pace: Pace | None = None

    # -- what there is --------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and model state: copies, which training leaves alone."""
        return jax.tree.map(jnp.copy, self._current())

    @property
    def params(self) -> Any:
        """The parameters as they are now: a copy."""
        return jax.tree.map(jnp.copy, self._current().params)

    @property
    def model_state(self) -> Any:
        """The model state as it is now: a copy."""
        return jax.tree.map(jnp.copy, self._current().model_state)

    @property
    def replicas(self) -> int:
        """How many copies train side by side."""
        return self.placement.replicas

    @property
    def executions(self) -> int:
        """How many dispatches training has made so far."""
        return sum(runner.executions for runner in self._runners.values())

    @property
    def elements_per_step(self) -> int:
        """How many elements of the dataset one step takes: microbatches x replicas."""
        return self.accumulation.microbatches * self.replicas

    def stop(self) -> None:
        """End the current fit after the execution that runs now."""
        self._stopping = True

    def tensors(self, example: Any = None) -> Catalogue:
        """Every tensor of the step by name, as `observe=` selects them.

        Args:
            example: one element of the dataset; not needed after a fit.
        """
        if example is None:
            if not self._sights:
                raise ProgramError(
                    "The step has tensors once the form of its batches is known. Give an element of "
                    "the dataset: trainer.tensors(example), or call it after a fit."
                )
            spec = next(reversed(self._sights))
        else:
            spec = InfeedQueue([example]).spec()
        found: list[Entry] = []
        # All of them marked, so that only those are listed that a tap would find.
        step = dataclasses.replace(self._step, activations=found, taps=(Tap("*"),))
        infeed = InfeedQueue([example]) if example is not None else self._runners[spec].infeeds[0]

        def train(state: TrainState, _: Any) -> TrainState:
            return step.loop(state, infeed)

        traced = trace_program(train, (self._form, ()), self.replicas)
        return look(traced, step.taps, found).catalogue

    # -- training -------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Any,
        steps: int | None = None,
        epochs: int | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> History:
        """Train.

        Args:
            dataset: what to train on; see `tr.InfeedQueue`.
            steps: train for exactly so many steps, which take steps x microbatches x replicas
                elements. The dataset is not restarted.
            epochs: go through the dataset so many times; 1 if neither is given. Elements at the end
                that do not fill a step are left out.
            callbacks: objects with the methods of `tr.Callback`.
            progress: whether to show a progress bar; None shows it in a terminal.

        Returns:
            The history of this fit, also kept as `trainer.history`.
        """
        _check_duration(steps, epochs)
        source = as_dataset(dataset)
        if steps is None and source.endless:
            raise DataError(
                f"fit by epochs goes on until the dataset ends, but {source.name} repeats without "
                f"end. Use fit(steps=...), or a dataset that does not repeat."
            )
        runner, infeed = self._runner_for(dataset)
        known = self._activate(runner)
        self.history = History(self.step, self.accumulation.microbatches, self.replicas)
        self._stopping = False
        total = self._total_steps(source.length, steps, epochs)
        sight = self._sights[infeed.spec()]
        self.records.clear()
        self._set_pace(runner, sight)
        callbacks = list(callbacks)
        for callback in callbacks:
            callback.on_fit_begin(self)
        for place in (self.records.runs, *runner.traced.outfeeds):
            place.begin()
        try:
            with ProgressBar(total, self.effective_batch_size(infeed.spec()), progress) as bar:
                fit = _Fit(self, runner, infeed, known, sight, callbacks, bar)
                if steps is not None:
                    fit.steps(steps)
                else:
                    epochs = 1 if epochs is None else epochs
                    if epochs > 1 and not source.restartable:
                        raise DataError(
                            f"fit(epochs={epochs}) goes through the dataset again and again, but "
                            f"{source.name} can be read once only. Give a re-iterable, a function "
                            f"that makes an iterator, or use fit(steps=...)."
                        )
                    for epoch in range(epochs):
                        if self._stopping:
                            break
                        if epoch:
                            infeed.restart(dataset, epoch)
                        fit.epoch(total // epochs if total is not None else None)
                fit.finish()
        except TailraceError:
            fit.finish()  # what was computed before the failure is part of the history
            raise
        finally:
            infeed.rest()
            self._left = (dataset, infeed) if not source.restartable else None
            for place in (self.records.runs, *runner.traced.outfeeds):
                place.end()
            for callback in callbacks:
                callback.on_fit_end(self, self.history)
        return self.history

    def effective_batch_size(self, spec: ElementSpec) -> int | None:
        """Examples in a step: microbatch size x microbatches x replicas."""
        sizes = {leaf.shape[0] for leaf in spec.leaves if leaf.shape}
        return min(sizes) * self.elements_per_step if len(sizes) == 1 else None

    # -- using what was trained -----------------------------------------------------------------

    def evaluate(self, dataset: Any, fn: Callable[..., Any] | None = None) -> dict[str, float]:
        """The mean, over all elements of a dataset, of what `fn` returns.

        Args:
            dataset: what to evaluate on; all of it is read.
            fn: called like the loss function; returns a scalar, a dict of scalars, or what a loss
                function returns. None: the loss function.
        """
        return self._evaluator.evaluate(dataset, fn, self._read())

    def predict(self, dataset: Any, fn: Callable[..., Any], live: bool = False) -> Any:
        """What `fn` returns for each element of a dataset, in order.

        Args:
            dataset: what to predict for; all of it is read.
            fn: `fn(params, *batch)`, or `fn(params, model_state, *batch)`; returns a tree of arrays.
            live: return an iterator that yields the result of each element while the rest is still
                being computed, instead of all results at the end.

        Returns:
            A tree of arrays. Results whose leading dim is that of the element's arrays are
            concatenated along it, all others are stacked.
        """
        read = self._read()
        if live:
            return self._evaluator.stream(dataset, fn, jax.tree.map(jnp.copy, read))
        return self._evaluator.predict(dataset, fn, read)

    def explain(self, example: Any, steps: int | None = None) -> Explanation:
        """What training on elements like `example` will need: memory, FLOPs, compile time.

        Args:
            example: one element of the dataset.
            steps: how many steps an execution is to have; None: as configured, or 10.
        """
        length = self._steps_per_execution or 10 if steps is None else parse_steps(steps)
        assert length is not None
        runner, infeed = self._runner_for([example])
        known = self._activate(runner)
        state = self._current()
        return explain(
            runner,
            known,
            length,
            parts={
                "parameters": state.params,
                "optimizer state": state.optimizer_state,
                "model state": state.model_state,
            },
            effective_batch_size=self.effective_batch_size(infeed.spec()),
        )

    # -- inside ---------------------------------------------------------------------------------

    def _current(self) -> TrainState:
        if self._active is not None:
            runner, known = self._active
            return runner.carried(known)
        assert self._state is not None
        return self._state

    def _read(self) -> tuple[Any, Any]:
        """Parameters and model state, one for all replicas."""
        state = self._current()
        model_state = state.model_state
        if not self._step.share_state and self._active is not None and self.replicas > 1:
            forms = self._form.model_state
            model_state = jax.tree.map(_merged, model_state, forms)
        return state.params, model_state

    def _runner_for(self, dataset: Any) -> tuple[LoopRunner, InfeedQueue]:
        """The program for elements of the dataset's form, and its infeed set to that dataset."""
        fresh = InfeedQueue(dataset)
        fresh.bind_replicas(self.replicas)
        if self._left is not None and self._left[0] is dataset:
            fresh.adopt(self._left[1])  # a one-shot iterator: what was read ahead comes first
        spec = fresh.spec()
        if spec in self._runners:
            runner = self._runners[spec]
            infeed = runner.infeeds[0]
            infeed.adopt(fresh)
            return runner, infeed

        def train(state: TrainState, _: Any) -> TrainState:
            return self._step.loop(state, fresh)

        each = [
            not self._step.share_state and path[0].name == "model_state"
            for path, _ in jax.tree_util.tree_flatten_with_path(self._form)[0]
        ]
        runner = LoopRunner(train, self._form, (), self.placement, each)
        self._sights[spec] = look(runner.traced, self.taps, self._step.activations or ())
        runner.wanted = self._sights[spec].wanted
        self._runners[spec] = runner
        return runner, fresh

    def _activate(self, runner: LoopRunner) -> dict[Any, Any]:
        """Move the state into the program that will run."""
        if self._active is None or self._active[0] is not runner:
            self._active = (runner, runner.begin(self._current(), ()))
            self._state = None
        return self._active[1]

    def _set_pace(self, runner: LoopRunner, sight: Sight) -> None:
        count = self.accumulation.microbatches
        recorded = bytes_per_step(sight.chosen, count, self.replicas)
        if self._steps_per_execution is not None:
            steps = self._steps_per_execution
            check_bytes(sight.chosen, steps, count, self.replicas, self._observe_bytes)
        most = int(self._observe_bytes / recorded) if recorded else None
        if most is not None and most < sight.period:
            check_bytes(sight.chosen, sight.period, count, self.replicas, self._observe_bytes)
        live = any(getattr(tap, "live", False) for tap in self.taps)
        size = runner.bytes_per_pass
        if self.pace is None or self.pace.bytes_per_step != size:
            self.pace = Pace(
                self._steps_per_execution,
                size,
                sight.period,
                most_steps=most,
                target_s=LIVE_S if live else TARGET_S,
            )

    def _total_steps(self, length: int | None, steps: int | None, epochs: int | None) -> int | None:
        if length is None:
            return steps
        per_epoch = length // self.elements_per_step
        if steps is not None:
            if steps > per_epoch:
                raise DataExhausted(self._too_short(steps, length, 0))
            return steps
        if not per_epoch:
            raise DataExhausted(self._too_short(1, length, 0))
        _note_left_out(length, self.elements_per_step)
        return per_epoch * (1 if epochs is None else epochs)

    def _too_short(self, steps: int, length: int | str, done: int) -> str:
        count, replicas = self.accumulation.microbatches, self.replicas
        return (
            f"fit takes steps x microbatches x replicas elements, {steps} x {count} x {replicas} = "
            f"{steps * count * replicas}, and never restarts a dataset for steps=. This one has "
            f"{length}; {done} steps were done. Ask for fewer steps, repeat the dataset, or use "
            f"fit(epochs=...)."
        )


class _Fit:
    """One `fit` while it runs: dispatches ahead, and takes in results one execution behind."""

    def __init__(
        self,
        trainer: Trainer,
        runner: LoopRunner,
        infeed: InfeedQueue,
        known: dict[Any, Any],
        sight: Sight,
        callbacks: list[Callback],
        bar: ProgressBar,
    ) -> None:
        self.trainer, self.runner, self.infeed, self.known = trainer, runner, infeed, known
        self.sight, self.callbacks, self.bar = sight, callbacks, bar
        self.pending: deque[tuple[int, int, int, dict[Hashable, Emission], Any]] = deque()
        self.guarded = any(isinstance(one.tap, StopOnNonfinite) for one in sight.chosen)
        self.live = any(getattr(one.tap, "live", False) for one in sight.chosen)
        runner.keep_elements = self.guarded

    def steps(self, count: int) -> None:
        """Exactly so many steps."""
        remaining = count
        while remaining and not self.trainer._stopping:
            try:
                remaining -= self.execute(remaining)
            except DataExhausted as error:
                done = count - remaining
                found = self.infeed.position + self.infeed.remaining(
                    remaining * self.runner.elements_per_pass
                )
                raise DataExhausted(self.trainer._too_short(count, found, done)) from error

    def epoch(self, count: int | None) -> None:
        """To the end of the dataset; `count` steps if that is known."""
        if count is not None:
            self.steps(count)
            return
        while not self.trainer._stopping:
            try:
                self.execute(None)
            except DataExhausted:
                break
        if self.trainer._stopping:
            return
        per_step = self.runner.elements_per_pass
        assert self.trainer.pace is not None
        left = self.infeed.remaining(self.trainer.pace.next(None) * per_step)
        self.steps(left // per_step)
        _note_left_out(left, per_step)

    def execute(self, remaining: int | None) -> int:
        """Dispatch one execution; returns how many steps it has."""
        trainer, pace = self.trainer, self.trainer.pace
        assert pace is not None
        length, period = self.next_length(remaining, trainer.step)
        rest = None if remaining is None else remaining - length
        measuring = pace.chosen is None
        following: int | None = 0
        if not measuring and rest != 0:
            following = self.next_length(rest, trainer.step + length)[0]
        compiled_before = self.runner.compile_s
        started = time.perf_counter()
        numbers = Numbers(trainer.seed, trainer.step)
        # The counter of the loop starts at 0 in each execution; the step it belongs to is told.
        emitted, ticket = self.runner.dispatch(self.known, length, numbers, following, period)
        if measuring:
            jax.block_until_ready(ticket)
            seconds = time.perf_counter() - started - (self.runner.compile_s - compiled_before)
            pace.measured(length, seconds, rest)
            logger.info(pace.reason)
        self.pending.append((trainer.step, length, period, emitted, self.runner.taken))
        trainer.step += length
        if len(self.pending) > (0 if self.live else 1):
            self.take_in()
        return length

    def next_length(self, remaining: int | None, step: int) -> tuple[int, int]:
        """How many steps the next execution has, and the period in which it is observed."""
        assert self.trainer.pace is not None
        piece = self.trainer.pace.next(remaining)
        return next_piece(piece, remaining, step, self.sight.period)

    def finish(self) -> None:
        """Take in everything that is still on its way."""
        while self.pending:
            self.take_in()

    def take_in(self) -> None:
        """The results of the oldest execution: history, callbacks, progress."""
        first_step, steps, period, emitted, taken = self.pending.popleft()
        trainer = self.trainer
        for record in take_records(
            emitted,
            self.sight.chosen,
            first_step=first_step,
            steps=steps,
            replicas=trainer.replicas,
            period=period,
        ):
            trainer.records.add(record)
        out = trainer._scalars
        structure = self.runner.traced.outfeeds[out].structure
        scalars = jax.tree.unflatten(structure, emitted.pop(out).value)
        self.runner.traced.deliver(emitted)
        count, replicas = trainer.accumulation.microbatches, trainer.replicas
        values = {"loss": scalars["loss"], **scalars["aux"]}
        arrays = {name: split_emission(v, count, replicas) for name, v in values.items()}
        weights = scalars["weight"]
        if weights is not None:
            weights = split_emission(weights, count, replicas).astype(np.float64)
        bad = first_bad_step(emitted, replicas) if self.guarded else None
        if bad is not None:
            arrays = {name: values[: bad[0]] for name, values in arrays.items()}
            weights = weights[: bad[0]] if weights is not None else None
        trainer.history.add(arrays, weights)
        if bad is not None:
            # What was dispatched after the bad step changed nothing: the guard stays down until here.
            trainer.step = first_step + bad[0]
            self.known.pop(STOPPED)
            self.pending.clear()
            raise diagnose(
                self.runner,
                self.known,
                taken[self.infeed],
                bad,
                first_step=first_step,
                seed=trainer.seed,
                microbatches=count,
            )
        if self.callbacks:
            one = History(first_step, count, replicas)
            one.add(arrays, weights)
            tell(self.callbacks, trainer, Execution(first_step, steps, {n: one[n] for n in one}))
        self.bar.advance(steps, float(np.mean(arrays["loss"][-1])))


def _note_left_out(elements: int, per_step: int) -> None:
    if left := elements % per_step:
        note_once(
            f"The last {left} elements of the dataset do not fill a step of {per_step} and are "
            f"left out.",
            key="incomplete step",
        )


def _check_optimizer(optimizer: Any) -> None:
    if not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        raise OptionError(
            f"optimizer is an optax transformation, with init and update. Received: {optimizer!r}. "
            f"For example optax.sgd(0.01)."
        )


def _check_accumulates_once(optimizer: Any, params: Any) -> None:
    """Accumulation belongs to the trainer; an optimizer that accumulates too would do it twice."""
    state = jax.eval_shape(optimizer.init, params)
    parts = jax.tree.leaves(state, is_leaf=_accumulates)
    if isinstance(optimizer, optax.MultiSteps) or any(map(_accumulates, parts)):
        raise OptionError(
            "Gradients are accumulated once, by the trainer: its optimizer accumulates them too. "
            "Give the bare optimizer and Trainer(accumulation=...). optax.MultiSteps and "
            "tr.optimizers.gradient_accumulation are for hand-written loops."
        )


def _accumulates(state: Any) -> bool:
    return isinstance(state, AccumulationState | optax.MultiStepsState)


def _merged(value: Any, form: Any) -> Any:
    """One value of those of all replicas: their mean, or the first where there is no mean."""
    if value.ndim == len(form.shape):
        return value
    return value.mean(axis=0) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0]


def _check_params(params: Any) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise ProgramError(f"There are no parameters to train. Received: params={params!r}.")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ProgramError(
                f"Parameters are floats, so that they have a gradient. Received: "
                f"{path_name(path) or 'params'!r} of {leaf.dtype}{list(leaf.shape)}. Keep integers "
                f"in model_state, or close over them."
            )


def _check_duration(steps: int | None, epochs: int | None) -> None:
    if steps is not None and epochs is not None:
        raise OptionError(
            f"fit takes steps= or epochs=, not both. Received: steps={steps}, epochs={epochs}."
        )
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise OptionError(f"{name} is a number of at least 0. Received: {name}={value!r}.")
