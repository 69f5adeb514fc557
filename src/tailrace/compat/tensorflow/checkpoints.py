"""`tf.train.Checkpoint` and its manager: models, optimizers and variables in files of arrays."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np

from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPUValueError, NotFoundError
from tailrace.compat.ipu.graph.state import is_variable, value_of
from tailrace.compat.tensorflow.v1 import saver
from tailrace.compat.tensorflow.variables import Module


class Status:
    """What `Checkpoint.restore` returns; everything has been restored by then.

    >>> from tailrace.compat import tensorflow as tf
    >>> _ = tf.train.Checkpoint(w=tf.Variable(2.0)).restore(None).expect_partial()
    """

    def expect_partial(self) -> Status:
        """Without effect."""
        return self

    # All three hold: TensorFlow also restores objects that are made later; here all exist already.
    assert_consumed = assert_existing_objects_matched = expect_partial


class Checkpoint:
    """Objects with variables, saved and restored together.

    Args:
        root: one object.
        **kwargs: models, layers, optimizers, modules and variables, by name.

    Raises:
        IPUValueError: an object has no variables that can be saved.

    >>> import tempfile
    >>> from tailrace.compat import tensorflow as tf
    >>> w = tf.Variable(2.0)
    >>> checkpoint = tf.train.Checkpoint(w=w)
    >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/model")
    >>> _ = w.assign(5.0)
    >>> _ = checkpoint.restore(path)
    >>> float(w.numpy())
    2.0
    """

    def __init__(self, root: object = None, **kwargs: Any) -> None:
        self._objects: dict[str, Any] = {**({} if root is None else {"root": root}), **kwargs}
        for name, each in self._objects.items():
            # Programs read them back: `checkpoint.model`.
            setattr(self, name, each)
            if not (is_variable(each) or isinstance(each, Module) or hasattr(each, "variables")):
                raise IPUValueError(
                    f"tf.train.Checkpoint saves models, optimizers, modules and variables. Received "
                    f"{name}={type(each).__name__}. Keep the position of a dataset yourself: skip(n)."
                )
        self.save_counter = 0

    def write(self, file_prefix: str, **_: Any) -> str:
        """Write the values; returns the path to read from.

        Args:
            file_prefix: the path, without an ending.
            **_: without effect.

        Raises:
            IPUValueError: a model has not been built.
        """
        arrays = {name: np.asarray(value_of(v)) for name, v in self._variables().items()}
        saver.write(file_prefix, arrays)
        return file_prefix

    def save(self, file_prefix: str, **_: Any) -> str:
        """Write the values to the next of the numbered files; returns its path.

        Args:
            file_prefix: the path, without number and ending.
            **_: without effect.

        Raises:
            IPUValueError: a model has not been built.
        """
        self.save_counter += 1
        return self.write(f"{file_prefix}-{self.save_counter}")

    def read(self, save_path: str | None, **_: Any) -> Status:
        """Set all variables to the values in a file; without a path, leave them.

        Args:
            save_path: what `save` or `write` returned.
            **_: without effect.

        Raises:
            NotFoundError: there is no such file, or a variable is not in it. Models and optimizers
                must have been built.
        """
        if save_path is None:
            return Status()
        values = saver.read(save_path)
        variables = self._variables()
        # Before anything is assigned, so that a file of another model leaves this one as it was.
        if missing := sorted(set(variables) - set(values)):
            raise NotFoundError(
                f"{save_path} lacks {', '.join(missing[:5])}. It has: {', '.join(sorted(values)[:5])}, "
                f"... Save and restore objects of the same names, and build models and optimizers "
                f"before."
            )
        for name, variable in variables.items():
            variable.assign(values[name])
        return Status()

    restore = read

    def _variables(self) -> dict[str, VariableLike]:
        found: dict[str, VariableLike] = {}
        for name, each in self._objects.items():
            if is_variable(each):
                found[name] = each
                continue
            # By number: names of layers differ between models made one after the other.
            variables: Any = each.variables() if callable(each.variables) else each.variables
            found |= {f"{name}/{number}": v for number, v in enumerate(variables)}
            if isinstance(each, keras.Model) and not each.built:
                raise IPUValueError(f"Checkpoint({name}=...): the model has not been built yet.")
        return found


class CheckpointManager:
    """The latest checkpoints in a directory.

    Args:
        checkpoint: what is saved.
        directory: the directory.
        max_to_keep: the number of checkpoints to keep.
        checkpoint_name: the prefix of file names.
        **_: without effect.

    >>> import tempfile
    >>> from tailrace.compat import tensorflow as tf
    >>> checkpoint = tf.train.Checkpoint(w=tf.Variable(2.0))
    >>> manager = tf.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=1)
    >>> manager.save() == manager.latest_checkpoint, len(manager.checkpoints)
    (True, 1)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str,
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
        **_: Any,
    ) -> None:
        self.checkpoint, self.directory = checkpoint, str(directory)
        self._most, self._name = max_to_keep, checkpoint_name
        latest = self.latest_checkpoint
        self.checkpoints = [] if latest is None else [latest]
        # The numbers continue where an earlier process stopped.
        if latest is not None and latest.rpartition("-")[2].isdigit():
            checkpoint.save_counter = int(latest.rpartition("-")[2])

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest one; None if there is none."""
        return saver.latest_checkpoint(self.directory)

    def save(self, checkpoint_number: int | None = None, **_: Any) -> str:
        """Write the next one, and remove the oldest; returns its path.

        Args:
            checkpoint_number: its number; None: the next.
            **_: without effect.
        """
        pathlib.Path(self.directory).mkdir(parents=True, exist_ok=True)
        prefix = f"{self.directory}/{self._name}"
        if checkpoint_number is None:
            path = self.checkpoint.save(prefix)
        else:
            path = self.checkpoint.write(f"{prefix}-{int(checkpoint_number)}")
        self.checkpoints = [*(p for p in self.checkpoints if p != path), path]
        while self._most and len(self.checkpoints) > self._most:
            saver.remove(self.checkpoints.pop(0))
        return path

    def restore_or_initialize(self) -> str | None:
        """Read the latest one, if there is one; returns its path."""
        latest = self.latest_checkpoint
        self.checkpoint.restore(latest)
        return latest
