"""The passes that a training makes over its loader: how many, and how far into the latest.

The loop is the user's own. A loader that the model follows says when a pass begins, when a batch is
asked for and when there is none left; a call says that the batch given last was used.

    for batch in loader:      ◀── here the loop asks: everything before has been done, nothing since
        model(*batch)
        scheduler.step()

So the moment to note for a checkpoint is when the loop asks for a batch: what it does after a call is
then done as well. It is written once the batch is used: a loop that goes on there has one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils import data as torch_data

from tailrace.data.positions.loader_state import loader_state, put_loader_state
from tailrace.errors import CheckpointError

State = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over a loader.

    Attributes:
        origin: the loader.
        loader: what it looks like, to tell it from others.
        began: random numbers and counters before it began.
        settle: waits for what it reads ahead of the loop, in a thread.
        given: the batches that it has given so far.
        is_open: whether it may give more.
        noted: what was noted when the loop last asked for a batch.
    """

    origin: Any
    loader: str
    began: State
    settle: Callable[[], None]
    given: int = 0
    is_open: bool = True
    noted: Any = None


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a training is in its data, as a checkpoint has it.

    Attributes:
        epoch: the passes before the latest one.
        done: the batches that calls have used of that one.
        loader: what its loader looks like; None if the model follows none.
        began: random numbers and counters before the pass began.
        now: the same at this moment.
    """

    epoch: int
    done: int
    loader: str | None
    began: State
    now: State


class Passes:
    """The passes of one training.

    Args:
        note: notes the moment at a position, if a checkpoint is due; None otherwise.
    """

    def __init__(self, note: Callable[[Callable[[], Position]], Any]) -> None:
        self._note = note
        self._epoch, self._done = 0, 0
        self._training: Pass | None = None
        self._given: list[Pass] = []
        self._calling: Pass | None = None
        self._resumed: Position | None = None
        self._taken_up: Pass | None = None

    @property
    def follows(self) -> bool:
        """Whether a loader is followed: only then it is known when the loop asks."""
        return self._training is not None

    # -- called by loaders ----------------------------------------------------------------------

    def follow(
        self, loader: Any, begin: Callable[[], Iterable[Any]], settle: Callable[[], None]
    ) -> Iterator[Any]:
        """One pass over a loader.

        Args:
            loader: the loader.
            begin: begins the pass.
            settle: waits for what it reads ahead of the loop, in a thread.
        """
        resumed, shown = self._resumed, described(loader)
        # Another loader, of a validation say, may be read first.
        if resumed is None or resumed.loader != shown:
            one = Pass(loader, shown, state_of(loader), settle)
            return self._read(one, iter(begin()))
        self._resumed = None
        one = self._taken_up = self._training = Pass(
            loader, shown, resumed.began, settle, resumed.done
        )
        return self._read(one, self._at(one, begin, resumed))

    def _at(self, one: Pass, begin: Callable[[], Iterable[Any]], to: Position) -> Iterator[Any]:
        """The pass from a position on: begun as it was, and read up to there."""
        loader = one.origin
        put_loader_state(loader, to.began)
        if to.epoch and getattr(loader, "persistent_workers", False):
            # Workers that stay were started by the first pass, which drew a number for them.
            torch_data.DataLoader.__iter__(loader)
            put_loader_state(loader, to.began)
        batches = iter(begin())
        for _ in range(to.done):
            if next(batches, self) is self:
                raise CheckpointError(
                    f"The checkpoint is after batch {to.done} of epoch {to.epoch}, and the loader has "
                    f"fewer ({to.loader}). Give it the data that it had."
                )
        if to.done:
            one.settle()
            put_loader_state(loader, to.now)
        return batches

    def _read(self, one: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                # Of a pass that has just begun it is not known whether it is the training's.
                if one is self._training or not one.given:
                    one.noted = self._note(functools.partial(self._position, one))
                batch = next(batches, self)
                if batch is self:
                    return
                one.given += 1
                if one not in self._given:
                    self._given.append(one)
                yield batch
        finally:
            one.is_open = False

    # -- called by the model --------------------------------------------------------------------

    def calling(self) -> Any:
        """Before a call: which loader its batch is from; what was noted when the loop asked for it."""
        given = [one for one in self._given if one.is_open] or self._given[-1:]
        one = self._calling = given[0] if given else None
        if one is None:
            return None
        if len(given) > 1:
            raise CheckpointError(
                f"A model with checkpoint= follows one loader, whose position its checkpoints have. "
                f"Received: batches of {len(given)} at once ({'; '.join(p.loader for p in given)}). "
                f"Join their datasets; for other purposes make a loader with an inference model."
            )
        used = self._done if one is self._training else 0
        if not one.is_open and one.given > used + 1:
            raise CheckpointError(
                f"A model with checkpoint= counts the batches that its loader gives to calls. "
                f"Received: a call after {one.given - used} batches ({one.loader}), which were read at "
                f"once. Call the model inside the loop over the loader."
            )
        if self._resumed is not None:
            raise CheckpointError(
                f"The checkpoint is in epoch {self._resumed.epoch} of a loader "
                f"({self._resumed.loader}), and this call's batch comes from another one "
                f"({one.loader}). Train on the loader that the training began with."
            )
        late = self._taken_up
        if late is not None and one is not late and late.is_open:
            raise CheckpointError(
                f"The training goes on in the loader ({late.loader}) that was read first after "
                f"model.resume(), and this call's batch comes from another one like it. Read the "
                f"loader of the training first."
            )
        noted, one.noted = one.noted, None
        return noted

    def called(self) -> None:
        """After a call: the batch was used."""
        one, self._calling, self._given = self._calling, None, []
        if one is None:
            return
        if one is not self._training:
            self._epoch += self._training is not None
            self._training = one
        self._done, self._taken_up = one.given, None

    # -- for checkpoints ------------------------------------------------------------------------

    def position(self) -> Position:
        """Where the training is before its first call."""
        one = self._calling
        return Position(0, 0, None, {}, state_of(None)) if one is None else self._position(one)

    def _position(self, one: Pass) -> Position:
        """Where it is when the loop asks this pass for a batch."""
        if one is not self._training:
            epoch = self._epoch + (self._training is not None)
            return Position(epoch, 0, one.loader, one.began, {})
        one.settle()  # random numbers that its thread draws are drawn
        return Position(self._epoch, self._done, one.loader, one.began, state_of(one.origin))

    def resume(self, position: Position) -> None:
        """Go on from a position; the loader's next pass begins there."""
        self._epoch, self._done = position.epoch, position.done
        self._training = self._calling = self._taken_up = None
        self._given = []
        self._resumed = position if position.loader is not None else None


