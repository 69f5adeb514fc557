"""The base of training, evaluation and prediction: runs blocks of batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import keras

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import DataError, ProgramError
from tailrace.feeds import buffers, dispatch_table
from tailrace.feeds.feed import Staged
from tailrace.keras.data.batch_source import Batches, Block, Form
from tailrace.keras.data.resident_batches import ResidentBatches
from tailrace.keras.handles import settings_of
from tailrace.keras.programs.logs import Later, Number, Series, Unheard, Values
from tailrace.keras.programs.pacing import Pacing
from tailrace.program.running.placement import Placement


def as_element(batch: Tree) -> dict[str, Any]:
    """A Keras batch as the element that programs see: its parts by name."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def as_batch(element: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of `as_element`."""
    parts = (element.get("x"), element.get("y"), element.get("sample_weight"))
    last = max(number for number, part in enumerate(parts) if part is not None)
    return parts[: last + 1]


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The position of a resumed fit in its first epoch.

    Attributes:
        done: the batches of the epoch that are counted but not run.
        skipped: the batches that were taken from the current data.
        begun: the number of times data was begun, including this time.
        logs: the logs of the last batch done.
        after: called once they are skipped; None for nothing.
    """

    done: int
    skipped: int
    begun: int
    logs: Mapping[str, float | None]
    after: Callable[[], None] | None


class Executions(ABC):
    """Takes batches from Keras' iterator and runs them, one execution per call.

    Args:
        model: the model.
        placement: where it runs.
        per_step: a dispatch takes a multiple of this number of batches, over all replicas.
    """

    drops_remainder = False
    """Whether to drop batches at the end of the data that do not divide over replicas."""

    def __init__(self, model: keras.Model, placement: Placement, per_step: int) -> None:
        self.model, self.placement, self.per_step = model, placement, per_step
        self.pacing = Pacing()
        self._sharding = placement.shared_out
        self.names: dict[str, tuple[int, ...]] = {}
        """The metrics in the logs, and their shapes."""
        self.latest: dict[str, Values] = {}
        """Those of the latest dispatch that are numbers."""
        self._latest_count = 0
        self._room = 1
        self._forms: dict[Any, Form] = {}
        self._batches: Batches | ResidentBatches | None = None
        self._tickets: deque[tuple[Any, int]] = deque()
        self._in_flight: dict[tuple[Form, int], int] = {}
        self.begun = self.taken = 0
        """The number of times data was begun in this fit, and the batches taken since."""
        self.exhausted = False
        """Whether that data has ended."""
        self.inside = False
        """Whether an execution has run only in part."""
        self._resumed: Resumed | None = None
        self.nested = 0
        """How many calls of the same model run inside callbacks of this one."""

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.placement.replicas

    # -- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def dispatch(self, block: Block) -> tuple[Any, Any]:
        """Run a block; returns an array that is ready afterwards, and its results."""

    @abstractmethod
    def run(self, state: Tree, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run one execution from Keras' state; returns logs or outputs, and the next state."""

    @abstractmethod
    def fill(self) -> None:
        """Write the values to the variables."""

    def element(self, batch: Tree) -> Any:
        """The element of a batch."""
        return as_element(batch)

    # -- running --------------------------------------------------------------------------------

    def execute(self, iterator: Iterator[Any]) -> list[Any]:
        """Run one execution; returns the results of its dispatches. Raises StopIteration at the end."""
        pacing = self.pacing
        # Keras counts through executions that ran together with an earlier one.
        if pacing.already():
            return [self.latest]
        batches = self._open(iterator)
        size = batches.bytes_per_batch()
        # Keras stops after the first execution where `stop_training` is set before, such as at the
        # beginning of the epoch: no other may have run together with it.
        stopping = getattr(self.model, "stop_training", False)
        wanted = pacing.wanted(size, together=not stopping)
        results: list[Any] = []
        done, self.inside = 0, False
        while done < wanted:
            piece = min(pacing.piece(size, wanted), wanted - done)
            ahead = pacing.reads_on(done + piece, piece)
            # One program serves all lengths up to the longest, which runs first. Single batches have
            # one of their own: room for more would travel with each of them.
            self._room = max(self._room, piece)
            room = piece if pacing.single else self._room
            block = batches.take(piece, self.replicas, self._sharding, ahead, room)
            if block is None:
                break
            # A failure of the dataset explains a short block better than a count does.
            if block.count % self.per_step:
                if batches.failure is not None:
                    raise batches.failure
                block = self._whole(block)
                if block is None:
                    break
            ticket, result = self.dispatch(block)
            if ahead and pacing.arrays and piece < dispatch_table.THREAD_FROM:
                batches.read_next()  # while the device computes
            # From here to the end of the execution there is no position to save: Keras counts whole
            # executions.
            self.inside = True
            results.append(result)
            self._latest_count = block.count
            self._wait(ticket, block.form, block.count)
            if pacing.tells:
                steps = block.count // self.replicas
                step_logs = functools.partial(self.step_logs, result, steps)
                pacing.call_callbacks(done, block.count, done + block.count >= wanted, step_logs)
            done += block.count
        # As the functions of Keras do: its loop over an epoch ends by this exception.
        if not done:
            self.exhausted = True
            raise StopIteration
        pacing.took(done)
        self.taken += done
        self.inside = False
        return results

    def reading(self) -> Batches | None:
        """The data that the caller's thread reads; None if it reads none."""
        batches = self._batches
        return batches if isinstance(batches, Batches) and batches.reads_here else None

    def resume(self, resumed: Resumed, pacing: Pacing) -> None:
        """Resume inside an epoch, or in data that an earlier epoch has begun."""
        self._resumed = resumed
        self.begun = resumed.begun - bool(resumed.skipped)
        pacing.skip(resumed.done)

    def restore(self, state: Tree) -> None:
        """Restore the variables that Keras passed in, if nothing was computed from them."""
        values = [value for part in state for value in part or ()]
        variables = self.handed_over()
        if len(values) == len(variables):
            for variable, value in zip(variables, values, strict=True):
                # A donated array cannot be read any more; its variable keeps the value it has.
                if not getattr(value, "is_deleted", bool)():
                    variable.assign(value)

    @contextlib.contextmanager
    def set_aside(self, called: str) -> Iterator[None]:
        """While a callback calls the model again: data and counts of the call around it are kept.

        Args:
            called: what it calls.
        """
        if self.inside or self.pacing.owes:
            raise ProgramError(
                f"A model can be trained further in a callback where Keras' batches and the device "
                f"agree. Received: {called} of the model {self.model.name!r}, in a callback for a step "
                f"in the middle of an execution. Call it in on_epoch_end, or leave out what moves "
                f"callbacks into executions: asynchronous_callbacks, or async_safe of the callback."
            )
        of_a_call = ("pacing", "latest", "_latest_count", "_batches", "_tickets", "begun", "taken")
        kept = {name: getattr(self, name) for name in (*of_a_call, "exhausted", "_resumed")}
        self._batches, self._resumed, self._tickets = None, None, deque()
        self.begun, self.taken, self.exhausted = 0, 0, False
        self.nested += 1
        try:
            yield
        finally:
            self.nested -= 1
            self.inside = False
            for name, value in kept.items():
                setattr(self, name, value)

    @abstractmethod
    def handed_over(self) -> list[Any]:
        """The variables whose values Keras passes in, in order; empty once they have changed."""

    def end(self) -> None:
        """End a call of fit, evaluate or predict: stops threads."""
        self._tickets.clear()
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        self._resumed = None
        self.pacing = Pacing()  # releases arrays on the device
        buffers.trim()

    def step_logs(
        self, result: Tree, steps: int, step: int, replica: int | None = None
    ) -> dict[str, Any]:
        """The logs of one step of a dispatch: its metrics, or those of one replica."""
        del steps
        return {name: float(values.at(step, replica)) for name, values in result.items()}

    def log_series(self, *sent: Mapping[str, Any]) -> dict[str, Values]:
        """The scalar metrics that one or several dispatches sent out."""
        reduce = settings_of(self.model).metric_reduction
        return {
            name: Series([part[name] for part in sent], self.replicas, reduce) for name in sent[0]
        }

    def logs(self, series: Mapping[str, Values]) -> dict[str, Any]:
        """The metrics after a dispatch, still on the device."""
        if self._resumed is not None:  # nothing has run yet
            return _logs_of(self._resumed)
        self.latest = dict(series)
        # Keras reads logs even if no callback does, and each read would wait for the device.
        if not self.pacing.listeners:
            return Unheard(self.names)
        step = self.pacing.last_step(self._latest_count)
        step = step if step >= 0 else -1  # it ran in an earlier dispatch
        return {
            name: Number(series[name], step) if name in series else Later(shape)
            for name, shape in self.names.items()
        }

    # -- inside ---------------------------------------------------------------------------------

    def _open(self, iterator: Iterator[Any]) -> Batches | ResidentBatches:
        # Keras makes an iterator for each epoch, except where one continues through several.
        if self._batches is None or self._batches.iterator is not iterator:
            if self._batches is not None:
                self._batches.close()
            rows = self.pacing.resident
            self._batches = (
                Batches(iterator, self.element, self._forms, self.pacing.patience)
                if rows is None
                else ResidentBatches(iterator, self.element, self._forms, rows)
            )
            self.begun, self.taken, self.exhausted = self.begun + 1, 0, False
            self._skip(self._batches)
        return self._batches

    def _skip(self, batches: Batches | ResidentBatches) -> None:
        """Seek to the position of the data at the checkpoint."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or not resumed.skipped:
            return
        batches.skip(resumed.skipped)
        self.taken = resumed.skipped
        # Reading the skipped batches drew random numbers once more: now those of the checkpoint
        # count.
        if resumed.after is not None:
            resumed.after()

    def _wait(self, ticket: jax.Array, form: Form, count: int) -> None:
        """Wait, so that no more dispatches are in flight than the device's memory allows."""
        self._tickets.append((ticket, count))
        # The cheapest question first: of a small model, this is asked for every batch.
        least = dispatch_table.IN_FLIGHT
        if len(self._tickets) <= least:
            return
        most = self._most_in_flight(form, count)
        if len(self._tickets) <= most:
            return
        done, kept = 0, most if most == least else most // 2
        while len(self._tickets) > kept:  # of many short ones not each is waited for
            ticket, count = self._tickets.popleft()
            done += count
        jax.block_until_ready(ticket)
        self.pacing.ready(done / self.pacing.execution)

    def _most_in_flight(self, form: Form, count: int) -> int:
        key = (form, count)
        if key not in self._in_flight:  # every execution needs it, and it does not change
            size = form.spec.nbytes * count
            fitting = dispatch_table.most_bytes() // (size + 1)
            most = max(dispatch_table.IN_FLIGHT, min(dispatch_table.MOST_IN_FLIGHT, fitting))
            self._in_flight[key] = most
        return self._in_flight[key]

    def _whole(self, block: Block) -> Block | None:
        """A block without batches at its end that do not fill a step."""
        # Keras trains on what is left. Replicas take one batch each, and a step needs all of its
        # microbatches, or the mean over them would be another one.
        left = block.count % self.per_step
        known = self.pacing.batches is not None  # and so what replicas cannot share was left out
        if not self.drops_remainder and (known or self.per_step > self.replicas):
            size = block.form.spec.leaves[0].shape[:1]
            raise DataError(
                f"The provided set of data has a partial batch, or ends, where a step of "
                f"{self.per_step} batches (microbatches x replicas) needs more: {block.count} "
                f"batches of {size[0] if size else 1} examples are left. Make the number of examples "
                f"a multiple of the batch size, and of batches a multiple of {self.per_step}; "
                f"tf.data has drop_remainder=True."
            )
        note_once(
            f"The last {left} batches do not divide evenly over {self.replicas} replicas and are "
            f"dropped.",
            key=f"keras dropped {left} {self.replicas}",
        )
        count = block.count - left
        if not count:
            return None
        whole, passes = block.staged, count // self.replicas
        host = [leaf[:count] for leaf in whole.host]
        return Block(
            block.form, count, Staged(host, whole.device, passes, self.replicas), block.sharding
        )


def _logs_of(resumed: Resumed) -> dict[str, Any]:
    """The logs of a batch that was done before, as far as they were saved."""
    kept = {name: Later(()) if value is None else value for name, value in resumed.logs.items()}
    return kept if any(v is not None for v in resumed.logs.values()) else Unheard(kept)


def part(staged: Staged, first: int, count: int) -> Staged:
    """Some iterations of a block."""
    replicas = staged.replicas
    host = [leaf[first * replicas : (first + count) * replicas] for leaf in staged.host]
    device = tuple(leaf[first : first + count] for leaf in staged.device)
    return Staged(host, device, count, replicas)


def exact(staged: Staged) -> Staged:
    """A block without padding."""
    return staged if staged.room == staged.count else part(staged, 0, staged.count)
