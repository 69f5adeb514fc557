"""What comes in: datasets of every kind behind one face, and how fast they deliver.

    batches                  arrays in memory as a stream of batches: the recipe
    batch_iterator           its running half, which can be read in three ways and set to any place
    dataset                  the face that every dataset has inside
    adapters                 as_dataset: iterables, functions, and sentences for what is no dataset
    foreign                  tf.data, grain and PyTorch, recognised without importing them
    digits                   real handwritten digits without a download
    benchmark                elements a second, measured as an infeed reads them
    producer                 the thread that reads ahead for it
    bottleneck               is the data or the device what a run waits for?
    report                   the benchmark as a table
    trees                    the form of an element, and what its leaves are called
    leaves, dtypes, counts   what a leaf becomes, may hold; how a number is checked

Nothing in this room imports JAX.
"""

from tailrace.data.adapters import as_dataset
from tailrace.data.batches import Batches, batches
from tailrace.data.benchmark import dataset_benchmark, infeed_benchmark
from tailrace.data.bottleneck import verdict
from tailrace.data.dataset import Dataset
from tailrace.data.digits import digits

__all__ = [
    "as_dataset",
    "Batches",
    "batches",
    "Dataset",
    "dataset_benchmark",
    "digits",
    "infeed_benchmark",
    "verdict",
]