def passes_of(options: Any) -> Passes | None:
    """What follows the loaders that were made with a model; None for other options of a loader."""
    # Not `getattr`: a model answers with the attributes of its module.
    return getattr(options, "__dict__", {}).get("_passes")


def described(loader: Any) -> str:
    """What tells a loader from others: the kind and length of its dataset, rows and order.

    >>> described([1, 2, 3])
    'list of 3'
    """
    dataset = getattr(loader, "dataset", loader)
    try:
        length = f" of {len(dataset)}"
    except TypeError:
        length = ""
    text = f"{type(dataset).__name__}{length}"
    if isinstance(loader, torch_data.DataLoader):
        text += f", {type(loader.sampler).__name__}"
        rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        text += f", batches of {rows}" if rows else ""
    return text


def state_of(loader: Any) -> State:
    """Random numbers and counters of a loader and its parts; of None, those of the process."""
    found = loader_state(loader)
    # Numbers of a DataLoader itself are its options, which a script may change.
    if isinstance(loader, torch_data.DataLoader):
        own = [name for name, value in found.items() if _is_option(name, value)]
        found = {name: value for name, value in found.items() if name not in own}
    return found


def _is_option(name: str, value: object) -> bool:
    return name.count(".") == 1 and name.startswith(".") and isinstance(value, int | float)
