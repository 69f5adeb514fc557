"""`tr.Trainer`: training with optax, many steps per dispatch.

The user's view of a training: each method checks its arguments and calls the file that does the work.
Long, and one thing: half of it are the arguments and their descriptions.
Methods that measure are in `costs.measuring`, those that run past steps again in `lookback.methods`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import check_count, check_flag
from tailrace.base.trees import Tree
from tailrace.data.adapters import as_dataset
from tailrace.data.no_data import or_no_data
from tailrace.devices.devices import Device
from tailrace.devices.processes import distributed
from tailrace.devices.shard_rules import Shard
from tailrace.devices.shardings import without_mesh
from tailrace.errors import OptionError, ProgramError
from tailrace.feeds.waiting import Patience
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.schedule.plan import Plan
from tailrace.profiling.timeline.trace import Trace, as_trace
from tailrace.program.compiling.build import Build, Option
from tailrace.program.compiling.compilations import Compilation
from tailrace.program.step.accumulation import Accumulation
from tailrace.program.step.averaging import average_in, averaging
from tailrace.program.step.loss_scale import LossScale
from tailrace.program.step.update_rule import Optimizer
from tailrace.records.history import History
from tailrace.records.records import Records
from tailrace.taps.catalogue import Catalogue
from tailrace.taps.tap import MOST_BYTES, Observe, guarding, parse_taps
from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.checkpoints.whole_state import restore_state, save_state
from tailrace.trainer.checks import (
    check_callbacks,
    check_config,
    check_ema,
    check_eval_fn,
    check_fingerprint,
    check_like_params,
    check_optimizer,
    check_state,
)
from tailrace.trainer.costs.measuring import Measuring
from tailrace.trainer.engine import Engine
from tailrace.trainer.evaluation.combining import Combine
from tailrace.trainer.evaluation.evaluate import Evaluator
from tailrace.trainer.fitting.fit_call import FitCall
from tailrace.trainer.fitting.fit_progress import Duration, Progress
from tailrace.trainer.fitting.fits import Fits
from tailrace.trainer.fitting.pace import parse_steps
from tailrace.trainer.fitting.step_counts import agreed_total_steps
from tailrace.trainer.fitting.validation import Validation
from tailrace.trainer.lookback.methods import LookingBack
from tailrace.trainer.model_place import ModelPlace
from tailrace.trainer.modules.binding import Binding
from tailrace.trainer.modules.recognition import bind
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.observation.logged_values import Log, LoggedValues, parse_log, taps_of
from tailrace.trainer.own_steps import (
    REFUSED,
    bind_state,
    check_evaluates,
    check_has_params,
    engine_of_step,
)
from tailrace.trainer.showing.look import trainer_html, trainer_text
from tailrace.trainer.suggestions import suggesting


class Trainer(Measuring, LookingBack):
    """Trains parameters with an optax optimizer, on the device, many steps per execution.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the loss or `(loss, aux)`; with `model_state`,
            `loss_fn(params, model_state, *batch)` returns `(loss, (new_state, aux))`. Scalars and small
            arrays in `aux` become part of the history.
        optimizer: an optax transformation.
        params: the initial parameters, a tree of float arrays. They are copied. Or a module: an
            `nnx.Module`, an Equinox module, or the variables of a Linen module; `loss_fn` and every
            other function is then called with the module instead of the parameters.
        steps_per_execution: the number of steps per dispatch; "auto" chooses it.
        accumulation: the number of microbatches per step, or a `tr.Accumulation`.
        replicas: the number of copies that train in parallel. None: one per device.
        offload_optimizer_state: whether to keep optimizer state in host memory while gradients are
            computed. None: with accumulation. If the device does not support it, the state stays there;
            `trainer.decisions` has the decision.
        shard_optimizer_state: whether to shard optimizer state over replicas, each of which updates its
            shard.
        offload_activations: whether to cut the forward pass into parts, keep the values that cross the
            cuts in host memory until the backward pass, and recompute the rest, part by part. A
            pipeline offloads the residuals of its forwards instead.
        model_state: state that the model updates itself, such as that of BatchNorm. It advances with
            each microbatch.
        replica_state: how model state is combined over replicas: "mean" averages its floats once per
            step; with "each" every replica keeps its state, and `trainer.model_state` has a leading
            replica dim (`evaluate` and `predict` then use the mean). A function of a leaf's name
            decides leaf by leaf.
        seed: the seed of the keys of `tr.key()`.
        observe: taps (`tr.Tap`), or selections to compute statistics of. Their records are in
            `trainer.records`.
        observe_bytes: the most bytes that the records of one execution may take on the device; 1 GiB if
            not given.
        eval_fn: a function for `evaluate` and validation instead of the loss function, called like it.
            It returns a scalar, a dict of scalars, or the result of a loss function.
        loss_scale: the factor of the loss, so that small gradients survive float16: a number,
            "dynamic", or a `tr.LossScale`. A step whose gradients are not finite is then skipped.
        precision: the dtype of the loss function's computation, "bfloat16" or "float16": its parameters
            and the floats of its batch are cast. Parameters, gradients and optimizer keep their dtypes.
        fingerprint: whether to keep 8 bytes per group of tensors at the end of each execution
            (parameters, optimizer, model state, gradients, loss, elements): in `history.fingerprints`,
            checkpoints and the run directory. `trainer.replay` verifies a step with them.
        on_nonfinite: "stop" or "skip": the action for a step whose loss or gradients are not finite;
            short for a `tr.stop_on_nonfinite` with its default limit in `observe`.
        sentinel: the fraction of executions that run twice and are compared, such as 0.01; the state is
            also compared between executions. A difference (faulty memory or a faulty processor) raises
            a `tr.errors.CorruptionError`. Implies fingerprints.
        run_dir: a new directory for the description, history and records of the training, written while
            it runs; `tr.open_run` reads it. `trainer.records` are then read from there.
        log: additional values of the history: "learning_rate", "grad_norm", "examples_per_second",
            "tokens_per_second", "mfu". A dict has their arguments:
            `{"learning_rate": schedule, "mfu": peak_flops}`, or True.
        ema: averages the parameters over the steps: the decay, such as 0.999, or an optax
            transformation that is given the parameters after each step (`optax.ema(0.999)`, which
            corrects the bias of its start; a decay starts from the initial parameters). `evaluate`,
            validation and `predict` then use the average, `trainer.ema_params`.
        config: a dict with your settings; the run directory stores it, and `tailrace show` prints it.
        rewrites: rewrites of the program to switch off, such as `{"boundaries": False}`.
        compiler_options: options of XLA's compiler for the programs of this trainer, by their names in
            `XLA_FLAGS`: `{"xla_gpu_enable_triton_gemm": False}`.
        mesh: a `jax.sharding.Mesh` over whose devices the model is sharded. None: that of parameters
            given with a `NamedSharding`, or of `jax.set_mesh`. An element of the dataset is then the
            whole microbatch, and the loss function sees whole arrays.
        shard: the shardings of parameters without one: a dict from patterns of their names to
            `PartitionSpec`s (the first that fits; others are replicated), a function of name and
            shape, or "fsdp": the largest dim of large parameters over the mesh axis of that name.
        batch_axes: the mesh axes over which batches are split. None: those named "data", "replica" or
            "fsdp"; `()` for the whole batch on every device.
        device: the device of a model that is not sharded, if it is not the first.

    Raises:
        OptionError: an option has a value it may not have.
        ProgramError: the parameters or the model state cannot be trained.
        ReplicaError: there are not enough devices for the replicas.
        RunError: `run_dir` holds a run already, or cannot be written.

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

    @suggesting("tr.Trainer")
    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        params: Tree,
        *,
        steps_per_execution: int | str = "auto",
        accumulation: Accumulation | int = 1,
        replicas: int | None = 1,
        offload_optimizer_state: bool | None = False,
        shard_optimizer_state: bool = False,
        offload_activations: bool = False,
        model_state: Tree = None,
        replica_state: str | Callable[[str], str] = "mean",
        seed: int = 0,
        observe: Observe = (),
        observe_bytes: int = MOST_BYTES,
        loss_scale: LossScale | float | str | None = None,
        precision: jax.typing.DTypeLike | None = None,
        fingerprint: bool = False,
        sentinel: float | None = None,
        on_nonfinite: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        eval_fn: Callable[..., Any] | None = None,
        log: Log = (),
        ema: Any = None,
        config: Mapping[str, Any] | None = None,
        rewrites: Mapping[str, bool] | None = None,
        compiler_options: Mapping[str, Option] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        shard: Shard = None,
        batch_axes: str | Sequence[str] | None = None,
        device: Device | None = None,
    ) -> None:
        # The engine knows trees of arrays and functions of them; whatever else was given is bound
        # to these.
        self._bound: Binding
        self._bound, loss_fn = bind(loss_fn, params, model_state)
        self.config, logged = check_config(config), parse_log(log)
        check_optimizer(optimizer)
        optimizer, ema = self._bound.optimizer(optimizer), check_ema(ema)
        self._averages = ema is not None
        place = ModelPlace.of(
            loss_fn,
            self._bound.params,
            self._bound.model_state,
            mesh=mesh,
            shard=shard,
            batch_axes=batch_axes,
            device=device,
            options={
                "replicas": replicas,
                "replica_state": replica_state,
                "shard_optimizer_state": shard_optimizer_state,
                "offload_optimizer_state": offload_optimizer_state,
                "offload_activations": offload_activations,
            },
        )
        with place.within():
            self.engine = Engine(
                loss_fn,
                averaging(optimizer, ema) if self._averages else optimizer,
                place.own(self._bound.params),
                accumulation=accumulation,
                replicas=replicas,
                model_state=place.own(self._bound.model_state),
                replica_state=replica_state,
                offload_optimizer_state=offload_optimizer_state,
                shard_optimizer_state=shard_optimizer_state,
                offload_activations=offload_activations,
                seed=seed,
                observe=[*parse_taps(guarding(observe, on_nonfinite)), *taps_of(logged)],
                loss_scale=loss_scale,
                precision=precision,
                fingerprint=check_fingerprint(fingerprint),
                sentinel=sentinel,
                sends_arrays=True,
                build=Build.of(rewrites, compiler_options),
                sharding=place.sharding,
                device=place.device,
            )
        self._surround(logged, steps_per_execution, observe_bytes, run_dir, eval_fn)

    def _surround(
        self,
        logged: dict[str, Any],
        steps_per_execution: int | str,
        observe_bytes: int,
        run_dir: str | os.PathLike[str] | None,
        eval_fn: Callable[..., Any] | None,
    ) -> None:
        """What is around the engine, whatever kind of step it runs."""
        self._journal = Journal(run_dir, logged=LoggedValues(logged, self.engine), timed=True)
        most = check_count("observe_bytes", observe_bytes, at_least=0, error=OptionError)
        self._fits = Fits(self.engine, self._journal, parse_steps(steps_per_execution), most)
        # With the step of the engine: an evaluation of the loss is the computation that is trained.
        self._evaluator = Evaluator(
            self.engine.step_function,
            self.engine.placement,
            self.engine.seed,
            # Not of `self`: its arrays would be freed by the garbage collector alone.
            partial(getattr, self.engine, "build"),
        )
        eval_fn = check_eval_fn(eval_fn)
        self._eval_fn = None if eval_fn is None else self._bound.function(eval_fn)

    @classmethod
    @suggesting("tr.Trainer.from_step", REFUSED)
    def from_step(
        cls,
        step_fn: Callable[..., Any],
        state: Tree,
        *,
        eval_fn: Callable[..., Any] | None = None,
        steps_per_execution: int | str = "auto",
        replicas: int | None = 1,
        replica_state: str | Callable[[str], str] | None = None,
        seed: int = 0,
        observe: Observe = (),
        observe_bytes: int = MOST_BYTES,
        fingerprint: bool = False,
        sentinel: float | None = None,
        on_nonfinite: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        log: Log = (),
        config: Mapping[str, Any] | None = None,
        rewrites: Mapping[str, bool] | None = None,
        compiler_options: Mapping[str, Option] | None = None,
    ) -> Trainer:
        """A trainer of a step of your own: several optimizers, an environment in the step, anything.

        Everything around a step is as for any trainer. `trainer.state` is the state, in your form.

        Args:
            step_fn: `step_fn(state, *batch)` returns `(state, metrics)`. Scalar metrics, and
                small arrays, are in the history by name; a single scalar is the loss.
            state: what steps carry: any tree of arrays and numbers, with modules of Flax NNX and
                Equinox, optax states and random keys in it. It is copied, and keeps its structure,
                shapes and dtypes.
            eval_fn: `eval_fn(state, *batch)` for `evaluate` and validation.
            replicas: as for `tr.Trainer`. The step combines what replicas computed, with
                `tr.cross_replica_mean` of its gradients; state that would drift apart is refused.
            replica_state: "each": every replica has its own state, and leaves of `trainer.state` have a
                leading replica dim; or a function of a leaf's name that returns "each" or None.
            on_nonfinite: "stop" at metrics and marked gradients (`tr.mark(grads, "grad/...")`) that are
                not finite; "skip" such steps, if gradients are marked.
            steps_per_execution: like all others, as for `tr.Trainer`.
            seed: likewise.
            observe: likewise; what is there is in `trainer.tensors(example)`.
            observe_bytes: likewise.
            fingerprint: likewise; the state's is `model_state`.
            sentinel: likewise.
            run_dir: likewise.
            log: likewise, except for "grad_norm".
            config: likewise.
            rewrites: likewise.
            compiler_options: likewise.

        Raises:
            OptionError: an option has a value it may not have, or needs the gradients of the step.
            ProgramError: the state is not a tree of arrays.
            ReplicaError: there are not enough devices for the replicas.
            RunError: `run_dir` holds a run already, or cannot be written.

        Example:
            >>> import jax, numpy as np, optax, tailrace as tr
            >>> optimizer = optax.adam(0.1)
            >>> def step(state, x):
            ...     loss, grads = jax.value_and_grad(lambda w: ((w - x) ** 2).mean())(state["w"])
            ...     updates, opt = optimizer.update(grads, state["opt"])
            ...     return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {"loss": loss}
            >>> state = {"w": np.float32(0), "opt": optimizer.init(np.float32(0))}
            >>> trainer = tr.Trainer.from_step(step, state)
            >>> history = trainer.fit([np.ones(4, np.float32)] * 50, progress=False)
            >>> round(float(trainer.state["w"]), 1), len(history.loss)
            (1.0, 50)
        """
        trainer = cls.__new__(cls)
        trainer._bound, trainer._averages = (bound := bind_state(state)), False
        trainer.config, logged = check_config(config), parse_log(log)
        with without_mesh():
            trainer.engine = engine_of_step(
                step_fn,
                bound,
                observe=observe,
                logged=logged,
                on_nonfinite=on_nonfinite,
                replicas=replicas,
                replica_state=replica_state,
                seed=seed,
                fingerprint=check_fingerprint(fingerprint),
                sentinel=sentinel,
                rewrites=rewrites,
                compiler_options=compiler_options,
            )
        trainer._surround(logged, steps_per_execution, observe_bytes, run_dir, eval_fn)
        return trainer

    # -- state ----------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Copies of parameters, optimizer state and model state; of a step of your own, its state.

        Set it to change any of them, also in a callback; structure, shapes and dtypes stay. Another
        thread than that of a running fit may not.
        """
        with self._fits.reading():
            return self._bound.shown_whole(self.engine.copied(self.engine.state))

    @state.setter
    def state(self, state: Any) -> None:
        self._fits.check_thread("a state that is set")
        with self._fits.reading():
            self.engine.state = check_state(self.engine.state, self._bound.held_whole(state))

    @property
    def params(self) -> Any:
        """A copy of the current parameters."""
        with self._fits.reading():
            params = self.engine.copied(self.engine.state.params)
        params = params if self.pipeline is None else self.pipeline.tie(params)
        return self._bound.shown_params(params)

    def gather(self) -> Any:
        """The whole parameters on the host, as NumPy arrays.

        `trainer.params` has the arrays as the devices hold them; of a sharded model, this puts their
        parts together, in the memory of the host alone.

        Example:
            >>> import numpy as np, optax, tailrace as tr
            >>> loss_fn = lambda w, x: ((x @ w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.ones((2, 2), np.float32))
            >>> trainer.gather().tolist()
            [[1.0, 1.0], [1.0, 1.0]]
        """
        with self._fits.reading():
            placement, params = self.engine.placement, self.engine.state.params
            params = jax.tree.map(lambda leaf: np.array(placement.readable(leaf)), params)
        params = params if self.pipeline is None else self.pipeline.tie(params)
        return self._bound.shown_params(params)

    @property
    def ema_params(self) -> Any:
        """A copy of the averaged parameters, which `ema=` keeps.

        Raises:
            ProgramError: there is no `ema=`.
        """
        with self._fits.reading():
            params = self.engine.copied(self._averaged())
        params = params if self.pipeline is None else self.pipeline.tie(params)
        return self._bound.shown_params(params)

    def _averaged(self) -> Any:
        if not self._averages:
            check_has_params(self.engine, "ema_params")
            raise ProgramError(
                "trainer.ema_params are averaged parameters, which tr.Trainer(..., ema=0.999) keeps. "
                "Received: a trainer without ema=. Use trainer.params."
            )
        state = self.engine.state
        return average_in(state.optimizer_state, state.params)

    def _read(self, params: Tree) -> tuple[Any, Any]:
        """Parameters and model state for an evaluation: those given, the average, or as trained."""
        read = self.engine.read()
        if params is not None:
            check_has_params(self.engine, "params=")
            given = params if self.pipeline is None else self.pipeline.untie(params)
            return self.engine.placed(check_like_params(self.engine.form.params, given)), read[1]
        return (self._averaged(), read[1]) if self._averages else read

    @property
    def model_state(self) -> Any:
        """A copy of the current model state."""
        with self._fits.reading():
            return self._bound.shown_state(self.engine.copied(self.engine.state.model_state))

    @property
    def model(self) -> Any:
        """A copy of the module that was given as parameters, with the current values."""
        with self._fits.reading():
            return self._bound.model(*self.engine.copied(self.engine.read()))

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""
        with self._fits.reading():
            return self.engine.loss_scale

    @property
    def step(self) -> int:
        """The number of steps trained so far."""
        return self.engine.step

    @property
    def seed(self) -> int:
        """The seed of the keys of `tr.key()`."""
        return self.engine.seed

    @property
    def history(self) -> History:
        """The history of the latest fit."""
        return self._journal.history

    @property
    def records(self) -> Records:
        """The records of the latest fit's taps."""
        return self._journal.records

    @property
    def accumulation(self) -> Accumulation:
        """The number of microbatches per step, and how their gradients are combined."""
        return self.engine.accumulation

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, if there is one."""
        return self.engine.pipeline

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline, once the shape of its elements is known; None without one."""
        return self.engine.plan

    @property
    def replicas(self) -> int:
        """The number of copies that train in parallel."""
        return self.engine.placement.replicas

    @property
    def executions(self) -> int:
        """The number of training dispatches so far."""
        return self.engine.executions

    @property
    def elements_per_step(self) -> int:
        """The number of elements of the dataset per step, which is microbatches x replicas.

        With several processes, each has a separate dataset and counts its local replicas.
        """
        return self.engine.elements_per_step

    @property
    def decisions(self) -> tuple[str, ...]:
        """What was decided about memory and about the length of executions, one sentence each."""
        return (*self.engine.memory.decisions, *self._fits.length_reasons)

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The compilations of all fits, with purpose, cause and seconds; or that one was reused."""
        return tuple(self._journal.compilations)

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Change the `inputs` of a pipeline, without compiling again.

        Raises:
            OptionError: there is no pipeline, or its inputs have another form.
            ProgramError: another thread runs a fit.
        """
        self._fits.check_thread("inputs that are set")
        self.engine.set_inputs(inputs)

    def tensors(self, example: Tree = None) -> Catalogue:
        """Every tensor of the step by name, as `observe=` selects them.

        Args:
            example: one element of the dataset; not needed after a fit.

        Raises:
            ProgramError: no example, and no fit yet.
        """
        with self.engine.placement.outside():
            return self.engine.tensors(example)

    def stop(self) -> None:
        """End the current fit after the running execution."""
        self._fits.stop()

    # -- training -------------------------------------------------------------------------------

    @suggesting("trainer.fit")
    def fit(
        self,
        dataset: object,
        steps: int | None = None,
        epochs: int | None = None,
        *,
        validation_data: object = None,
        validation_every: str | int = "epoch",
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        timeout_s: float | None = None,
        inputs: Sequence[Any] | None = None,
        trace: Trace | str | os.PathLike[str] | None = None,
    ) -> History:
        """Train.

        Args:
            dataset: the training data; see `tr.InfeedQueue`. None, with `steps`, if the loss function
                needs none: `loss_fn(params)`.
            steps: the exact number of steps, which take steps x microbatches x replicas
                elements. The dataset is not restarted.
            epochs: the number of passes over the dataset; 1 if neither is given. Elements at the end
                that do not fill a step are left out.
            validation_data: data to evaluate on during the fit, as `evaluate` does. The values are in
                the history and in the logs of callbacks as `val_<name>`.
            validation_every: "epoch" (a fit by steps is one), or a number of steps.
            checkpoint: a directory, or a `tr.Checkpoint`, for the state of the fit. If it contains this
                fit already, the fit resumes from there, bit for bit as if it had never stopped; `steps`
                and `epochs` mean the whole fit. A finished fit returns at once.
            callbacks: objects with the methods of `tr.Callback`.
            progress: whether to show a progress bar; None shows it in a terminal.
            timeout_s: the longest wait for an element of the data, in seconds; a longer one is a
                `tr.errors.DataTimeout`. None waits, and logs after 30 s what it waits for.
            inputs: new values of the `inputs` of a pipeline, from now on.
            trace: a directory for a timeline of this fit, or a `tr.trace(...)`.

        Returns:
            The history of this fit, also kept as `trainer.history`.

        Raises:
            OptionError: an argument has a value it may not have.
            DataError: the dataset breaks a rule, raises, ends too early, or is later than `timeout_s`.
            SelectionError: a tap selects no tensor.
            NonFiniteError: a guard of `observe` or `on_nonfinite` stopped it.
            CorruptionError: `sentinel` found a difference.
            DeviceMemoryError: a device does not have enough memory.
            RunError: the run directory cannot be written.
            CheckpointError: the checkpoint belongs to another fit, or cannot be read or written.
            ProgramError: another fit of this trainer is running.
        """
        with self._fits.alone():
            # What can be refused is refused here, before anything is read, traced or written.
            engine, duration = self.engine, Duration.of(steps, epochs)
            Patience(timeout_s)  # refused here, not once the program is traced
            if progress is not None:
                progress = check_flag("progress", progress, error=OptionError)
            if inputs is not None:
                self.set_inputs(inputs)
            source = as_dataset(dataset := or_no_data(dataset))
            duration.check_ends(source)
            evaluate = partial(self.evaluate, timeout_s=timeout_s)
            validation = Validation(validation_data, validation_every, evaluate)
            if validation.has_data:
                check_evaluates(engine, self._eval_fn)
            call = FitCall(
                dataset,
                duration,
                agreed_total_steps(engine, source, duration.steps, duration.epochs),
                validation,
                check_callbacks(callbacks, validation.has_data),
                # One progress bar for all processes.
                progress if distributed.writes() else False,
                self._fits.saving(checkpoint, duration, validation),
                timeout_s,
                Progress(engine.step, self._fits.epochs),
            )
            self._fits.run(self, call, None if trace is None else as_trace(trace))
        return self.history

    def _check_alone(self) -> None:
        self._fits.check_alone()

    @property
    def _made(self) -> int | None:
        return self._fits.kept or None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save parameters, optimizer and model state, step, seed and the count of epochs.

        Args:
            path: a new directory.

        Raises:
            CheckpointError: the path is taken, or cannot be written.
            ProgramError: another thread runs a fit.
        """
        self._fits.check_thread("a state that is saved")
        with self._fits.reading():
            save_state(self.engine, self._fits.epochs, path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore the state, step and seed of a checkpoint; the next fit reads its dataset from the
        start.

        Args:
            path: a directory of `save`, or of `fit(checkpoint=...)`, whose newest checkpoint is used.

        Raises:
            CheckpointError: there is no checkpoint, or it belongs to another model.
            ProgramError: a fit is running.
        """
        self._check_alone()
        with self._fits.reading():
            self._fits.epochs = restore_state(self.engine, path)

    # -- using the model ------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: object,
        fn: Callable[..., Any] | None = None,
        *,
        params: Tree = None,
        combine: Combine = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate `fn` on all rows of a dataset.

        Args:
            dataset: the data; all of it is read, including a smaller last batch.
            fn: called like the loss function; returns a scalar, a dict of scalars and arrays, or the
                result of a loss function. None: the trainer's `eval_fn`, or else the loss function.
            params: other parameters, a tree like `trainer.params`. None: the trainer's; with `ema=`,
                their average.
            combine: how values of batches are combined. None: scalars and arrays of floats are averaged
                over all rows, arrays of integers are summed. With `tr.Accumulation(weight=)`, the loss
                and `eval_fn` are averaged by these weights instead of rows, as in training. "mean",
                "sum", "max", "min", "last", an object with `init()`, `update(state, value)` and
                `result(state)`, or a function of all values; a dict has rules by name.
            timeout_s: the longest wait for an element, as in `fit`.

        Returns:
            One value per name.

        Raises:
            DataError: the dataset is empty, repeats without end, breaks a rule, raises, or is late.
            OptionError: `combine` is not a rule, or names a value that the function does not return, or
                `timeout_s` is not a time.
            ProgramError: values of batches have different shapes, and cannot be combined.
        """
        # A function of another kind may take other batches, and has its own mean.
        weighted, fn = fn is None, self._eval_fn if fn is None else self._bound.function(fn)
        check_evaluates(self.engine, fn)
        with self._fits.reading():
            read = self._read(params)
            return self._evaluator.evaluate(dataset, fn, read, combine, timeout_s, weighted)

    def predict(
        self,
        dataset: object,
        fn: Callable[..., Any] | None = None,
        live: bool = False,
        *,
        params: Tree = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The results of `fn` for each element of a dataset, in order.

        Args:
            dataset: the data; all of it is read.
            fn: `fn(params, *batch)`, or `fn(params, model_state, *batch)`; returns a tree of arrays.
                None, with a pipeline given as a list: the result of its last stage.
            live: whether to return an iterator that yields the result of each element while the rest is
                still being computed, instead of all results at the end.
            params: other parameters, as for `evaluate`.
            timeout_s: the longest wait for an element, as in `fit`.

        Returns:
            A tree of arrays. Results whose leading dim is that of the element's arrays are
            concatenated along it, all others are stacked.

        Raises:
            OptionError: there is no function to compute, or `timeout_s` is not a time.
            ProgramError: results of batches have different shapes, and cannot be stacked.
            DataError: the dataset repeats without end, breaks a rule, raises, or is late.
        """
        Patience(timeout_s)  # refused now: a live prediction reads nothing yet
        live = check_flag("live", live, error=OptionError)
        if fn is None and isinstance(self.engine.step_function, PipelineStep):
            fn = self.engine.step_function.outputs
        elif callable(fn):
            fn = self._bound.function(fn)
        if not callable(fn):
            raise OptionError(
                f"predict needs a function of parameters and batch. Received: {fn!r}. Give it "
                f"as predict(dataset, fn)."
            )
        with self._fits.reading():
            read = self._read(params)
            if live:
                # A copy: the caller may continue training while results are read.
                return self._evaluator.stream(dataset, fn, jax.tree.map(jnp.copy, read), timeout_s)
            return self._evaluator.predict(dataset, fn, read, timeout_s)

    def __repr__(self) -> str:
        return trainer_text(self.engine, self.history, self.records)

    def _repr_html_(self) -> str:
        return trainer_html(self.engine, self.history, self.records)
