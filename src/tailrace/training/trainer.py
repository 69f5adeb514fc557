"""`tr.Trainer`: training with optax, many steps to a dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace import distributed
from tailrace.data.adapters import as_dataset
from tailrace.devices import resolve_replicas
from tailrace.errors import DataError, DataExhausted, OptionError, ProgramError, TailraceError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.marks import path_name
from tailrace.notes import logger, note_once
from tailrace.observe.records import Records
from tailrace.observe.sinks import directory_sink
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.runner import place_pipeline
from tailrace.pipeline.step import PipelineStep
from tailrace.program.accumulation import Accumulation
from tailrace.program.executable import Placement
from tailrace.program.explain import Explanation, explain, flops_of
from tailrace.program.keeping import StateKeeping, check_options, keep_state
from tailrace.program.pieces import LIVE_S
from tailrace.program.runner import LoopRunner
from tailrace.program.sight import Sight, look
from tailrace.program.step import Step, TrainState
from tailrace.program.traced import trace_program
from tailrace.tensors.catalogue import Catalogue, Entry
from tailrace.tensors.taps import (
    MOST_BYTES,
    Tap,
    bytes_per_step,
    check_bytes,
    parse_taps,
)
from tailrace.training.callbacks import Callback
from tailrace.training.checks import (
    check_accumulates_once,
    check_arrays,
    check_callbacks,
    check_duration,
    check_optimizer,
    check_params,
    check_pipeline,
)
from tailrace.training.describing import describe
from tailrace.training.evaluation import Evaluator
from tailrace.training.fitting import Fit, note_left_out
from tailrace.training.history import History
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
        offload_optimizer_state: keep the optimizer's state in the host's memory while gradients are
            computed. None: with accumulation. Where the device has no such memory the state stays;
            `trainer.decisions` says what was decided.
        shard_optimizer_state: let each replica keep, and update, one share of the optimizer's state.
        model_state: state that the model updates itself, such as that of BatchNorm. It advances
            with each microbatch.
        replica_state: what becomes of the model state over replicas: "mean" averages its floats
            once a step; with "each" every replica keeps its own, and `trainer.model_state` has the
            replicas as dim 0 (`evaluate` and `predict` then use their mean). A function of a leaf's
            name chooses leaf by leaf.
        seed: where the keys of `tr.key()` come from.
        observe: taps (`tr.Tap`), or selections whose statistics are wanted. Their records are in
            `trainer.records`.
        observe_bytes: the most that the records of one execution may take on the device.
        run_dir: a new directory that keeps what ran, history and records while training goes on;
            `tr.open_run` reads it. `trainer.records` are then read from there.

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
        offload_optimizer_state: bool | None = False,
        shard_optimizer_state: bool = False,
        model_state: Any = None,
        replica_state: str | Callable[[str], str] = "mean",
        seed: int = 0,
        observe: Any = (),
        observe_bytes: int = MOST_BYTES,
        run_dir: Any = None,
    ) -> None:
        pipeline = loss_fn if isinstance(loss_fn, Pipeline) else None
        if not callable(loss_fn):
            raise OptionError(
                f"loss_fn is a function of parameters and batch. Received: {loss_fn!r}."
            )
        check_optimizer(optimizer)
        if pipeline is not None:
            check_pipeline(accumulation, shard_optimizer_state, offload_optimizer_state)
            accumulation, params = pipeline.accumulation, pipeline.untie(params)
        check_params(params)
        check_arrays("model_state", model_state)
        check_accumulates_once(optimizer, params)
        check_options(shard_optimizer_state, offload_optimizer_state)
        if not callable(replica_state) and replica_state not in ("mean", "each"):
            raise OptionError(
                f"replica_state is 'mean' or 'each'. Received: replica_state={replica_state!r}."
            )
        self.accumulation = Accumulation.of(accumulation)
        self.pipeline = pipeline
        self.placement = (
            Placement(resolve_replicas(replicas))
            if pipeline is None
            else place_pipeline(pipeline, replicas)
        )
        self.seed = seed
        self.history = History()
        self.step = 0
        self._steps_per_execution = parse_steps(steps_per_execution)
        self.scalars = OutfeedQueue()
        self.taps = parse_taps(observe)
        keeps = run_dir is not None and distributed.writes()
        self.sink = directory_sink(run_dir) if keeps else None
        self.records = Records(None if self.sink is None else self.sink.stored)
        self._observe_bytes = observe_bytes
        kind = Step if pipeline is None else PipelineStep
        self._step = kind(
            loss_fn,
            optimizer,
            self.accumulation,
            model_state is not None,
            self.scalars,
            (lambda name: replica_state(name) == "mean")
            if callable(replica_state)
            else replica_state == "mean",
            tuple(self.taps),
            [] if self.taps else None,
        )
        params = jax.tree.map(jnp.asarray, params)
        model_state = jax.tree.map(jnp.asarray, model_state)
        state = TrainState(params, optimizer.init(params), model_state)
        self._form = jax.eval_shape(lambda: state)
        self.decisions: tuple[str, ...] = ()
        self._keeping = self._keep(shard_optimizer_state, offload_optimizer_state)
        if pipeline is not None:  # on the host, until it is known which device holds what
            self._state: TrainState | None = jax.tree.map(np.asarray, state)
        elif self._keeping is None:
            self._state = jax.tree.map(self.placement.own, state)
        else:
            held = self._keeping.hold(state.optimizer_state, self.placement)
            state = jax.tree.map(self.placement.own, state._replace(optimizer_state=()))
            self._state = state._replace(optimizer_state=held)
            self._form = self._form._replace(optimizer_state=self._keeping.held_forms)
            self._step = dataclasses.replace(self._step, keeping=self._keeping)
        self._runners: dict[ElementSpec, LoopRunner] = {}
        self._sights: dict[ElementSpec, Sight] = {}
        self._active: tuple[LoopRunner, dict[Any, Any]] | None = None
        self._evaluator = Evaluator(self._step, self.placement, seed)
        self.stopping = False
        self._left: tuple[Any, InfeedQueue] | None = None
        self.pace: Pace | None = None

    # -- what there is --------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and model state: copies, which training leaves alone."""
        return self._copied(self.current())

    @property
    def params(self) -> Any:
        """The parameters as they are now: a copy."""
        params = self._copied(self._current().params)
        return params if self.pipeline is None else self.pipeline.tie(params)

    @property
    def model_state(self) -> Any:
        """The model state as it is now: a copy."""
        return self._copied(self._current().model_state)

    def current(self) -> TrainState:
        """The state as it lies on the devices, not copied: the next execution overwrites it."""
        state = self._current()
        if self._keeping is None:
            return state
        return state._replace(optimizer_state=self._keeping.whole(state.optimizer_state, self.placement))

    def replace(self, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the state, by their number in its tree; values are copied."""
        if self._keeping is not None:
            first = len(jax.tree.leaves(self._form.params))
            leaves = self._keeping.hold_some(leaves, first, self.placement)
        if self._active is not None:
            runner, known = self._active
            runner.replace(known, leaves)
            return
        now, structure = jax.tree.flatten(self._state)
        self._state = jax.tree.unflatten(
            structure, [leaves.get(number, value) for number, value in enumerate(now)]
        )

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
        """How many elements of the dataset one step takes: microbatches x replicas.

        With several processes each has a dataset of its own, and counts its own replicas.
        """
        return self.accumulation.microbatches * self.placement.local_replicas

    def stop(self) -> None:
        """End the current fit after the execution that runs now."""
        self.stopping = True

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
        check_duration(steps, epochs)
        callbacks = check_callbacks(callbacks)
        source = as_dataset(dataset)
        if steps is None and source.endless:
            raise DataError(
                f"fit by epochs goes on until the dataset ends, but {source.name} repeats without "
                f"end. Use fit(steps=...), or a dataset that does not repeat."
            )
        total = self._agreed_total(source.length, steps, epochs)
        with self.fitting(dataset, total=total, callbacks=callbacks, progress=progress) as fit:
            self._train(fit, dataset, steps, 1 if epochs is None else epochs, total)
        return self.history

    @contextmanager
    def fitting(
        self,
        dataset: Any,
        *,
        total: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = False,
        go_on: bool = False,
    ) -> Iterator[Fit]:
        """A fit whose executions the caller dispatches, one by one: `fit.run(length)`.

        For front ends with a training loop of their own. History and records cover everything run
        inside; results of an execution arrive with `fit.take_in()`, or when the block ends. With
        `go_on` they are added to those of the fit before. The dataset may be an infeed of its own.
        """
        callbacks = list(callbacks)
        runner, infeed = self._runner_for(dataset)
        known = self._activate(runner)
        self.stopping = False
        sight = self._sights[infeed.spec()]
        if not go_on:
            self.history = History(self.step, self.accumulation.microbatches, self.replicas)
            self.records.clear()
        self._set_pace(runner, sight)
        for callback in callbacks:
            callback.on_fit_begin(self)
        for queue, out in runner.traced.outfeeds.items():
            queue.check_fits(out.structure, out.shapes)
        for place in (self.records.runs, *runner.traced.outfeeds):
            place.begin()
        keeping = self.sink.fitting(describe(self, sight)) if self.sink else nullcontext()
        shown = progress if distributed.writes() else False
        bar = ProgressBar(total, self.effective_batch_size(infeed.spec()), shown)
        try:
            with keeping, bar:
                fit = Fit(self, runner, infeed, known, sight, callbacks, bar)
                try:
                    yield fit
                except BaseException as error:
                    if not isinstance(error, TailraceError):
                        fit.callbacks = []  # it may come from one of them, or be an interrupt
                    fit.finish()  # what was computed before the failure is part of the history
                    raise
                fit.finish()
        finally:
            infeed.rest()
            one_shot = infeed is not dataset and not as_dataset(dataset).restartable
            self._left = (dataset, infeed) if one_shot else None
            for place in (self.records.runs, *runner.traced.outfeeds):
                place.end()
            for callback in callbacks:
                callback.on_fit_end(self, self.history)

    def _train(
        self, fit: Fit, dataset: Any, steps: int | None, epochs: int, total: int | None
    ) -> None:
        """So many steps, or so many times through the dataset."""
        if steps is not None:
            fit.steps(steps)
            return
        source = as_dataset(dataset)
        if epochs > 1 and not source.restartable:
            raise DataError(
                f"fit(epochs={epochs}) goes through the dataset again and again, but {source.name} "
                f"can be read once only. Give a re-iterable, a function that makes an iterator, or "
                f"use fit(steps=...)."
            )
        for epoch in range(epochs):
            if self.stopping:
                break
            if epoch:
                fit.infeed.restart(dataset, epoch)
            fit.epoch(total // epochs if total is not None else None)

    def effective_batch_size(self, spec: ElementSpec) -> int | None:
        """Examples in a step: microbatch size x microbatches x replicas."""
        sizes = {leaf.shape[0] for leaf in spec.leaves if leaf.shape}
        microbatches = self.accumulation.microbatches
        return min(sizes) * microbatches * self.replicas if len(sizes) == 1 else None

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
            keeping=self._keeping,
            decisions=self.decisions,
            effective_batch_size=self.effective_batch_size(infeed.spec()),
            microbatches=self.accumulation.microbatches,
            flops_of_update=self._flops_of_update(state),
        )

    # -- inside ---------------------------------------------------------------------------------

    def _keep(self, share: bool, offload: bool | None) -> StateKeeping | None:
        """How the optimizer's state is held; None for plainly."""
        if not share and offload is False:
            return None
        keeping = keep_state(
            self._form.optimizer_state,
            self.placement,
            self.taps,
            share=share,
            offload_state=offload,
            microbatches=self.accumulation.microbatches,
        )
        self.decisions = keeping.decisions
        for sentence in keeping.decisions:
            # What was asked for and is not done is worth a warning; what is done, a line.
            (note_once if keeping.changes_nothing and offload is not None else logger.info)(sentence)
        return None if keeping.changes_nothing else keeping

    def _flops_of_update(self, state: TrainState) -> float:
        optimizer = self._step.optimizer
        update = jax.jit(getattr(optimizer, "apply", None) or optimizer.update)
        held = self._keeping.forms if self._keeping else state.optimizer_state
        try:
            return flops_of(update.lower(state.params, held, state.params))
        except TailraceError:  # it means something inside a program only: small beside the rest
            return 0.0

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
        if self._step.share_state is not True and self._active is not None and self.replicas > 1:
            forms = self._form.model_state
            model_state = jax.tree.map(_merged, model_state, forms)
        return state.params, model_state

    def _runner_for(self, dataset: Any) -> tuple[LoopRunner, InfeedQueue]:
        """The program for elements of the dataset's form, and its infeed set to that dataset."""
        fresh = dataset if isinstance(dataset, InfeedQueue) else InfeedQueue(dataset)
        fresh.bind_replicas(self.placement.local_replicas)
        if self._left is not None and self._left[0] is dataset:
            fresh.adopt(self._left[1])  # a one-shot iterator: what was read ahead comes first
        spec = fresh.spec()
        if spec in self._runners:
            runner = self._runners[spec]
            infeed = runner.infeeds[0]
            if infeed is not fresh:
                infeed.adopt(fresh)
            return runner, infeed
        each = [
            path[0].name == "model_state" and not self._step.shares(path_name(path[1:]))
            for path, _ in jax.tree_util.tree_flatten_with_path(self._form)[0]
        ]
        first = len(jax.tree.leaves(self._form.params))
        runner = self._step.runner(self._form, fresh, self.placement, each, first)
        self.placement = runner.placement  # of a pipeline, known once its stages are
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

    def _copied(self, tree: Any) -> Any:
        """Copies that this process can read on its own."""
        return jax.tree.map(lambda x: jnp.copy(self.placement.readable(x)), tree)

    def _agreed_total(
        self, length: int | None, steps: int | None, epochs: int | None
    ) -> int | None:
        """The number of steps of a fit; of several processes the shortest dataset decides."""
        if self.placement.in_one_process:
            return self._total_steps(length, steps, epochs)
        try:
            total = self._total_steps(length, steps, epochs)
        except DataExhausted as error:
            distributed.meet({"failed": str(error)})
            raise
        heard = distributed.meet({"total": total})
        for process, said in enumerate(heard):
            if "failed" in said:
                raise DataExhausted(f"Of process {process}: {said['failed']}")
        known = [said["total"] for said in heard if said["total"] is not None]
        return min(known) if len(known) == len(heard) else None

    def _total_steps(self, length: int | None, steps: int | None, epochs: int | None) -> int | None:
        if not length:  # unknown; or none at all, which reading the first element reports
            return steps
        per_epoch = length // self.elements_per_step
        if steps is not None:
            if steps > per_epoch:
                raise DataExhausted(self.too_short(steps, length, 0))
            return steps
        if not per_epoch:
            raise DataExhausted(self.too_short(1, length, 0))
        note_left_out(length, self.elements_per_step)
        return per_epoch * (1 if epochs is None else epochs)

    def too_short(self, steps: int, length: int | str, done: int) -> str:
        """What to say when a dataset ends before `steps` are done."""
        count, replicas = self.accumulation.microbatches, self.placement.local_replicas
        return (
            f"fit takes steps x microbatches x replicas elements, {steps} x {count} x {replicas} = "
            f"{steps * count * replicas}, and never restarts a dataset for steps=. This one has "
            f"{length}; {done} steps were done. Ask for fewer steps, repeat the dataset, or use "
            f"fit(epochs=...)."
        )


def _merged(value: Any, form: Any) -> Any:
    """One value of those of all replicas: their mean, or the first where there is no mean."""
    if value.ndim == len(form.shape):
        return value
    return value.mean(axis=0) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0]
