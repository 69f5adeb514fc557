"""Operations done together, without a value: `tf.group`, `tf.no_op`."""

from __future__ import annotations

from typing import Any

from tailrace.compat.ipu.graph.deferred import (
    Deferred,
    Operation,
    control_inputs,
    describing,
    do,
)
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.nests import leaves
from tailrace.compat.tensorflow.operations.table import OPERATIONS
from tailrace.jaxprs.marks import is_tracing


class Group(Deferred):
    """What a session does together; it has no value.

    Args:
        inputs: what is done.
        name: what it is called in messages.
    """

    def __init__(self, inputs: list[Any], name: str) -> None:
        super().__init__(lambda feed: do(inputs, feed), name)
        # With a step of an optimizer in it, it is run as late as the step itself.
        parts = (*inputs, *control_inputs())
        self.changes = any(isinstance(part, Deferred) and part.changes for part in parts)


def group(*inputs: Any, name: str = "group_deps") -> Any:
    """An operation that does these together.

    Outside of graphs and in programs they have been done when they are made, and it is None, as in
    TensorFlow.

    Args:
        *inputs: operations and tensors, or lists of them.
        name: what it is called in messages.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> w = tf.get_variable("w", initializer=1.0)
    >>> both = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
    >>> with tf.Session() as sess:
    ...     print(sess.run(both))
    None
    """
    if current() is not None or is_tracing():
        return None
    parts = leaves(inputs)
    # Initializers wait for a session wherever they are made.
    waits = describing() or any(isinstance(part, Deferred | Operation) for part in parts)
    return Group(parts, name) if waits else None


def no_op(name: str = "NoOp") -> Any:
    """An operation that does nothing, after its control inputs; outside of graphs it is None.

    Args:
        name: what it is called in messages.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.no_op()))
    None
    """
    return group(name=name)


OPERATIONS["group"], OPERATIONS["no_op"] = group, no_op
