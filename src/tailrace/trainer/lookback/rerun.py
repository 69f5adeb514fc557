"""Steps of a training, run again from a checkpoint by a separate engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tailrace.data.adapters import as_dataset
from tailrace.data.positions.random_sources import random_state, set_random_state
from tailrace.errors import CheckpointError, DataExhausted, ProgramError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Staged
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.internals import key_generator
from tailrace.program.compiling.kernel_choices import choices_in
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.taps.tap import Observe, StopOnNonfinite, Tap, in_every_step, parse_taps
from tailrace.trainer.checkpoints.passes import Passes
from tailrace.trainer.checkpoints.snapshot import BUILD, put_state
from tailrace.trainer.checkpoints.together import own_position
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.fitting.fit_progress import Duration, Progress
from tailrace.trainer.random_keys import is_key

CHUNK = 64
"""The most steps that are dispatched at a time, where a checkpoint does not say what ran."""


class Rerun:
    """Runs steps again, from a checkpoint on.

    Args:
        engine: the engine of the trainer whose steps they are; it is not changed.
        observe: taps for the steps that are looked at.
        dataset: the one that was trained on, or an equal one.
        arrays: the arrays of the checkpoint.
        note: the note of the checkpoint.
        directory: the directory of the checkpoints, which also has the kernels that XLA chose then.
        fingerprint: whether to take fingerprints, even if the trainer takes none.
        end: the number of the step before which the fit ended; None if that is not known.
    """

    def __init__(
        self,
        engine: Engine,
        observe: Observe,
        dataset: object,
        arrays: Mapping[str, np.ndarray],
        note: Mapping[str, Any],
        directory: Path | None = None,
        fingerprint: bool = False,
        end: int | None = None,
    ) -> None:
        self._end = end
        self.engine = twin_of(engine, observe, fingerprint)
        self.engine.build_as_recorded(note.get(BUILD))
        self._dataset, self._directory = dataset, directory
        self._progress = Progress(**note["fit"]["progress"])
        self._duration = Duration(**note["fit"]["duration"])
        self._by_epochs = self._duration.epochs is not None
        self._epoch = self._progress.epoch
        passes = Passes(dataset, self._progress, own_position(note["fit"]["positions"]))
        # Of an earlier version: where it knew the length, it never read the end itself.
        self._by_length = not passes.known
        self._drawn = random_state()
        passes.set_out()
        feed = self.engine.use(dataset)
        assert isinstance(feed, InfeedQueue)
        self._feed = feed
        put_state(self.engine, arrays, note)
        try:
            passes.bring(feed)
        except DataExhausted as error:
            raise DataExhausted(
                f"A replay reads the elements that the training read, and this dataset ends before "
                f"step {self.step}, where the replay starts. Give the dataset that was trained on, "
                f"from its start."
            ) from error
        # Saved between two passes: what the fit did next was to read its dataset from the start.
        if passes.between and feed.position:
            self._next_epoch()
        # With the room that the training's loop had: another capacity is another program for XLA,
        # which may round differently, and the replay must be bit-equal.
        self._longest: int = note["fit"].get("capacity") or CHUNK
        self._pair = RunnerPair(self.engine)
        self._pair.set_longest(self._longest)

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.engine.step

    def check(self, step: int) -> None:
        """Refuse a step that the fit would not have reached."""
        asked, first = self._duration.steps, self._progress.first_step
        ends = [self._end] if asked is None else [self._end, first + asked]
        if any(end is not None and step >= end for end in ends):
            raise self._not_reached(step)

    def _not_reached(self, step: int) -> CheckpointError:
        return CheckpointError(
            f"A replay is of a step that was trained, and that fit, fit({self._duration}) from step "
            f"{self._progress.first_step}, ends before step {step}. Steps of a fit without checkpoint= "
            f"cannot be replayed."
        )

    def advance(self, until: int) -> Iterator[Results]:
        """Run to a step without looking; one result for each dispatch."""
        while self.step < until:
            yield self._run(min(self._longest, until - self.step))

    def look(self) -> Results:
        """Run one step, with taps."""
        return self._run(1, looking=True)

    @property
    def tapped(self) -> bool:
        """Whether `look` runs with taps."""
        return has_taps(self.engine)

    @property
    def spec(self) -> ElementSpec:
        """The form of an element."""
        return self._feed.spec()

    @property
    def elements(self) -> list[np.ndarray]:
        """The elements of the step that was looked at last, on the host, stacked leaf by leaf."""
        block = self._pair.loud.taken[self._feed].host
        return [np.asarray(leaf) for leaf in self._feed.elements_of(block)]

    @contextmanager
    def closing(self) -> Iterator[Rerun]:
        """While steps are run; afterwards threads have ended."""
        try:
            with choices_in(self._directory):
                yield self
        finally:
            self._feed.leave()
            # Of the process, which trains on as if nothing had been replayed.
            set_random_state(self._drawn)

    def _run(self, length: int, looking: bool = False) -> Results:
        per_step = self._pair.loud.elements_per_pass
        return self._pair.run(self._make_ready(length * per_step) // per_step, looking)

    def _make_ready(self, count: int) -> int:
        """How many of the next elements there are, at least those of a step."""
        per_step, found = self._pair.loud.elements_per_pass, 0
        # In this pass over the data, and if it is over, in the next.
        for _ in range(2):
            found = self._remaining(count)
            if found >= per_step:
                return found
            if not self._by_epochs:
                break
            self._epoch += 1
            if self._epoch >= self._progress.first_epoch + (self._duration.epochs or 0):
                raise self._not_reached(self.step)
            self._next_epoch()
        raise DataExhausted(
            f"A replay reads the elements that the training read, and this dataset ends before "
            f"step {self.step}: {found} elements are left, a step takes {per_step}. Give the dataset "
            f"that was trained on, from its start."
        )

    def _remaining(self, count: int) -> int:
        """How many of the next elements this pass over the data has."""
        length = as_dataset(self._dataset).length
        if length is None or not self._by_epochs or not self._by_length:
            return self._feed.remaining(count)
        # A sampler of PyTorch draws once more at its end, and its next pass would have another order.
        left = max(0, length - self._feed.position)
        return self._feed.remaining(min(count, left)) if left else 0

    def _next_epoch(self) -> None:
        if not as_dataset(self._dataset).restartable:
            raise ProgramError(
                "A replay over several epochs reads its dataset several times, and this one can be "
                "read only once. Give a re-iterable, or a function that makes an iterator."
            )
        self._feed.restart(self._dataset, self._epoch)


class RunnerPair:
    """The loop of an engine in two forms, on one state: silent, and loud with what taps look at.

    Args:
        engine: made for looking back; its program is in use.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.loud = engine, engine.runner
        # Outfeeds of the model itself have delivered what these steps send out already.
        outfeeds = self.loud.traced.outfeeds
        self.loud.muted = frozenset(queue for queue in outfeeds if queue is not engine.scalars)
        self.silent = _unobserved(engine, self.loud)
        self.loud.keep_elements = True

    def set_longest(self, longest: int) -> None:
        """The most steps of a dispatch of the training: the program that ran is to run again."""
        # A loop with room for one pass is no loop to XLA, which then rounds differently (one loss in 25
        # was another, by one bit): room for two.
        self.silent.capacity, self.loud.capacity = longest, min(2, longest)

    def run(self, length: int, looking: bool = False, block: Staged | None = None) -> Results:
        """Run steps: on the next elements of the dataset, or on a block."""
        engine = self._engine
        engine.swap(self.loud if looking else self.silent)
        ticket = engine.dispatch(length, block=block, following=0)
        results = engine.collect(ticket)
        if results.failure is not None:
            raise results.failure
        return results


