"""`tf.train.Saver`: the values of variables in a file, by their names."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.compat.arguments import SessionLike, VariableLike
from tailrace.compat.ipu.errors import IPUValueError, NotFoundError
from tailrace.compat.ipu.graph.deferred import Feed, computing
from tailrace.compat.ipu.graph.named_variables import variables_by_name
from tailrace.compat.ipu.graph.state import value_of
from tailrace.compat.tensorflow import host


class Saver:
    """Writes variables to files of arrays, and reads them; also checkpoints of TensorFlow itself.

    Args:
        var_list: variables, or variables by the names they have in files; None: all of `get_variable`,
            those included that a program creates later.
        max_to_keep: how many files of one saver stay; None or 0: all.
        **_: without effect.

    >>> import pathlib, tempfile
    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.get_variable("w", initializer=2.0)
    ...     path = tf.train.Saver().save(sess, f"{tempfile.mkdtemp()}/model", global_step=3)
    ...     _ = w.assign(5.0)
    ...     tf.train.Saver().restore(sess, path)
    ...     print(pathlib.Path(path).name, w.numpy())
    model-3 2.0
    """

    def __init__(
        self,
        var_list: Sequence[VariableLike] | Mapping[str, VariableLike] | None = None,
        max_to_keep: int | None = 5,
        **_: Any,
    ) -> None:
        self._given, self._most = var_list, max_to_keep
        self.last_checkpoints: list[str] = []

    def save(
        self, sess: SessionLike, save_path: str, global_step: VariableLike = None, **_: Any
    ) -> str:
        """Write the values; returns the path to restore from.

        Args:
            sess: a session.
            save_path: the path, without an ending.
            global_step: a number, or a variable with one, that is appended to the path.
            **_: without effect.

        Raises:
            IPUValueError: there are no variables.
        """
        del sess
        variables = self._variables()
        if not variables:
            raise IPUValueError("No variables to save: Saver writes those of tf.get_variable.")
        if global_step is not None:
            step = value_of(global_step) if hasattr(global_step, "assign") else global_step
            save_path = f"{save_path}-{int(step)}"
        write(save_path, {name: np.asarray(value_of(v)) for name, v in variables.items()})
        self.last_checkpoints = [*(p for p in self.last_checkpoints if p != save_path), save_path]
        while self._most and len(self.last_checkpoints) > self._most:
            remove(self.last_checkpoints.pop(0))
        return save_path

    def restore(self, sess: SessionLike, save_path: str) -> None:
        """Give the variables the values in a file.

        Args:
            sess: a session.
            save_path: what `save` returned, or the path of a checkpoint of TensorFlow.

        Raises:
            NotFoundError: there is no such file, or a variable is not in it.
        """
        del sess
        values = read(save_path)
        for name, variable in self._variables().items():
            if name not in values:
                raise NotFoundError(
                    f"Variable {name!r} is not in {save_path}. It has: {', '.join(sorted(values))}."
                )
            with computing(Feed()):  # at once: in a graph an assignment is only described
                variable.assign(values[name])

    def _variables(self) -> dict[str, VariableLike]:
        if self._given is None:
            return variables_by_name()
        if isinstance(self._given, Mapping):
            return dict(self._given)
        return {variable.name: variable for variable in self._given}


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """The path that was saved last in a directory; None if there is none.

    Args:
        checkpoint_dir: the directory.
        latest_filename: the file that names it; None: `checkpoint`.

    >>> import tempfile
    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> print(tf.train.latest_checkpoint(tempfile.mkdtemp()))
    None
    """
    path = pathlib.Path(checkpoint_dir, latest_filename or "checkpoint")
    if not path.exists():
        return None
    found = re.search(r'^model_checkpoint_path: "(.*)"', path.read_text(), re.MULTILINE)
    return None if found is None else str(pathlib.Path(checkpoint_dir, found[1]))


# -- files of arrays --------------------------------------------------------------------------------


def write(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, and which file of the directory is the latest, as TensorFlow does."""
    # With TensorFlow's ending, a name is none of the arguments of `savez`.
    named: Any = {f"{name}:0": array for name, array in arrays.items()}
    np.savez(_file(path), **named)
    # After the arrays: a save that is interrupted leaves the one before as the latest.
    here = pathlib.Path(path)
    (here.parent / "checkpoint").write_text(f'model_checkpoint_path: "{here.name}"\n')


def read(path: str) -> dict[str, Any]:
    """The arrays of a file by name, of ours or of TensorFlow.

    Raises:
        NotFoundError: there is neither.
    """
    if _file(path).exists():
        with np.load(_file(path)) as arrays:  # arrays only: nothing in it is executed
            return {name.removesuffix(":0"): arrays[name] for name in arrays.files}
    if pathlib.Path(f"{path}.index").exists():
        reader = host.named("train.load_checkpoint")(path)
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    raise NotFoundError(f"There is no checkpoint {path}: neither {path}.npz nor {path}.index.")


def remove(path: str) -> None:
    """Remove a file that `write` wrote."""
    _file(path).unlink(missing_ok=True)


def _file(path: str) -> pathlib.Path:
    return pathlib.Path(f"{path}.npz")
