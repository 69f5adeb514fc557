"""The real TensorFlow, where it is installed: for what is done on the host.

Datasets, files, images, summaries and text are TensorFlow's own, passed through by name. Where it is
not installed they are refused by name.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.strategy.dataset_iteration import hook_datasets
from tailrace.compat.nests import map_leaves
from tailrace.compat.tensorflow.structures import TensorSpec
from tailrace.errors import MissingDependency

MODULES = frozenset(
    [
        "audio",
        "autodiff",
        "config",
        "data",
        "debugging",
        "errors",
        "experimental",
        "feature_column",
        "image",
        "io",
        "lite",
        "lookup",
        "mlir",
        "profiler",
        "queue",
        "quantization",
        "ragged",
        "raw_ops",
        "saved_model",
        "signal",
        "sparse",
        "strings",
        "summary",
        "sysconfig",
        "test",
        "tpu",
        "types",
        "version",
        "xla",
    ]
)
"""Modules that are TensorFlow's own, but for names in them that are operations here."""

NAMES = frozenset(
    [
        "IndexedSlices",
        "RaggedTensor",
        "RaggedTensorSpec",
        "SparseTensor",
        "SparseTensorSpec",
        "as_string",
        "numpy_function",
        "py_function",
        "load_library",
        "load_op_library",
        "timestamp",
    ]
)
"""Names at the top that are TensorFlow's own."""


def installed() -> bool:
    """Whether TensorFlow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


def tensorflow(what: str = "tensorflow") -> Any:
    """The module; raises an error that names what was asked for if it is not installed.

    Args:
        what: the name that was asked for, for the message.
    """
    try:
        import tensorflow  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingDependency(
            f"tf.{what} is done on the host by TensorFlow itself, which is not installed here. Install "
            f"it: pip install tensorflow-cpu. Or feed programs with tr.batches(arrays, batch_size), "
            f"generators or a PyTorch loader."
        ) from error
    # In the scope of a strategy its datasets are infeeds, even if it is first loaded there.
    hook_datasets()
    _accept_specs(tensorflow.data.Dataset)
    return tensorflow


@functools.cache
def _accept_specs(dataset: type[Any]) -> None:
    """Let `from_generator` take `tf.TensorSpec`, which is our class, not TensorFlow's; once."""
    plain = dataset.from_generator

    @functools.wraps(plain)
    def from_generator(*args: Any, **kwargs: Any) -> Any:
        # By name: the positions before it are those of older arguments, which exclude it.
        if "output_signature" in kwargs:
            kwargs["output_signature"] = map_leaves(_own_spec, kwargs["output_signature"])
        return plain(*args, **kwargs)

    dataset.from_generator = staticmethod(from_generator)


def _own_spec(spec: object) -> Any:
    if not isinstance(spec, TensorSpec):
        return spec
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return named("TensorSpec")(shape, spec.dtype.name, spec.name)


def named(path: str) -> Any:
    """The object of TensorFlow with a name, such as `data.Dataset`."""
    found = tensorflow(path)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def has(path: str) -> bool:
    """Whether TensorFlow is loaded or installed and has a name."""
    if not installed():
        return False
    try:
        named(path)
    except (AttributeError, ImportError):
        return False
    return True


def is_tensor(value: TensorLike) -> bool:
    """Whether a value is a tensor or a variable of the real TensorFlow."""
    kind = type(value)
    if "tensorflow" not in sys.modules or kind.__module__.split(".")[0] != "tensorflow":
        return False
    # By name: importing TensorFlow for `isinstance` would take seconds, and most programs do not use
    # it.
    names = {base.__name__ for base in kind.__mro__}
    return not names.isdisjoint(("Tensor", "Variable", "CompositeTensor"))


def is_symbolic(value: TensorLike) -> bool:
    """Whether a TensorFlow tensor has no value yet: inside `dataset.map`."""
    # A tensor of a graph lacks the method; an eager one has it.
    return is_tensor(value) and not hasattr(value, "numpy")


def is_numeric(value: TensorLike) -> bool:
    """Whether a TensorFlow tensor holds numbers, not text."""
    return getattr(value.dtype, "name", "") not in ("string", "resource", "variant")


def to_array(value: TensorLike) -> Any:
    """A TensorFlow tensor that has a value, as an array."""
    return np.asarray(value)
