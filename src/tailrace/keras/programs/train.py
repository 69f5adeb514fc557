"""The training program of a model: Keras' loss, metrics and optimizer on an engine.

Keras' trainer calls `run(state, iterator)` once per execution and gets back logs, which wait for the
device only when they are read, and a token for its state, which it passes back. The values are written
to the variables when Keras needs them (`fill`).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.spans.span import is_traced
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.errors import NonFiniteError
from tailrace.feeds import dispatch_table
from tailrace.feeds.feed import Staged
from tailrace.keras.data.batch_source import Block, Form
from tailrace.keras.handles import settings_of
from tailrace.keras.optimizers.adapter import Updates
from tailrace.keras.optimizers.application import overrides
from tailrace.keras.optimizers.wrappers import wrappers_of
from tailrace.keras.outfeed_layers import check_wrappers
from tailrace.keras.programs.executions import Executions, as_batch, part
from tailrace.keras.programs.logs import Final, Values
from tailrace.keras.programs.one_process import placement_of
from tailrace.keras.programs.short_steps import ShortSteps
from tailrace.keras.programs.variables import (
    SCALE,
    Layout,
    for_replicas,
    leaf_numbers,
    merged,
    metric_results,
    of_one,
)
from tailrace.program.compiling.build import Build
from tailrace.program.step.accumulation import Accumulation
from tailrace.records.history import History
from tailrace.taps.catalogue import names_listed_by
from tailrace.taps.tap import MOST_BYTES, Tap
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Ticket
from tailrace.trainer.fitting.pace import pace_for
from tailrace.trainer.observation.description import describe
from tailrace.trainer.observation.duties import Guarding, recording
from tailrace.trainer.observation.journal import Journal


class Training(Executions):
    """The training program of one compiled model, kept from fit to fit."""

    def __init__(self, model: keras.Model) -> None:
        settings = settings_of(model)
        count = settings.microbatches
        super().__init__(model, placement_of(settings), count * settings.replicas)
        self.layout = Layout(model)
        self._results = metric_results(model, self.layout)
        self.engine: Engine | None = None
        self.journal = Journal(settings.run_dir, timed=True)
        self._leaves: list[list[int]] = []
        self._form: Form | None = None
        self._short: ShortSteps | None = None
        self._pending: deque[Ticket] = deque()
        self._guarding: Guarding | None = None
        self._stopped_by: NonFiniteError | None = None
        self._most_steps: int | None = None
        self._contexts = contextlib.ExitStack()
        self._began = False
        self._token = tuple([None] * len(self.layout.kinds))  # a new object, recognised by identity
        self._handed: list[Any] = []
        self._dirty = False
        self._observing: list[Any] = []
        """Optimizers that get the gradients of each batch through taps."""
        self._delivered = 0
        self._step = 0
        """The step before there is an engine."""
        self._takes_nothing, self._period, self._accelerated = False, 1, False
        """Whether the metrics are all that comes out of the program, how often taps look, and whether
        it runs on an accelerator."""
        self._own: dict[int, Any] = {}
        """Values per replica to resume with, by the index of the variable."""

    # -- what Keras calls -----------------------------------------------------------------------

    def run(self, state: Tree, iterator: Iterator[Any]) -> tuple[dict[str, Any], Any]:
        """One execution."""
        # Keras passes back what `run` returned, unless it has read or written the variables in
        # between. So a token in place of arrays says that the values here are the current ones.
        if state is self._token:
            logs = self._run_short(iterator)
            if logs is not None:
                return logs, self._token
        else:
            self._load([value for values in state for value in values])
            # Keras has emptied its variables. Where batches are only counted, nothing runs that would
            # make the values here newer: they must be written back all the same.
            self._dirty = self._resumed is not None or self.pacing.owes
        series = self.execute(iterator)[-1]
        return self.logs(series), self._token

    def fill(self) -> None:
        """Write the values to the variables."""
        if not self._dirty:
            return
        assert self.engine is not None
        # Callbacks must see all results. First: if a guard ends the fit by them, Keras asks once more.
        self._collect()
        self._dirty = False
        if self._form is not None:
            self._deliver()
        leaves = jax.tree.leaves(self.engine.state)
        # A variable may have two leaves: the loss scale is also a parameter. Both hold the same
        # value.
        values = [leaves[numbers[0]] for numbers in self._leaves]
        if self.replicas > 1 or self.engine.pipeline is not None:
            values = [
                of_one(variable, value)
                for variable, value in zip(self.layout.variables, values, strict=True)
            ]
        for variable, value in zip(self.layout.variables, values, strict=True):
            variable.assign(value)
        # What Keras now has. If it passes the same arrays back, nobody has changed them, and
        # `_load` leaves them.
        self._handed = [variable.value for variable in self.layout.variables]

    def handed_over(self) -> list[Any]:
        """The variables whose values Keras passes in, in order."""
        return [] if self._dirty else self.layout.variables

    def end(self) -> None:
        """End a fit: collects results in flight, stops threads."""
        if self.nested:  # history and records are those of the fit around this call
            self.settle()
        else:
            self._leave()
            self._began, self._delivered = False, 0
        super().end()

    def add_validation(self, values: Mapping[str, Any]) -> None:
        """Keep the values of a validation in the run directory, if there is one."""
        if self.journal.sink is None:
            return
        self.settle()
        numbers = {name: float(value) for name, value in values.items() if not np.ndim(value)}
        # A resumed epoch may have no batch left but its validation: nothing is open then.
        opened = self.journal.open(dict) if self._form is None else contextlib.nullcontext()
        with opened:
            self.journal.add_validation(self.steps, numbers)

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._step if self.engine is None else self.engine.step

    @property
    def history(self) -> History:
        """Loss and metrics of the steps so far, if they are recorded."""
        return self.journal.history

    def settle(self) -> None:
        """Collect all results in flight."""
        if self._form is not None:
            self._collect()
            self._deliver()

    def mark(self) -> Callable[[], Any]:
        """Mark the current end of the run directory."""
        return self.journal.mark()

    def values(self) -> list[Any]:
        """The current values of the variables; those of all replicas if they differ."""
        variables = self.layout.variables
        if self.engine is None:
            return [variable.value for variable in variables]
        leaves = jax.tree.leaves(self.engine.state)
        found: list[Any] = []
        for number, variable in enumerate(variables):
            handed = number < len(self._handed) and self._handed[number] is variable.value
            inside = self._dirty or handed  # otherwise Keras, or a callback, has changed it
            found.append(leaves[self._leaves[number][0]] if inside else variable.value)
        return [self.engine.placement.readable(value) for value in found]

    def put(self, values: list[Any], of_replicas: bool = False) -> None:
        """Restore saved values of the variables, on request those of each replica."""
        for number, (variable, value) in enumerate(zip(self.layout.variables, values, strict=True)):
            own = value.ndim > len(variable.shape)
            variable.assign(jnp.asarray(merged(variable, value) if own else value))
            if own and of_replicas:
                self._own[number] = value
        self._handed, self._dirty = [], False

    @property
    def built(self) -> dict[str, Any]:
        """How the program is built, ready for JSON."""
        engine = self.engine
        return settings_of(self.model).build.recorded({}) if engine is None else engine.built

    def take_up(
        self, step: int, history: History, run_end: Mapping[str, Any] | None, build: Build
    ) -> None:
        """Resume at this step, with the history, the run directory and the build of the earlier fit."""
        self._step, self._began = step, True
        if self.engine is not None:
            self.engine.step = step
            self.engine.build_with(build)
        self.journal.take_up(history, run_end)
        self.journal.records.clear()

    # -- state ----------------------------------------------------------------------------------

    def _load(self, values: list[Any]) -> None:
        """Load values that Keras passes in, if they are not those it was given."""
        new = self.engine is None
        if self.engine is None:
            self.engine = self._made(values)
            self._leaves = leaf_numbers(self.layout, self.engine.state)
            self.engine.step = self._step
        # Keras hands over every value at the start of an epoch and after a callback has read the model.
        # Those that are still the arrays it was given need not travel: the engine has them.
        changed: dict[int, Any] = {}
        for number, (name, variable, value) in enumerate(
            zip(self.layout.names, self.layout.variables, values, strict=True)
        ):
            own = self.replicas > 1 and self.layout.own_of_replicas(name)
            handed_out = number < len(self._handed) and self._handed[number] is value
            if handed_out or (new and not own):
                continue
            entering = for_replicas(variable, value, self.replicas) if own else value
            entering = self._own.pop(number, entering)
            changed.update(dict.fromkeys(self._leaves[number], entering))
        if changed:
            self.engine.replace(changed)
        self._handed = []

    def _made(self, values: list[Any]) -> Engine:
        layout, settings = self.layout, settings_of(self.model)
        rest = iter(values)
        trees = [{name: next(rest) for name in kind.names} for kind in layout.kinds]
        params, others, kept, metrics = trees
        if layout.scale is not None:
            # The optimizer's scale decides the loss, and the loss function sees parameters only.
            params[SCALE] = kept[layout.optimizer.names[layout.scale]]
        taps = [settings.observe] if isinstance(settings.observe, str) else [*settings.observe]
        if settings.is_pipelined:
            check_wrappers(self.model.optimizer)  # once more: some know only now what they will do
            wrappers = wrappers_of(self.model.optimizer)
            self._observing = [one for one in wrappers if one.observes and one.sees_each]
            taps += [Tap(name, reduce="tensor") for w in self._observing for name in w.wanted()]
        return Engine(
            settings.loss_function(self.loss, self._choosing),
            Updates(self.model.optimizer, layout, kept),
            params,
            accumulation=1 if settings.is_pipelined else self._choosing(settings.accumulation),
            replicas=self.replicas,
            model_state={**others, **metrics},
            # Metrics count what their replica saw, and seeds must differ; BatchNorm's averages are
            # averaged.
            replica_state=lambda name: "each" if layout.own_of_replicas(name) else "mean",
            observe=taps,
            offload_optimizer_state=settings.options.offload_optimizer_state,
            shard_optimizer_state=settings.options.shard_optimizer_state,
            offload_activations=settings.options.offload_activations,
            fingerprint=settings.fingerprint,
            build=settings.build,
        )

    def _choosing(self, accumulation: Accumulation) -> Accumulation:
        """How gradients are accumulated, where a function of the variable chooses dtypes."""
        pairs = zip(self.layout.trainable.names, self.layout.trainable.all, strict=True)
        return accumulation.choosing_by({f"[{name!r}]": variable for name, variable in pairs})

    def _deliver(self) -> None:
        """Deliver the observed gradients of each batch since the last call."""
        for optimizer in self._observing:
            found, count = {}, 0
            for name, key in optimizer.wanted().items():
                values = self.journal.records[name, "tensor"].values
                count = len(values)
                # Records grow over the whole fit, and the optimizer has had the earlier ones.
                values = values[self._delivered :]
                lead = (-1, self.replicas) if self.replicas > 1 else (-1,)
                found[key] = values.reshape(*lead, *values.shape[1:])
            optimizer.deliver(found, self.replicas)
            self._delivered = count

    # -- the step -------------------------------------------------------------------------------

    def loss(self, params: Tree, model_state: Tree, **element: Any) -> Any:
        """The loss of one batch; with it, the next state and the metrics so far."""
        layout, model = self.layout, self.model
        state = (
            layout.trainable.values(params),
            layout.others.values(model_state),
            layout.metrics.values(model_state),
        )
        with settings_of(model).differentiating(layout) as seen:
            # The evaluation step with the training pass inside, because it updates all metrics.
            logs, (_, others, metrics) = keras.Model.test_step(model, state, as_batch(element))
        loss = seen.loss
        if layout.scale is not None:
            loss = loss * jax.lax.stop_gradient(params[SCALE]).astype(loss.dtype)
        # As Keras' own train step does; the optimizer divides gradients by it again.
        elif (factor := model.optimizer.loss_scale_factor) is not None:
            loss = loss * jnp.asarray(factor, loss.dtype)
        # Known from tracing: which logs there are depends on the model's losses and metrics.
        self.names = {name: jnp.shape(value) for name, value in logs.items()}
        after = {**layout.others.tree(others), **layout.metrics.tree(metrics)}
        # A loop's carry keeps its dtypes; Keras may return a Python number, or a wider float.
        after = {name: jnp.asarray(v, model_state[name].dtype) for name, v in after.items()}
        return loss, (after, {"metrics": dict(logs)})

    # -- executions -----------------------------------------------------------------------------

    def dispatch(self, block: Block) -> tuple[Any, Any]:
        """Run the steps of a block."""
        engine = self._enter(block.form)
        if engine.pipeline is not None:  # only once it is traced, its devices are known
            self._sharding = engine.placement.shared_out
            block.on(self._sharding, self.replicas)
        count = self.per_step // self.replicas
        steps, ran = block.count // self.per_step, 0
        most = self._most_steps  # the limit of the bytes that taps return
        piece = steps if most is None else min(steps, max(1, most))
        sent: list[dict[str, Any]] = []
        ready = None
        quiet = self._is_quiet(engine, steps)
        # Muted scalars are not outputs of the program: unread, they cost nothing.
        engine.runner.muted = frozenset([engine.scalars]) if quiet else frozenset()
        while ran < steps:
            length = min(piece, steps - ran)
            whole = length == steps
            staged = block.staged if whole else part(block.staged, ran * count, length * count)
            ticket = self._run(engine, staged, length, staged.room // count)
            ready = ticket.ready
            ran += length
            if not quiet:
                logs = ticket.scalars.items()
                sent.append({name.removeprefix("metrics/"): value for name, value in logs})
                self._collect(in_flight=1)
        if quiet:
            return ready, self._metrics_now(engine) if self.pacing.listeners else {}
        numbers = [name for name, shape in self.names.items() if not shape]
        # After a whole dispatch: a short step repeats what that one found out.
        if self._short is None and self._is_short(engine):
            self._short = ShortSteps(engine, block.form, numbers)
        return ready, self.log_series(*({name: one[name] for name in numbers} for one in sent))

    def _run(self, engine: Engine, staged: Staged, length: int, room: int) -> Ticket:
        """One execution, in the program for all lengths up to the room of its block.

        On an accelerator a loop of fixed length is faster: the time of the first executions decides
        whether one is compiled for their most common length.
        """
        runner = engine.runner
        # A single step needs no loop, unless taps are periodic.
        runner.capacity = room if room > 1 or self._period > 1 else None
        trials = runner.fixed.trials  # the runner's: batches of another form take other times
        timing = room > 1 and len(trials) < dispatch_table.TRIALS and self._accelerated
        before, started = runner.compile_s, time.perf_counter()
        self._dirty = True  # before: an interrupt must not hide what has run
        with recording(self.journal):
            ticket = engine.dispatch(length, block=staged, following=0, period=self._period)
        if not self._takes_nothing:
            self._pending.append(ticket)
        self.journal.began(ticket.ready)
        # An execution that compiled says nothing about the time of a step.
        if timing and runner.compile_s == before:
            jax.block_until_ready(ticket.ready)
            trials.append((time.perf_counter() - started) / length)
        if len(trials) == dispatch_table.TRIALS:
            with recording(self.journal):
                runner.fix(engine.loop_state, engine.sight.period, min(trials))
        return ticket

    def _collect(self, in_flight: int = 0) -> None:
        """Collect results until at most `in_flight` executions are in flight."""
        while len(self._pending) > in_flight:
            assert self.engine is not None
            assert self._guarding is not None
            results = self.engine.collect(self._pending.popleft())
            self.journal.add(results)
            try:
                self._guarding.check(results)
            except NonFiniteError as error:
                self._stopped_by = error
                if results.failure is not None:
                    # Later executions went on from the state after the bad step: they are void.
                    self._pending.clear()
                raise

    # -- single steps ---------------------------------------------------------------------------

    def _is_short(self, engine: Engine) -> bool:
        """Whether the step that was just dispatched may be followed by a short one."""
        pacing = self.pacing
        single = pacing.single and self.per_step == 1
        # A wait with a limit is for a thread, which hands over its batches in blocks.
        watched = pacing.patience.limited
        plain = self._takes_nothing and engine.pipeline is None and engine.runner.repeats
        return single and plain and not watched

    def _run_short(self, iterator: Iterator[Any]) -> dict[str, Any] | None:
        """The next execution, if it is a single step like the one before; None otherwise."""
        short, batches = self._short, self._batches
        if short is None or batches is None or batches.iterator is not iterator or is_traced():
            return None
        sent = short.run(batches)
        if sent is None:
            return None
        ready, series = sent
        pacing, self._dirty = self.pacing, True
        if pacing.arrays and pacing.reads_on(1, 1):
            batches.read_next()  # while the device computes
        self._wait(ready, short.form, 1)
        pacing.took(1)
        self.taken += 1
        return self.logs(series)

    # -- steps without listeners ----------------------------------------------------------------

    def _is_quiet(self, engine: Engine, steps: int) -> bool:
        """Whether no values per step have to leave the program.

        Keras makes the logs of an epoch from the metrics' variables. So do we for an execution, if its
        steps are not reported and there are enough of them to pay for it.
        """
        if self.pacing.hears_steps or not self._takes_nothing:
            return False
        if self.replicas > 1 or engine.pipeline is not None:
            merged = self.replicas == 1 or settings_of(self.model).merges_metrics
            return merged and not self.pacing.listeners
        own = overrides(self.model, "compute_metrics", keras.Model)
        return not self.pacing.listeners or (steps >= dispatch_table.QUIET_FROM and not own)

    def _metrics_now(self, engine: Engine) -> dict[str, Values]:
        """The metrics that are numbers, computed from their variables as they are now."""
        state = engine.runner.carried(engine.loop_state).model_state
        found = self._results(self.layout.metrics.values(state))
        return {name: Final(value) for name, value in found.items() if not jnp.ndim(value)}

    def _nothing_to_take(self, engine: Engine) -> bool:
        """Whether the metrics are all that comes out: they are read elsewhere, when wanted."""
        others = len(engine.runner.traced.outfeeds) > 1
        wanted = engine.sight.chosen or engine.guarded or engine.digests
        return not (wanted or others or self.journal.sink)

    def _enter(self, form: Form) -> Engine:
        """The engine, on batches of this form."""
        engine = self.engine
        assert engine is not None
        if self._form is not form:
            # Another form is another program: results in flight belong to the one before.
            self._leave()
            with names_listed_by("tk.of(model).tensors(), after a fit without it"):
                engine.use(form.feed)
            if not self._began:
                microbatches = engine.accumulation.microbatches
                self.journal.begin(engine.step, microbatches, self.replicas)
            self._guard(engine)
            self._most_steps = pace_for(engine, None, MOST_BYTES, None).most_steps
            self._contexts.enter_context(self.journal.open(lambda: describe(engine, 1)))
            self._contexts.enter_context(engine.delivering())
            # Every execution needs these, and they do not change.
            self._takes_nothing = self._nothing_to_take(engine)
            self._period = engine.sight.period
            self._accelerated = devices.platform() != "cpu"
            self._form, self._began = form, True
        return engine

    def _guard(self, engine: Engine) -> None:
        """Count skipped steps: those of a fit, also a resumed one, or of all batches given singly."""
        if self._guarding is None or self.pacing.of_fit:
            self._guarding = Guarding(engine, self.journal.history)
        self._guarding.go_on()

    def _leave(self) -> None:
        contexts, self._contexts = self._contexts, contextlib.ExitStack()
        try:
            if self._form is not None and self.engine is not None:
                self._collect()
                self.engine.runner.muted = frozenset()
        finally:
            self._form = self._short = None
            error, self._stopped_by = self._stopped_by, None
            kind = None if error is None else type(error)
            contexts.__exit__(kind, error, None if error is None else error.__traceback__)
