"""Steps of a training, run again from a checkpoint by a separate engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.data.adapters import as_dataset
from tailrace.errors import DataExhausted, ProgramError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.taps.tap import StopOnNonfinite, parse_taps
from tailrace.trainer.checkpoints.saving import bring_to
from tailrace.trainer.checkpoints.snapshot import put_state
from tailrace.trainer.checkpoints.together import own_position
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.fitting.fit_progress import Duration, Progress

CHUNK = 64
"""The most steps that are dispatched at a time, where a checkpoint does not say what ran."""


class Rerun:
    """Runs steps again, from where a checkpoint is.

    Args:
        engine: of the trainer whose steps they are; it is not touched.
        observe: taps for the steps that are looked at.
        dataset: the one that was trained on, or an equal one.
        arrays: of the checkpoint.
        note: of the checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        observe: Any,
        dataset: Any,
        arrays: Mapping[str, np.ndarray],
        note: Mapping[str, Any],
    ) -> None:
        self.engine = twin_of(engine, observe)
        self._dataset = dataset
        self._progress = Progress(**note["fit"]["progress"])
        self._by_epochs = Duration(**note["fit"]["duration"]).epochs is not None
        self._epoch = self._progress.epoch
        feed = self.engine.use(dataset)
        assert isinstance(feed, InfeedQueue)
        self._feed = feed
        put_state(self.engine, arrays, note)
        bring_to(feed, dataset, self._progress, own_position(note["fit"]["positions"]))
        if self._progress.epochs and self._progress.steps == self._progress.epoch_start:
            self._next_epoch()
        loud = self.engine.runner
        # Outfeeds of the model itself have delivered what these steps send out already.
        loud.muted = frozenset(q for q in loud.traced.outfeeds if q is not self.engine.scalars)
        self._loud, self._silent = loud, _unobserved(self.engine, loud)
        # The program that ran is the one that runs again. A loop with room for one pass is no loop to
        # XLA, which then rounds otherwise (one loss in 25 was another, by one bit): room for two.
        self._longest: int = note["fit"].get("capacity") or CHUNK
        self._silent.capacity, self._loud.capacity = self._longest, min(2, self._longest)
        self._loud.keep_elements = True

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.engine.step

    def advance(self, until: int) -> Iterator[Results]:
        """Run to a step without looking; one result for each dispatch."""
        while self.step < until:
            yield self._run(min(self._longest, until - self.step), self._silent)

    def look(self) -> Results:
        """Run one step, with taps."""
        return self._run(1, self._loud)

    @property
    def spec(self) -> ElementSpec:
        """The form of an element."""
        return self._feed.spec()

    @property
    def elements(self) -> list[np.ndarray]:
        """The elements of the step that was looked at last, on the host, stacked leaf by leaf."""
        block = self._loud.taken[self._feed].host
        return [np.asarray(leaf) for leaf in self._feed.elements_of(block)]

    @contextmanager
    def closing(self) -> Iterator[Rerun]:
        """While steps are run; afterwards threads have ended."""
        try:
            yield self
        finally:
            self._feed.rest()

    def _run(self, length: int, runner: LoopRunner) -> Results:
        per_step = self._loud.elements_per_pass
        length = self._make_ready(length * per_step) // per_step
        self.engine.swap(runner)
        results = self.engine.collect(self.engine.dispatch(length, following=0, period=1))
        if results.failure is not None:
            raise results.failure
        return results

    def _make_ready(self, count: int) -> int:
        """How many of the next elements there are, at least those of a step."""
        per_step, found = self._loud.elements_per_pass, 0
        for _ in range(2):
            found = self._feed.remaining(count)
            if found >= per_step:
                return found
            if not self._by_epochs:
                break
            self._epoch += 1
            self._next_epoch()
        raise DataExhausted(
            f"A replay reads the elements that the training read, and this dataset ends before "
            f"step {self.step}: {found} elements are left, a step takes {per_step}. Give the dataset "
            f"that was trained on, from its start."
        )

    def _next_epoch(self) -> None:
        if not as_dataset(self._dataset).restartable:
            raise ProgramError(
                "A replay over several epochs reads its dataset several times, and this one can be "
                "read once only. Give a re-iterable, or a function that makes an iterator."
            )
        self._feed.restart(self._dataset, self._epoch)


def twin_of(engine: Engine, observe: Any) -> Engine:
    """An engine for the same model, with other taps; its state is still to be set."""
    # A step that was skipped is skipped again.
    guards = [tap for tap in engine.taps if isinstance(tap, StopOnNonfinite) and tap.skips]
    observe = [*parse_taps(observe), *guards]
    params, model_state = jax.tree.map(_blank, (engine.form.params, engine.form.model_state))
    if engine.pipeline is not None:
        params = engine.pipeline.tie(params)
    twin: Engine = engine.again(params=params, model_state=model_state, observe=observe)
    return twin


def _blank(form: Any) -> Any:
    if jnp.issubdtype(form.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=form.dtype.name[4:-1]), form.shape)
    return np.zeros(form.shape, form.dtype)


def _unobserved(engine: Engine, loud: LoopRunner) -> LoopRunner:
    """The same loop without taps; guards, and the gradients for fingerprints, stay."""
    kept = {
        position: [want for want in wants if want.digest or want.guard]
        for position, wants in engine.sight.wanted.items()
    }
    return loud.observing({position: wants for position, wants in kept.items() if wants})