def looking_back(taps: Sequence[Any], observe: Observe) -> list[Any]:
    """The taps of a replay: those asked for, and what made the training skip steps."""
    # A guard that skips changes the state, so a replay without it would take another way. One that
    # stops changes nothing.
    guards = [tap for tap in taps if isinstance(tap, StopOnNonfinite) and tap.skips]
    # One step is looked at, whatever its number: with a period, its records would have the step of the
    # next look, or would be left out.
    return [*map(in_every_step, parse_taps(observe)), *guards]


def has_taps(engine: Engine) -> bool:
    """Whether an engine observes tensors, and not only guards against bad numbers."""
    return any(isinstance(tap, Tap) for tap in engine.taps)


def twin_of(engine: Engine, observe: Observe, fingerprint: bool = False) -> Engine:
    """An engine for the same model, with other taps; its state is still to be set.

    Args:
        engine: the engine of the model.
        observe: taps.
        fingerprint: whether it takes fingerprints, even if the engine takes none.
    """
    observe = looking_back(engine.taps, observe)
    params, model_state = jax.tree.map(_blank, (engine.form.params, engine.form.model_state))
    if engine.pipeline is not None:
        # Shared weights are in the state once; a pipeline is given them in all their places.
        params = engine.pipeline.tie(params)
    own = {"fingerprint": True} if fingerprint else {}
    state = {"params": params, "model_state": model_state}
    with engine.placement.within():
        twin: Engine = engine.again(**state, observe=observe, build=engine.build, **own)
    return twin


def _blank(form: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray | float:
    # The values of the checkpoint replace it; only shape and dtype matter.
    if is_key(form):
        return jax.random.split(jax.random.key(0, impl=key_generator(form.dtype)), form.shape)
    if form.weak_type and form.shape == ():  # a number of Python stays one: the step may widen it
        return np.zeros((), form.dtype).item()
    blank = np.zeros(form.shape, form.dtype)
    return blank if form.sharding is None else jax.device_put(blank, form.sharding)


def _unobserved(engine: Engine, loud: LoopRunner) -> LoopRunner:
    """The same loop without taps; guards, and the gradients for fingerprints, stay."""
    kept = {
        position: [want for want in wants if want.digest or want.guard]
        for position, wants in engine.sight.wanted.items()
    }
    return loud.observing({position: wants for position, wants in kept.items() if wants})
