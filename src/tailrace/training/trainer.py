"""`tr.Trainer`: training with optax, many steps to a dispatch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.data.adapters import as_dataset
from tailrace.devices.processes import distributed
from tailrace.errors import DataError, OptionError, ProgramError, TailraceError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.running.report import PipelineReport
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.loss_scale import LossScale
from tailrace.program.step.training_step import TrainState
from tailrace.records.history import History
from tailrace.records.records import Records
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import MOST_BYTES
from tailrace.training.callbacks import Callback
from tailrace.training.checks import check_callbacks, check_duration
from tailrace.training.description import describe
from tailrace.training.engine import Engine
from tailrace.training.evaluate import Evaluator
from tailrace.training.explain import Explanation, explain, flops_of_update
from tailrace.training.fit import Fit
from tailrace.training.journal import Journal
from tailrace.training.pace import Pace, pace_for, parse_steps
from tailrace.training.progress import ProgressBar
from tailrace.training.step_counts import agreed_total_steps


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
        loss_scale: what the loss is multiplied by, so that small gradients survive float16: a number,
            "dynamic", or a `tr.LossScale`. A step whose gradients are not finite is then skipped.
        precision: the dtype in which the loss function computes, "bfloat16" or "float16": it gets its
            parameters and the floats of its batch so. Parameters, gradients and optimizer stay.
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
        loss_scale: LossScale | float | str | None = None,
        precision: Any = None,
        run_dir: Any = None,
    ) -> None:
        self.engine = Engine(
            loss_fn,
            optimizer,
            params,
            accumulation=accumulation,
            replicas=replicas,
            model_state=model_state,
            replica_state=replica_state,
            offload_optimizer_state=offload_optimizer_state,
            shard_optimizer_state=shard_optimizer_state,
            offload_activations=offload_activations,
            seed=seed,
            observe=observe,
            loss_scale=loss_scale,
            precision=precision,
        )
        self._steps_per_execution = parse_steps(steps_per_execution)
        self._observe_bytes = observe_bytes
        self._journal = Journal(run_dir)
        self._evaluator = Evaluator(self.engine.step_function, self.engine.placement, seed)
        self._pace: Pace | None = None
        self._fit: Fit | None = None
        self._seconds_per_step: float | None = None

    # -- what there is --------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state and model state: copies, which training leaves alone."""
        return self.engine.copied(self.engine.state)

    @property
    def params(self) -> Any:
        """The parameters as they are now: a copy."""
        params = self.engine.copied(self.engine.state.params)
        return params if self.pipeline is None else self.pipeline.tie(params)

    @property
    def model_state(self) -> Any:
        """The model state as it is now: a copy."""
        return self.engine.copied(self.engine.state.model_state)

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next step is multiplied by; None if it is not scaled."""
        return self.engine.loss_scale

    @property
    def step(self) -> int:
        """How many steps were trained so far."""
        return self.engine.step

    @property
    def seed(self) -> int:
        """Where the keys of `tr.key()` come from."""
        return self.engine.seed

    @property
    def history(self) -> History:
        """The course of the latest fit."""
        return self._journal.history

    @property
    def records(self) -> Records:
        """What the taps of the latest fit delivered."""
        return self._journal.records

    @property
    def accumulation(self) -> Accumulation:
        """How many microbatches make a step, and how."""
        return self.engine.accumulation

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, if there is one."""
        return self.engine.pipeline

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline, once the form of its elements is known; None without one."""
        return self.engine.plan

    @property
    def replicas(self) -> int:
        """How many copies train side by side."""
        return self.engine.placement.replicas

    @property
    def executions(self) -> int:
        """How many dispatches training has made so far."""
        return self.engine.executions

    @property
    def elements_per_step(self) -> int:
        """How many elements of the dataset one step takes: microbatches x replicas.

        With several processes each has a dataset of its own, and counts its own replicas.
        """
        return self.engine.elements_per_step

    @property
    def decisions(self) -> tuple[str, ...]:
        """What was decided, in sentences: about memory, and the length of executions."""
        pace = self._pace if self._steps_per_execution is None else None
        lengths = (pace.reason,) if pace is not None else ()
        return (*self.engine.memory.decisions, *lengths)

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Other values for the `inputs` of a pipeline; nothing is compiled again."""
        self.engine.set_inputs(inputs)

    def tensors(self, example: Any = None) -> Catalogue:
        """Every tensor of the step by name, as `observe=` selects them.

        Args:
            example: one element of the dataset; not needed after a fit.
        """
        return self.engine.tensors(example)

    def stop(self) -> None:
        """End the current fit after the execution that runs now."""
        if self._fit is not None:
            self._fit.stopping = True

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
        total = agreed_total_steps(self.engine, source.length, steps, epochs)
        with self._fitting(dataset, total, callbacks, progress) as fit:
            if steps is not None:
                fit.steps(steps)
            else:
                self._epochs(fit, dataset, 1 if epochs is None else epochs, total)
        return self.history

    @contextmanager
    def _fitting(
        self, dataset: Any, total: int | None, callbacks: list[Callback], progress: bool | None
    ) -> Iterator[Fit]:
        """One fit, from its first execution to its last; results come in whatever ends it."""
        engine, journal = self.engine, self._journal
        feed = engine.use(dataset)
        assert isinstance(feed, InfeedQueue)
        self._pace = pace_for(engine, self._steps_per_execution, self._observe_bytes, self._pace)
        engine.runner.capacity = self._pace.capacity(engine.runner.capacity, total)
        journal.begin(engine.step, self.accumulation.microbatches, self.replicas)
        for callback in callbacks:
            callback.on_fit_begin(self)
        shown = progress if distributed.writes() else False
        bar = ProgressBar(total, self.effective_batch_size(feed.spec()), shown)
        started, compiled, first_step = time.perf_counter(), engine.runner.compile_s, self.step
        info = describe(engine, self._steps_per_execution)
        try:
            with engine.delivering(), journal.open(info), bar:
                fit = self._fit = Fit(self, engine, feed, journal, self._pace, callbacks, bar)
                try:
                    yield fit
                except BaseException as error:
                    if not isinstance(error, TailraceError):
                        fit.callbacks = []  # it may come from one of them, or be an interrupt
                    fit.collect()  # what was computed before the failure is part of the history
                    raise
                fit.collect()
            if self.step > first_step:
                took = time.perf_counter() - started - (engine.runner.compile_s - compiled)
                self._seconds_per_step = took / (self.step - first_step)
        finally:
            self._fit = None
            engine.let_go(dataset, feed)
            for callback in callbacks:
                callback.on_fit_end(self, self.history)

    def _epochs(self, fit: Fit, dataset: Any, epochs: int, total: int | None) -> None:
        """Go through the dataset again and again."""
        source = as_dataset(dataset)
        if epochs > 1 and not source.restartable:
            raise DataError(
                f"fit(epochs={epochs}) goes through the dataset again and again, but {source.name} "
                f"can be read once only. Give a re-iterable, a function that makes an iterator, or "
                f"use fit(steps=...)."
            )
        for epoch in range(epochs):
            if fit.stopping:
                break
            if epoch:
                fit.feed.restart(dataset, epoch)
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
        return self._evaluator.evaluate(dataset, fn, self.engine.read())

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
        read = self.engine.read()
        if fn is None and isinstance(self.engine.step_function, PipelineStep):
            fn = self.engine.step_function.outputs
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
        engine = self.engine
        feed = engine.use([example])
        state = engine.state
        explanation = explain(
            engine.runner,
            engine.loop_state,
            length,
            parts={
                "parameters": state.params,
                "optimizer state": state.optimizer_state,
                "model state": state.model_state,
            },
            keeping=engine.memory.keeping,
            decisions=engine.memory.all_decisions,
            effective_batch_size=self.effective_batch_size(feed.spec()),
            microbatches=self.accumulation.microbatches,
            flops_of_update=flops_of_update(engine),
        )
        if isinstance(engine.runner, PipelineRunner):
            stages = pipeline_report(engine.runner.assembly, timed=False)
            whole = ("parameters", "optimizer state", "model state")
            rest = {name: n for name, n in explanation.parts.items() if name not in whole}
            parts = {"parameters and state of stages": max(stages.held), **rest}
            explanation = dataclasses.replace(explanation, parts=parts, pipeline=stages)
        return explanation

    def report(self) -> PipelineReport:
        """What each stage of a pipeline costs, how long it waits, and what would help.

        Stages are run alone for a moment to take their times.
        """
        runner = self.engine.runner if self.engine.executions else None
        if not isinstance(runner, PipelineRunner):
            raise ProgramError(
                "report tells what the stages of a pipeline cost, after a fit. Received: "
                + (
                    "no fit yet. Call trainer.fit first, or trainer.explain(example)."
                    if self.pipeline is not None
                    else "a trainer without a pipeline. Use trainer.explain(example)."
                )
            )
        return pipeline_report(runner.assembly, measured=self._seconds_per_step)
