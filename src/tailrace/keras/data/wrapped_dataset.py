"""A PyDataset around another one, for those that change what Keras gets, or listen to its calls."""

from __future__ import annotations

from typing import Any

import keras


class WrappedDataset(keras.utils.PyDataset):
    """The batches of another dataset; the calls between epochs are for those that derive from it.

    Args:
        inner: the dataset inside.
    """

    def __init__(self, inner: keras.utils.PyDataset) -> None:
        # As the one inside: Keras starts its threads or processes by these.
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner = inner

    def __getitem__(self, index: int) -> Any:
        return self._inner[index]

    @property
    def num_batches(self) -> Any:
        """How many batches there are; None if that is unknown."""
        return self._inner.num_batches
