"""Datasets of other libraries, one small class each.

Nothing here imports those libraries. An object can be one of theirs only if its module is loaded
already, so `FOREIGN` is a table by module name, and an entry is consulted only if that module is in
`sys.modules`; it gets the module and the object, and returns an adapter or None.
"""

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tailrace.base.trees import Tree, leaf_called, leaves_with_paths
from tailrace.data.dataset import Dataset, hinted_length
from tailrace.data.leaves import join_numbers, to_numpy_tree
from tailrace.data.resumable import resumable
from tailrace.errors import DataError


class TensorFlowDataset(Dataset):
    """A `tf.data.Dataset`. Its arrays alias TensorFlow's memory: read-only and not copied."""

    def __init__(self, tf: ModuleType, dataset: Any) -> None:
        _refuse_what_tensorflow_cannot_hand_over(tf, dataset.element_spec)
        self._dataset = dataset
        self.exact = True
        self.name = f"tf.data dataset ({type(dataset).__name__.lstrip('_')})"
        cardinality = int(dataset.cardinality())
        # TensorFlow has negative numbers for "unknown" and "infinite".
        self.length = cardinality if cardinality >= 0 else None
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """A new iterator; a shuffle in the dataset reshuffles if it is configured to."""
        # Without a position: TensorFlow's iterators have a state only in its own checkpoints.
        return map(to_numpy_tree, self._dataset.as_numpy_iterator())


class GrainDataset(Dataset):
    """A grain `MapDataset`, `IterDataset` or `DataLoader`."""

    # A repeated MapDataset has a length near sys.maxsize (divided by the batch size, if batched).
    _ENDLESS = 2**40

    def __init__(self, grain: ModuleType, dataset: Any) -> None:
        self._dataset = self.origin = dataset
        self.name = f"grain {type(dataset).__name__}"
        # The length of a MapDataset counts elements that a filter will drop: it is only a bound.
        self.endless = isinstance(dataset, grain.MapDataset) and len(dataset) >= self._ENDLESS

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """A fresh iterator."""
        return resumable(to_numpy_tree, self._dataset)


class TorchDataLoader(Dataset):
    """A PyTorch `DataLoader`. Tensors become arrays over the same memory."""

    def __init__(self, torch: ModuleType, loader: Any) -> None:
        self._loader = self.origin = loader
        self.name = f"PyTorch DataLoader over {type(loader.dataset).__name__}"
        self.length = hinted_length(loader)
        self.pure = self.exact = _has_no_code_of_others(torch.utils.data, loader)
        # Workers that persist go on with their own random numbers in each pass.
        self.pure &= not getattr(loader, "persistent_workers", False)

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """A fresh iterator; a sampler that shuffles draws a new order."""
        return resumable(_torch_element, self._loader)


def _has_no_code_of_others(data: Any, loader: Any) -> bool:
    """Whether PyTorch itself decides the rows of each pass: their order is then that of a seed."""
    if type(loader) is not data.DataLoader or isinstance(loader.dataset, data.IterableDataset):
        return False
    samplers = (
        data.SequentialSampler,
        data.RandomSampler,
        data.SubsetRandomSampler,
        data.WeightedRandomSampler,
        data.DistributedSampler,
    )
    cut = loader.batch_sampler
    own = cut is None or type(cut) is data.BatchSampler
    return own and type(loader.sampler) in samplers


def _torch_element(element: Tree) -> Tree:
    return to_numpy_tree(_lists_to_tuples(join_numbers(element)))


class KerasPyDataset(Dataset):
    """A `PyDataset` of Keras: read by index, with its calls at the start and the end of an epoch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = self.origin = dataset
        self.name = f"PyDataset {type(dataset).__name__}"
        self.length = dataset.num_batches
        self.exact = True

    def iterate(self, epoch: int = 0) -> Iterator[Tree]:
        """Its batches, in the order of their indices."""
        dataset = self._dataset
        if hasattr(dataset, "on_epoch_begin"):
            dataset.on_epoch_begin()
        # A number of batches that is None is one without end, as in Keras.
        indices = itertools.count() if self.length is None else range(self.length)
        for index in indices:
            yield to_numpy_tree(dataset[index])
        dataset.on_epoch_end()


def _lists_to_tuples(tree: Tree) -> Tree:
    # default_collate turns the tuple that a dataset returns into a list; undo that, so that
    # `return image, label` arrives as (image, label).
    if isinstance(tree, list) or type(tree) is tuple:
        return tuple(_lists_to_tuples(child) for child in tree)
    if isinstance(tree, dict):
        return {key: _lists_to_tuples(child) for key, child in tree.items()}
    return tree


def _refuse_what_tensorflow_cannot_hand_over(tf: ModuleType, element_spec: Tree) -> None:
    for path, spec in leaves_with_paths(element_spec):
        kind = type(spec).__name__
        if not isinstance(spec, tf.TensorSpec):
            if kind == "NoneTensorSpec":
                continue  # an element with a None in it, which is an empty branch
            raise DataError(
                f"The elements of a tf.data dataset must be dense tensors, but {leaf_called(path)} "
                f"is described by a {kind}. Make it dense with map(), for example by to_tensor() "
                "or tf.sparse.to_dense()."
            )
        if spec.dtype == tf.string:
            raise DataError(
                "A dataset holds numbers and booleans only, but in the tf.data dataset "
                f"{leaf_called(path)} is a tf.string. Encode it as numbers, or drop it with map()."
            )


def _tensorflow(tf: ModuleType, obj: object) -> Dataset | None:
    return TensorFlowDataset(tf, obj) if isinstance(obj, tf.data.Dataset) else None


def _grain(grain: ModuleType, obj: object) -> Dataset | None:
    kinds = (grain.MapDataset, grain.IterDataset, grain.DataLoader)
    return GrainDataset(grain, obj) if isinstance(obj, kinds) else None


def _torch(torch: ModuleType, obj: object) -> Dataset | None:
    data = torch.utils.data
    if isinstance(obj, data.DataLoader):
        return TorchDataLoader(torch, obj)
    if isinstance(obj, data.Dataset) and not isinstance(obj, data.IterableDataset):
        raise DataError(
            f"A PyTorch Dataset ({type(obj).__name__}) gives single examples, not the batches that "
            "a step takes. Wrap it: torch.utils.data.DataLoader(dataset, batch_size=..., "
            "drop_last=True)."
        )
    return None


def _keras(keras: ModuleType, obj: object) -> Dataset | None:
    return KerasPyDataset(obj) if isinstance(obj, keras.utils.PyDataset) else None


FOREIGN: dict[str, Callable[[ModuleType, Any], Dataset | None]] = {
    "tensorflow": _tensorflow,
    "grain": _grain,
    "torch": _torch,
    "keras": _keras,
}
