"""An iterator over the stream of a `Batches` recipe.

There are three ways to read: one batch (`next`), many stacked (`read`), and only the indices of the
examples (`indices`). They share one position and give the same batches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tailrace.base.checks import check_count
from tailrace.base.trees import Tree, rebuild
from tailrace.data.batch_recipe import BatchRecipe
from tailrace.errors import DataError

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class BatchIterator:
    """An iterator over the stream of a `Batches` recipe, with a position.

    `next`, `read` and `indices` may be mixed; each continues where the last one stopped. Not safe for
    use from several threads at once.
    """

    def __init__(self, batches: BatchRecipe, epoch: int = 0) -> None:
        self.batches = batches
        self.first_epoch = epoch
        self._position = 0
        self._order: tuple[int, np.ndarray] | None = None  # the cached order of one epoch

    @property
    def position(self) -> int:
        """The number of batches delivered by this iterator."""
        return self._position

    def seek(self, position: Any) -> None:
        """Seek to a position, forwards or back; the next batch is the one with that index."""
        check_count("position", position, at_least=0)
        if not self.batches.repeat and position > self.batches.batches_per_epoch:
            raise DataError(
                f"A position is within the stream, which has {self.batches.batches_per_epoch} "
                f"batches. Received: position={position}. Use repeat=True to go on past the end."
            )
        self._position = int(position)

    def get_state(self) -> dict[str, Any]:
        """The position in the stream, as values for JSON."""
        here = {"first_epoch": self.first_epoch, "position": self._position}
        return {**self.recipe(), **here}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called, on this or on an equal recipe."""
        self.check_recipe(state)
        check_count("first_epoch", state.get("first_epoch"), at_least=0)
        self.seek(state.get("position"))
        self.first_epoch = int(state["first_epoch"])

    def check_recipe(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a stream with other batches, or in another order."""
        for name, value in self.recipe().items():
            # Every field must be there: a state without one comes from another kind of source.
            if name in state and state[name] == value:
                continue
            raise DataError(
                "A state belongs to the recipe that it was saved from, or the stream would "
                f"continue elsewhere. Received a state with {name}={state.get(name)!r}, "
                f"but these batches have {name}={value!r}."
            )

    def recipe(self) -> dict[str, Any]:
        """What determines the stream, except the arrays and the first epoch, as values for JSON."""
        recipe = self.batches
        return {
            "num_examples": recipe.num_examples,
            "batch_size": recipe.batch_size,
            "shuffle": recipe.shuffle,
            "seed": recipe.seed,
            "repeat": recipe.repeat,
            "drop_remainder": recipe.drops,
            "left_out": list(recipe.left_out),
            "batches_per_epoch": recipe.batches_per_epoch,
        }

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Tree:
        recipe = self.batches
        if not recipe.repeat and self._position >= recipe.batches_per_epoch:
            raise StopIteration
        # The position alone decides the epoch and the batch in it: that is why seeking costs nothing.
        epoch, number = divmod(self._position, recipe.batches_per_epoch)
        start = number * recipe.batch_size
        stop = min(start + recipe.batch_size, recipe.num_examples)
        if not recipe.ordered:
            rows = self._order_of(epoch)[start:stop]
            taken = (np.take(leaf, rows, axis=0, mode="clip") for leaf in recipe.leaves)
        else:
            # Copies: the caller may write to a batch, and devices may alias it.
            taken = (leaf[start:stop].copy() for leaf in recipe.leaves)
        batch = rebuild(recipe.arrays, taken)
        self._position += 1
        return batch

    def read(self, n: int, allocate: Allocate = np.empty) -> tuple[Tree, int]:
        """Up to `n` batches at once, stacked: each leaf has the shape [m, batch_size, ...].

        Args:
            n: the most batches to read.
            allocate: called as `allocate(shape, dtype)` once for each leaf, in tree order; the result
                is filled and returned. It must not be memory that is still in use.

        Returns:
            The tree of stacked arrays and m, the number of batches in them. m < n at the end of
            the stream, and before a smaller last batch (`drop_remainder=False`), which cannot be
            stacked and is left for `next`.
        """
        spans = self._spans(n)
        count = sum(stop - start for _, start, stop in spans)
        recipe, size = self.batches, self.batches.batch_size
        stacked = [allocate((count, size, *a.shape[1:]), a.dtype) for a in recipe.leaves]
        done = 0
        for epoch, start, stop in spans:
            rows = slice(start * size, stop * size)
            here = slice(done, done + stop - start)
            order = self._order_of(epoch)[rows].reshape(-1, size) if not recipe.ordered else None
            for source, target in zip(recipe.leaves, stacked, strict=True):
                if order is None:
                    np.copyto(target[here], source[rows].reshape(-1, size, *source.shape[1:]))
                else:
                    # Not mode="raise", with which NumPy gathers into a buffer and copies that to `out`.
                    np.take(source, order, axis=0, out=target[here], mode="clip")
            done = here.stop
        self._position += count
        return rebuild(recipe.arrays, iter(stacked)), count

    def indices(self, n: int) -> np.ndarray:
        """Like `read`, but only the indices of the examples: an array [m, batch_size].

        For arrays that are on a device: `leaf[indices]` there equals the result of `read` here.
        """
        spans = self._spans(n)
        size = self.batches.batch_size
        # Half the bytes to transfer, and JAX would narrow them anyway.
        narrow = self.batches.num_examples <= np.iinfo(np.int32).max
        count = sum(stop - start for _, start, stop in spans)
        found = np.empty((count, size), np.int32 if narrow else np.int64)
        done = 0
        for epoch, start, stop in spans:
            here = slice(done, done + stop - start)
            found[here] = self._order_of(epoch)[start * size : stop * size].reshape(-1, size)
            done = here.stop
        self._position += count
        return found

    def _spans(self, n: int) -> list[tuple[int, int, int]]:
        """At most the next `n` batches as (epoch, first, last + 1), without a smaller last one."""
        check_count("n", n, at_least=0)
        recipe = self.batches
        per_epoch, whole = recipe.batches_per_epoch, recipe.whole_batches_per_epoch
        spans: list[tuple[int, int, int]] = []
        position = self._position
        while n > 0 and (recipe.repeat or position < per_epoch):
            epoch, start = divmod(position, per_epoch)
            stop = min(start + n, whole)
            if stop > start:
                spans.append((epoch, start, stop))
            # The next batch is a smaller one, which only `next` can give: stacked ones have one shape.
            if whole < per_epoch and stop == whole:
                break
            n -= stop - start
            position += stop - start
        return spans

    def _order_of(self, epoch: int) -> np.ndarray:
        epoch += self.first_epoch
        # One epoch is kept: drawing an order takes longer than reading a block of it, and blocks rarely
        # reach into the next.
        if self._order is None or self._order[0] != (epoch if self.batches.shuffle else 0):
            # Without shuffling, all epochs have the same order.
            self._order = (epoch if self.batches.shuffle else 0, self.batches.order(epoch))
        return self._order[1]
