"""Input: datasets of every kind behind one interface.

In: arrays, iterables, functions, and datasets of tf.data, grain and PyTorch.
Out: a `Dataset`: a stream of elements, each a tree of NumPy arrays, with a position if it has one.

    batches                  arrays in memory as a stream of batches: the recipe
    batch_iterator           its iterator: three ways to read, and seeking
    dataset                  the interface of every dataset
    adapters                 as_dataset: iterables, functions, and errors for anything else
    foreign                  tf.data, grain and PyTorch, recognised without importing them
    resumable                iterators with get_state and set_state
    no_data                  elements without data, for fits that need none
    typed_keys               random keys as numbers, on their way to the device
    form_runs                a dataset as runs of elements of equal shapes
    digits                   real handwritten digits without a download
    leaves, dtypes           conversion of leaves, and allowed dtypes

Rule: nothing here imports JAX, so that data can be inspected and benchmarked without starting it.
"""

from tailrace.data.adapters import as_dataset
from tailrace.data.batches import Batches, batches
from tailrace.data.dataset import Dataset
from tailrace.data.digits import digits

__all__ = [
    "as_dataset",
    "Batches",
    "batches",
    "Dataset",
    "digits",
]
