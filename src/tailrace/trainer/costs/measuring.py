"""What a training costs: the methods of `tr.Trainer` that measure."""

from __future__ import annotations

from tailrace.base.checks import check_count
from tailrace.base.trees import Tree
from tailrace.data.no_data import or_no_data
from tailrace.errors import OptionError, ProgramError
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.running.report import PipelineReport
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.profiling.profile.profile import Profile
from tailrace.trainer.costs.explain import explained
from tailrace.trainer.costs.explanation import Explanation
from tailrace.trainer.costs.profiled import profiled
from tailrace.trainer.engine import Engine
from tailrace.trainer.fitting.fits import Fits
from tailrace.trainer.observation.journal import Journal
from tailrace.trainer.showing.summary import Summary, summarise


class Measuring:
    """Memory and time of a trainer's steps; nothing that is trained changes."""

    engine: Engine
    _fits: Fits
    _journal: Journal

    def explain(self, example: Tree, steps: int | None = None) -> Explanation:
        """The cost of training on elements like `example`: memory, FLOPs, compile time.

        Args:
            example: one element of the dataset; None for `fit(None)`.
            steps: the number of steps per execution; None: as configured, or 10.

        Raises:
            OptionError: `steps` is not a whole number of at least 1.
            DataError: the example cannot be an element of a dataset.

        Example:
            >>> import numpy as np, optax, tailrace as tr
            >>> loss_fn = lambda w, x: ((x @ w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.ones(4))
            >>> found = trainer.explain(np.ones((8, 4), np.float32), steps=5)
            >>> found.steps_per_execution, found.effective_batch_size, found.flops_per_step > 0
            (5, 8, True)
        """
        if steps is None:
            steps = self._fits.steps_per_execution or 10
        else:
            check_count("steps", steps, at_least=1, error=OptionError)
        with self.engine.placement.outside():
            return explained(self.engine, example, int(steps))

    def profile(self, dataset: object, executions: int = 2) -> Profile:
        """The cost of each scope of the model in each phase of a step: time, FLOPs, bytes, memory.

        Some executions run on copies of the state, with the next elements, under JAX's profiler.
        Afterwards the trainer is unchanged: parameters, step, history, and the position in a one-shot
        dataset.

        Args:
            dataset: the data, as for `fit`; None for none.
            executions: the number of profiled executions; one more runs before them.

        Returns:
            A `Profile` that prints by cost, most expensive scope first. It is stored in the run
            directory, for `tailrace report` and `tailrace compare`.

        Raises:
            DataError: the dataset is too short.
            ProgramError: a fit is running.

        Example:
            >>> import numpy as np, optax, tailrace as tr
            >>> x = np.ones((64, 32), np.float32)
            >>> loss_fn = lambda w, x: ((x @ w) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), x[0])
            >>> profile = trainer.profile(tr.batches(x, 16, repeat=True))
            >>> "forward" in {row.phase for row in profile.rows}
            True
        """
        self._fits.check_alone()
        with self.engine.placement.outside():
            found = profiled(self.engine, or_no_data(dataset), executions, self._fits.pace)
        self._journal.add_profile(found.to_json())
        return found

    def summary(self, example: Tree = None) -> Summary:
        """A summary of the model: parameters by scope, memory, FLOPs per step.

        Args:
            example: one element of the dataset; not needed after a fit. Nothing is compiled.

        Raises:
            DataError: the example cannot be an element of a dataset.

        Example:
            >>> import numpy as np, optax, tailrace as tr
            >>> params = {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}
            >>> loss_fn = lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean()
            >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params)
            >>> trainer.summary().parameters
            10
        """
        with self.engine.placement.outside():
            if example is not None:
                self.engine.use([example])
            return summarise(self.engine)

    def report(self) -> PipelineReport:
        """The cost of each stage of a pipeline, its idle time, and possible improvements.

        Each stage runs alone for a moment to measure its time.

        Raises:
            ProgramError: there is no pipeline, or no fit yet.

        Example:
            >>> import jax.numpy as jnp, numpy as np, optax, tailrace as tr
            >>> stages = [lambda w, x: jnp.tanh(x * w), lambda w, h: (h * w).mean()]
            >>> pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 0])
            >>> trainer = tr.Trainer(pipeline, optax.sgd(0.1), [np.float32(1), np.float32(1)])
            >>> data = tr.batches(np.ones(64, np.float32), 4)
            >>> history = trainer.fit(data, steps=2, progress=False)
            >>> len(trainer.report().stages)
            2
        """
        runner = self.engine.runner if self.engine.executions else None
        if not isinstance(runner, PipelineRunner):
            raise ProgramError(
                "report says what the stages of a pipeline cost, after a fit. Received: "
                + (
                    "no fit yet. Call trainer.fit first, or trainer.explain(example)."
                    if self.engine.pipeline is not None
                    else "a trainer without a pipeline. Use trainer.explain(example)."
                )
            )
        return pipeline_report(runner.assembly, measured=self._fits.seconds_per_step)
