"""Whether a program that says `import tensorflow as tf` is one of TensorFlow 1.

`tensorflow.compat.v1` is TensorFlow 1 for those who import it. At the top a few names mean other
things in 1 and 2: `tf.nn.dropout(x, 0.9)` keeps nine tenths in 1 and drops them in 2. A program that
uses a name which only TensorFlow 1 has there (`WORDS`) gets 1's meaning of those from then on. If
it has used one of them before, with 2's meaning, it is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tailrace.compat.originals.missing import RefusedName

WORDS = (
    *("Session", "get_variable", "global_variables_initializer", "layers", "placeholder"),
    *("glorot_normal_initializer", "glorot_uniform_initializer", "orthogonal_initializer"),
    *("squared_difference", "svd", "truncated_normal_initializer", "variable_scope"),
    "variance_scaling_initializer",
)
"""Names that TensorFlow 2 does not have at the top."""

BOTH_TRAIN = frozenset(
    {"Checkpoint", "CheckpointManager", "ExponentialMovingAverage", "latest_checkpoint"}
)
"""Names of ours in `tf.train` that TensorFlow 2 has as well; the others are TensorFlow 1's."""

CHANGED = frozenset(
    {
        *("initializers", "losses", "math", "metrics", "nn", "random_normal_initializer"),
        *("random_uniform_initializer", "where", "while_loop"),
    }
)
"""Names at the top that mean other things in TensorFlow 1, or hold some that do."""

_TELLING = CHANGED - {"math", "nn"} | {"nn.dropout"}
"""Those that say something by being used; most operations of the modules are the same in both."""

_read: set[str] = set()
_older: list[str] = []


def forget() -> None:
    """Know nothing of the program again; for tests."""
    _read.clear()
    _older.clear()


def note_read(name: str) -> None:
    """Note that a program has got TensorFlow 2's meaning of a name."""
    if name in _TELLING:
        _read.add(name)


def is_changed(name: str) -> bool:
    """Whether a name at the top is TensorFlow 1's, because the program is."""
    if name not in CHANGED:
        return False
    if not _older:
        note_read(name)
    return bool(_older)


def begin(word: str, v1: Callable[[], Any]) -> Any:
    """What TensorFlow 1 has under a name of its own; the program is one of TensorFlow 1 from now on.

    Raises:
        RefusedName: it has used a name with TensorFlow 2's meaning before.
    """
    if _read and not _older:
        raise RefusedName(
            f"tf.{word} is a name of TensorFlow 1, and tf.{min(_read)} was used before, which means "
            f"something else in TensorFlow 2. Say which is meant: import tensorflow.compat.v1 as tf, "
            f"or tf.compat.v1.{word} in a program of TensorFlow 2."
        )
    _older.append(word)
    return operator.attrgetter(word)(v1())
