"""Summaries of TensorFlow 1: values that a session fetches, and a file that they are written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.deferred import Deferred, deferred_call
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.v1.collections_of_graphs import add_to_collection, get_collection


def _summary(kind: str) -> Any:
    def described(name: str, tensor: TensorLike, *_: Any, **__: Any) -> Deferred:
        found = Deferred(lambda feed: {(kind, name): np.asarray(value(tensor).value(feed))}, name)
        # `merge_all` finds them there.
        add_to_collection("summaries", found)
        return found

    def value(tensor: TensorLike) -> Deferred:
        return tensor if isinstance(tensor, Deferred) else Deferred(lambda _: tensor)

    described.__name__ = kind
    described.__doc__ = "A summary for a session to fetch and a `FileWriter` to write."
    return described


def merge(inputs: Sequence[Deferred], *_: Any, **__: Any) -> Any:
    """Several summaries as one."""
    return deferred_call(_joined, (list(inputs),), {})


def _joined(found: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    return {key: value for one in found for key, value in one.items()}


def merge_all(*_: Any, **__: Any) -> Any:
    """All summaries of the graph as one; None if there are none."""
    found = get_collection("summaries")
    return merge(found) if found else None


class FileWriter:
    """A file of events, which TensorFlow itself writes.

    Args:
        logdir: the directory.
        graph: without effect, as are other options.
    """

    def __init__(self, logdir: str, graph: object = None, **_: Any) -> None:
        del graph
        self._file = host.named("summary.create_file_writer")(logdir)

    def add_summary(self, summary: dict[Any, Any], global_step: int = 0) -> None:
        """Write what a session fetched.

        Args:
            summary: a summary.
            global_step: the number of the step.
        """
        with self._file.as_default():
            for (kind, name), value in summary.items():
                host.named(f"summary.{kind}")(name, value, step=int(global_step))

    def add_graph(self, *_: Any, **__: Any) -> None:
        """Without effect."""

    def flush(self) -> None:
        """Write what is waiting."""
        self._file.flush()

    def close(self) -> None:
        """Write what is waiting, and end the file."""
        self._file.close()


SUMMARIES = {
    **{kind: _summary(kind) for kind in ("scalar", "histogram", "image", "text", "audio")},
    "FileWriter": FileWriter,
    "merge": merge,
    "merge_all": merge_all,
}
