"""`tr.Trainer`: training with optax, many steps to a dispatch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.data.adapters import as_dataset
from tailrace.devices.devices import resolve_replicas
from tailrace.devices.processes import distributed
from tailrace.errors import DataError, OptionError, ProgramError, TailraceError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_engine import PipelineRunner, place_pipeline
from tailrace.pipeline.running.report import PipelineReport
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.program.memory.activation_offload import activations_on_host
from tailrace.program.memory.first_state import FirstState
from tailrace.program.memory.host_memory import check_activations
from tailrace.program.memory.optimizer_state import StateKeeping, check_options, decide
from tailrace.program.running.dispatch_lengths import LIVE_S
from tailrace.program.running.engine import LoopRunner
from tailrace.program.running.executable import Placement
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.training_step import Step, TrainState
from tailrace.program.tracing.tap_selection import Sight
from tailrace.records.history import History
from tailrace.records.records import Records
from tailrace.records.sinks import Sink
from tailrace.runs.writer import RunWriter
from tailrace.taps.tap import MOST_BYTES, bytes_per_step, check_bytes, parse_taps
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
from tailrace.training.description import describe
from tailrace.training.evaluate import Evaluator
from tailrace.training.explain import Explanation, explain
from tailrace.training.fit import Fit
from tailrace.training.pace import TARGET_S, Pace, parse_steps
from tailrace.training.programs import Programs, on_host
from tailrace.training.progress import ProgressBar
from tailrace.training.step_counts import agreed_total_steps


class Trainer(Programs):
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
        offload_activations: cut the forward pass into parts, keep what crosses the cuts in the host's
            memory until the backward pass, and compute the rest again, part by part. Of a pipeline,
            what its forwards keep for its backwards lies there.
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
        offload_activations: bool = False,
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
            check_pipeline(accumulation)
            accumulation, params = pipeline.accumulation, pipeline.untie(params)
        check_params(params)
        check_arrays("model_state", model_state)
        check_accumulates_once(optimizer, params)
        check_options(shard_optimizer_state, offload_optimizer_state)
        check_activations(offload_activations)
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
        self.sink: Sink | None = RunWriter(run_dir) if keeps else None
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
        first = FirstState(optimizer.init, params)
        self._form = jax.eval_shape(lambda: TrainState(params, (), model_state))
        self._form = self._form._replace(optimizer_state=first.forms)
        self.decisions: tuple[str, ...] = ()
        self._keeping: StateKeeping | None = None
        if shard_optimizer_state or offload_optimizer_state is not False:
            self._keeping, self.decisions = decide(
                self._form.optimizer_state,
                self.placement,
                self.taps,
                share=shard_optimizer_state,
                offload_state=offload_optimizer_state,
                microbatches=self.accumulation.microbatches,
                pipelined=pipeline is not None,
            )
        if offload_activations:
            hold, told = activations_on_host(
                self.placement.device, pipeline is not None, self.placement.local_replicas
            )
            self.decisions += told
            self._step = dataclasses.replace(self._step, hold_activations=hold)
        # Of a pipeline on the host, until it is known which device holds what.
        place = self.placement.own if pipeline is None else on_host
        if self._keeping is None:
            made = jax.tree.unflatten(
                jax.tree.structure(first.forms), [place(leaf) for leaf in first.leaves()]
            )
        else:
            made = self._keeping.hold(first.leaves(), self.placement)
            self._form = self._form._replace(optimizer_state=self._keeping.held_forms)
            self._step = dataclasses.replace(self._step, keeping=self._keeping)
        placed = jax.tree.map(place, (params, model_state))
        self._state: TrainState | None = TrainState(placed[0], made, placed[1])
        self._runners: dict[ElementSpec, LoopRunner] = {}
        self._sights: dict[ElementSpec, Sight] = {}
        self._active: tuple[LoopRunner, dict[Any, Any]] | None = None
        self._evaluator = Evaluator(self._step, self.placement, seed)
        self.stopping = False
        self._left: tuple[Any, InfeedQueue] | None = None
        self.pace: Pace | None = None
        self._seconds_per_step: float | None = None

    # -- training -------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Any,
        steps: int | None = None,
        epochs: int | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        inputs: Sequence[Any] | None = None,
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
            inputs: other values for the `inputs` of a pipeline, from now on.

        Returns:
            The history of this fit, also kept as `trainer.history`.
        """
        check_duration(steps, epochs)
        if inputs is not None:
            self.set_inputs(inputs)
        callbacks = check_callbacks(callbacks)
        source = as_dataset(dataset)
        if steps is None and source.endless:
            raise DataError(
                f"fit by epochs goes on until the dataset ends, but {source.name} repeats without "
                f"end. Use fit(steps=...), or a dataset that does not repeat."
            )
        total = agreed_total_steps(self, source.length, steps, epochs)
        with self.fitting(
            dataset, total=total, callbacks=callbacks, progress=progress, counted=True
        ) as fit:
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
        counted: bool = False,
    ) -> Iterator[Fit]:
        """A fit whose executions the caller dispatches, one by one: `fit.run(length)`.

        For front ends with a training loop of their own. History and records cover everything run
        inside; results of an execution arrive with `fit.take_in()`, or when the block ends. With
        `go_on` they are added to those of the fit before. The dataset may be an infeed of its own.
        With `counted`, executions of every length share one executable.
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
        if counted:
            runner.capacity = self._capacity(runner.capacity, total)
        for callback in callbacks:
            callback.on_fit_begin(self)
        for queue, out in runner.traced.outfeeds.items():
            queue.check_fits(out.structure, out.shapes)
        for place in (self.records.runs, *runner.traced.outfeeds):
            place.begin()
        keeping = self.sink.fitting(describe(self, sight)) if self.sink else nullcontext()
        shown = progress if distributed.writes() else False
        bar = ProgressBar(total, self.effective_batch_size(infeed.spec()), shown)
        started, compiled, first_step = time.perf_counter(), runner.compile_s, self.step
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
            if self.step > first_step:
                took = time.perf_counter() - started - (runner.compile_s - compiled)
                self._seconds_per_step = took / (self.step - first_step)
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

    def predict(
        self, dataset: Any, fn: Callable[..., Any] | None = None, live: bool = False
    ) -> Any:
        """What `fn` returns for each element of a dataset, in order.

        Args:
            dataset: what to predict for; all of it is read.
            fn: `fn(params, *batch)`, or `fn(params, model_state, *batch)`; returns a tree of arrays.
                None, with a pipeline given as a list: what its last stage returns.
            live: return an iterator that yields the result of each element while the rest is still
                being computed, instead of all results at the end.

        Returns:
            A tree of arrays. Results whose leading dim is that of the element's arrays are
            concatenated along it, all others are stacked.
        """
        read = self._read()
        if fn is None and isinstance(self._step, PipelineStep):
            fn = self._step.outputs
        if not callable(fn):
            raise OptionError(
                f"predict needs a function of parameters and batch. Received: {fn!r}. Give it "
                f"as predict(dataset, fn)."
            )
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
        explanation = explain(
            runner,
            known,
            length,
            parts={
                "parameters": state.params,
                "optimizer state": state.optimizer_state,
                "model state": state.model_state,
            },
            keeping=self._keeping,
            decisions=(*self.decisions, *getattr(self._step.hold_activations, "said", ())),
            effective_batch_size=self.effective_batch_size(infeed.spec()),
            microbatches=self.accumulation.microbatches,
            flops_of_update=self._flops_of_update(state),
        )
        if isinstance(runner, PipelineRunner):
            stages = pipeline_report(runner.assembly, timed=False)
            whole = ("parameters", "optimizer state", "model state")
            rest = {name: n for name, n in explanation.parts.items() if name not in whole}
            parts = {"parameters and state of stages": max(stages.held), **rest}
            explanation = dataclasses.replace(explanation, parts=parts, pipeline=stages)
        return explanation

    def report(self) -> PipelineReport:
        """What each stage of a pipeline costs, how long it waits, and what would help.

        Stages are run alone for a moment to take their times.
        """
        if self._active is None or not isinstance(self._active[0], PipelineRunner):
            raise ProgramError(
                "report tells what the stages of a pipeline cost, after a fit. Received: "
                + (
                    "no fit yet. Call trainer.fit first, or trainer.explain(example)."
                    if self.pipeline is not None
                    else "a trainer without a pipeline. Use trainer.explain(example)."
                )
            )
        return pipeline_report(self._active[0].assembly, measured=self._seconds_per_step)

    # -- inside ---------------------------------------------------------------------------------

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
                most_steps=most,
                target_s=LIVE_S if live else TARGET_S,
                times_given=self.placement.device.platform != "cpu",
            )

    def _capacity(self, before: int | None, total: int | None) -> int:
        """The most steps of an execution: what is compiled has room for so many, and no more.

        It is the same for fits of every length, or each would be compiled for itself. It grows only
        where an execution as long as was asked for would not fit.
        """
        assert self.pace is not None
        asked = self._steps_per_execution
        if asked is None:
            return self.pace.most
        needed = asked if total is None else min(asked, max(total, self.pace.most))
        return max(before or 0, needed)

    def too_short(self, steps: int, length: int | str, done: int) -> str:
        """What to say when a dataset ends before `steps` are done."""
        count, replicas = self.accumulation.microbatches, self.placement.local_replicas
        return (
            f"fit takes steps x microbatches x replicas elements, {steps} x {count} x {replicas} = "
            f"{steps * count * replicas}, and never restarts a dataset for steps=. This one has "
            f"{length}; {done} steps were done. Ask for fewer steps, repeat the dataset, or use "
            f"fit(epochs=...)."
        )
