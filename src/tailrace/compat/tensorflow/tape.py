"""`tf.GradientTape`: gradients of what was computed while it was open.

Inside of a program the traced equations are the record. Outside, operations run one by one and the tape
keeps them (`jaxprs/recording.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.graph.deferred import Deferred
from tailrace.compat.ipu.graph.gradients import gradients, trainable_so_far
from tailrace.compat.ipu.graph.state import current, is_variable, value_of
from tailrace.compat.ipu.graph.variables import Variable, reads
from tailrace.compat.nests import leaves, rebuild
from tailrace.jaxprs.recording import Recording

_recordings: contextvars.ContextVar[tuple[GradientTape, ...]] = contextvars.ContextVar(
    "tensorflow_tapes", default=()
)


def recording() -> Any:
    """The innermost tape that records operations one by one, or None."""
    found = _recordings.get()
    return found[-1] if found else None


class GradientTape:
    """A block whose values can be differentiated.

    Outside a program it keeps every operation and its arrays; inside a program it costs nothing.

    Args:
        persistent: whether more than one gradient may be asked for.
        watch_accessed_variables: whether trainable variables that are read are watched.

    >>> from tailrace.compat import tensorflow as tf
    >>> w = tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     loss = w * w
    >>> float(tape.gradient(loss, w))
    6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent, self._watches = persistent, watch_accessed_variables
        self._recording = Recording()
        self._read: dict[int, tuple[Any, Any]] = {}  # variables, and the arrays they were read as
        self._watched: dict[int, Any] = {}
        self._token: Any = None
        self._in_program = False
        self._used = False

    def __enter__(self) -> GradientTape:
        # In a program the traced equations are the record already; only variables read must be kept.
        self._in_program = current() is not None
        if not self._in_program:
            _hook_reads()
            self._token = _recordings.set((*_recordings.get(), self))
            self._recording.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._in_program:
            scope = current()
            # The values of now: an optimizer may change the variables before a gradient is asked for.
            for variable in () if scope is None else tuple(scope.seen.values()):
                self._read.setdefault(id(variable), (variable, value_of(variable)))
        else:
            self._recording.__exit__(*error)
            _recordings.reset(self._token)

    # -- what is watched ------------------------------------------------------------------------

    def watch(self, tensor: TensorLike) -> None:
        """Let gradients be asked for with respect to these tensors or variables.

        Args:
            tensor: a tensor or a variable, or a nest of them.
        """
        for leaf in leaves(tensor):
            self._watched[id(leaf)] = leaf

    @property
    def watched(self) -> list[Any]:
        """The variables that were named."""
        return [leaf for leaf in self._watched.values() if is_variable(leaf)]

    def watched_variables(self) -> tuple[Any, ...]:
        """The variables watched: those named, or all trainable ones that were read."""
        named = self.watched
        if not self._watches:
            return tuple(named)
        read = [v for v, _ in self._read.values() if getattr(v, "trainable", False)]
        # A tape that is still open in a program has not collected its variables yet.
        more = trainable_so_far() if self._in_program and not read else []
        return tuple({id(v): v for v in (*named, *read, *more)}.values())

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """What is computed inside is not differentiated."""
        if self._in_program:
            yield
            return
        self._recording.__exit__(None, None, None)
        try:
            yield
        finally:
            self._recording.__enter__()

    def reset(self) -> None:
        """Forget what was computed so far."""
        self._recording.operations.clear()
        self._read.clear()
        self._used = False

    def was_read(self, variable: VariableLike, array: object) -> None:
        """Note the array that a variable was read as (called when one is read).

        Args:
            variable: the variable.
            array: the array.
        """
        # The first read counts: gradients are with respect to the value that the computation began
        # with.
        self._read.setdefault(id(variable), (variable, array))

    # -- gradients ------------------------------------------------------------------------------

    def gradient(
        self,
        target: TensorLike,
        sources: Tree,
        output_gradients: Tree = None,
        unconnected_gradients: object = "none",
    ) -> Any:
        """The gradient of `target`, the sum of its elements, in the form of `sources`.

        Args:
            target: a tensor, or a nest of them, whose sum is used.
            sources: variables and tensors: one, or a nest of them.
            output_gradients: weights of the target's elements.
            unconnected_gradients: "none", or "zero" for zeros in sources that the target does not
                depend on. Inside a program they are always zeros.

        Raises:
            IPURuntimeError: the tape is not persistent, and has given its gradients.
        """
        self._use()
        found = leaves(sources)
        if any(isinstance(leaf, Deferred) for leaf in leaves(target)):  # a graph of TensorFlow 1
            return rebuild(sources, iter(_described(leaves(target), found, output_gradients)))
        targets = [_array(leaf) for leaf in leaves(target)]
        weights = None if output_gradients is None else leaves(output_gradients)
        if self._in_program and current() is not None:
            grads = self._in_a_program(targets, found, weights)
        else:
            grads = self._recording.gradients(targets, [self._array_of(s) for s in found], weights)
        zero = str(getattr(unconnected_gradients, "value", unconnected_gradients)).lower() == "zero"
        if zero:
            arrays = [self._array_of(source) for source in found]
            grads = [
                jnp.zeros_like(a) if g is None else g for g, a in zip(grads, arrays, strict=True)
            ]
        return rebuild(sources, iter(grads))

    def jacobian(self, target: TensorLike, sources: Tree, **_: Any) -> Any:
        """The gradient of each element of `target`, in the form of `sources`.

        Args:
            target: a tensor.
            sources: variables and tensors: one, or a nest of them.
            **_: without effect.

        Raises:
            IPURuntimeError: it is called in a program, or the tape is used up.
        """
        self._use()
        if self._in_program and current() is not None:
            raise IPURuntimeError(
                "tape.jacobian is available outside of programs. Inside, use jax.jacrev on a function."
            )
        found = [self._array_of(source) for source in leaves(sources)]
        jacobians = jax.jacrev(self._recording.function(_array(target), found))(found)
        return rebuild(sources, iter(jacobians))

    def batch_jacobian(self, target: TensorLike, source: Tree, **_: Any) -> Any:
        """The jacobian of each row of `target` with respect to the same row of `source`.

        Args:
            target: a tensor.
            source: a tensor or variable with as many rows.
            **_: without effect.

        Raises:
            IPURuntimeError: it is called in a program, or the tape is used up.
        """
        whole = self.jacobian(target, source)
        rows = jnp.arange(whole.shape[0])
        between = _array(target).ndim
        # Of all pairs of rows, those of the same number.
        return jnp.moveaxis(whole, between, 1)[rows, rows]

    def _in_a_program(
        self, targets: list[Any], sources: list[Any], weights: TensorLike
    ) -> list[Any]:
        pairs = zip(targets, weights or [None] * len(targets), strict=True)
        total = sum(jnp.sum(t if w is None else t * w) for t, w in pairs)
        return gradients(total, [self._array_of(source) for source in sources])

    def _array_of(self, source: Tree) -> Any:
        """The array that a source was while the tape was open: it may have been changed since."""
        if not is_variable(source):
            return _array(source)
        # By identity, with the variable kept beside: ids of objects that are gone are used again.
        kept = self._read.get(id(source))
        return _array(source) if kept is None else kept[1]

    def _use(self) -> None:
        if self._used and not self._persistent:
            raise IPURuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients (or "
                "jacobians). Use tf.GradientTape(persistent=True)."
            )
        self._used = True


