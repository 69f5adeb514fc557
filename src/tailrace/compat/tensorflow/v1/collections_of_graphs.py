"""Collections of a graph: variables, and what a program puts into others."""

from __future__ import annotations

from typing import Any

from tailrace.compat.ipu.graph.named_variables import (
    collections_of_graph,
    global_variables,
    trainable_variables,
)


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """The variables of the graph around, all or those that are trained, or what a program added.

    Args:
        key: `tf.GraphKeys.GLOBAL_VARIABLES`, `TRAINABLE_VARIABLES`, or any other name.
        scope: what the names of its members begin with.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default():
    ...     w = tf.get_variable("w", initializer=2.0)
    ...     print(len(tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)))
    1
    """
    # Variables are not put into collections here: they are looked up where they are kept.
    found = {"variables": global_variables, "trainable_variables": trainable_variables}
    members = found[key]() if key in found else collections_of_graph().get(key, [])
    return [one for one in members if getattr(one, "name", "").startswith(scope or "")]


def add_to_collection(name: str, value: object) -> None:
    """Put something into a collection of the graph around.

    Args:
        name: the name of the collection.
        value: what is put into it.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default():
    ...     tf.add_to_collection("losses", 2.0)
    ...     print(tf.get_collection("losses"))
    [2.0]
    """
    collections_of_graph().setdefault(name, []).append(value)
