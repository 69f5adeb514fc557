"""What comes in: datasets of every kind behind one face.

    batches                  arrays in memory as a stream of batches: the recipe
    batch_iterator           its running half, which can be read in three ways and set to any place
    dataset                  the face that every dataset has inside
    adapters                 as_dataset: iterables, functions, and sentences for what is no dataset
    foreign                  tf.data, grain and PyTorch, recognised without importing them
    digits                   real handwritten digits without a download
    trees                    the form of an element, and what its leaves are called
    leaves, dtypes, counts   what a leaf becomes, may hold; how a number is checked

Nothing in this room imports JAX.
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