def _described(targets: list[Any], sources: list[Any], weights: Tree) -> list[Any]:
    from tailrace.compat.tensorflow.v1.gradients import gradients as described

    return described(targets, sources, None if weights is None else leaves(weights))


def _array(value: TensorLike) -> Any:
    return value_of(value) if is_variable(value) else jnp.asarray(value)


# -- reads of variables, which a tape outside of programs must know of ----------------------------


@functools.cache
def _hook_reads() -> None:
    """Let variables say what they were read as; once."""
    owner: Any = next(kind for kind in keras.Variable.__mro__ if "value" in vars(kind))
    plain = vars(owner)["value"].fget

    def value(variable: VariableLike) -> Any:
        return _noted(variable, plain(variable))

    owner.value = property(value, vars(owner)["value"].fset, doc=vars(owner)["value"].__doc__)
    # Our own variables are no Keras variables; they ask this list.
    reads.append(_noted)


def _noted(variable: VariableLike, array: object) -> Any:
    for tape in _recordings.get():
        tape.was_read(variable, _before_cast(tape, variable, array))
    return array


def _before_cast(tape: GradientTape, variable: VariableLike, array: TensorLike) -> Any:
    """The variable's own array, where Keras has read it in another dtype."""
    if isinstance(variable, Variable) or str(array.dtype) == str(variable.dtype):
        return array
    # The cast is the last operation that was recorded; gradients are asked for in what it was
    # given.
    made: Sequence[Any] = tape._recording.operations
    return made[-1].taken[0] if made and any(out is array for out in made[-1].made) else array
