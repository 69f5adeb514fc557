"""Batches that their source may overwrite, copied while they are still what they were.

On an accelerator Keras reads one batch ahead: it takes the next batch from a dataset before it hands
out the one before. We keep batches in the memory of the host until a block is full, where JAX shares an
array with NumPy instead of copying it. A dataset that fills the same array again and again, which is
fine in Keras, would then change a batch that is still to be trained on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from tailrace.base.trees import Tree
from tailrace.keras.data.wrapped_dataset import WrappedDataset


def reads_ahead() -> bool:
    """Whether Keras transfers each batch, and reads the next one before it hands it out."""
    return jax.default_backend() != "cpu"


def copy_batches(call: dict[str, Any], *names: str) -> None:
    """Replace some arguments of a call, where Keras reads ahead, by data whose batches are copies."""
    for name in names:
        if name in call and reads_ahead():
            call[name] = copying(call[name])


def copying(data: Tree) -> Any:
    """Data for Keras whose batches are never overwritten; only what makes its own arrays is wrapped.

    Keras slices arrays, and tensors of other libraries are fresh for each batch.
    """
    if isinstance(data, keras.utils.PyDataset):
        return data if isinstance(data, _CopiedDataset) else _CopiedDataset(data)
    if inspect.isgenerator(data):
        return _batches(data)
    return data


def _batches(generator: Iterator[Any]) -> Iterator[Any]:
    for batch in generator:
        yield _copy(batch)


def _copy(batch: Tree) -> Any:
    def own(leaf: object) -> Any:
        # Tensors of other libraries are fresh for each batch, as `copying` says.
        return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

    return keras.tree.map_structure(own, batch)


class _CopiedDataset(WrappedDataset):
    """A dataset that hands out copies of another one's batches."""

    def __getitem__(self, index: int) -> Any:
        return _copy(self._inner[index])

    def on_epoch_begin(self) -> None:
        """Keras says so before each epoch."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras says so after each epoch."""
        self._inner.on_epoch_end()
