"""Variables that are found again by their names: `get_variable`, and the scopes around it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.state import prepared
from tailrace.compat.ipu.graph.variables import Variable

Store = dict[str, Variable]
"""The variables of a graph, by name."""


@dataclasses.dataclass(frozen=True)
class VariableScope:
    """What `variable_scope` returns: a prefix of names, and an initializer.

    Attributes:
        name: what names begin with; empty outside all scopes.
        initializer: the initializer of variables that have none of their own.

    >>> from tailrace.compat import ipu
    >>> with ipu.variable_scope("encoder") as scope:
    ...     scope.name
    'encoder'
    """

    name: str = ""
    initializer: Any = None

    def reuse_variables(self) -> None:
        """Without effect: variables are always found again by their names."""


# The graph that programs have without making one; `tf.Graph()` has a store of its own.
_default: Store = {}
_store: contextvars.ContextVar[Store] = contextvars.ContextVar("ipu_store", default=_default)
_OUTSIDE = VariableScope()
_around: contextvars.ContextVar[VariableScope] = contextvars.ContextVar(
    "ipu_variable_scope", default=_OUTSIDE
)
_seed = [0]


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: DTypeLike = None,
    initializer: TensorLike | Callable[..., Any] = None,
    regularizer: Callable[..., Any] | None = None,
    trainable: bool = True,
    **options: Any,
) -> Variable:
    """The variable of this name; created if there is none yet. It may be called inside a program.

    Args:
        name: its name, after the names of the scopes around.
        shape: its shape; None if the initializer is a value.
        dtype: its dtype; None: float32, or that of the value.
        initializer: a value, or a function of shape and dtype. None: that of the scope around, or
            as in the original, Glorot's uniform numbers for floats and zeros for others.
        regularizer: refused.
        trainable: whether optimizers without a list of variables change it.
        **options: `collections`: names of collections that it is put into besides those of all
            variables; `use_resource`, `partitioner`...: without effect.

    Raises:
        IPUValueError: the variable exists with another shape, or a regularizer is given.

    >>> from tailrace.compat import ipu
    >>> ipu.get_variable("doc/w", initializer=2.0) is ipu.get_variable("doc/w")
    True
    """
    if regularizer is not None:
        raise IPUValueError(
            f"get_variable({name!r}) has a regularizer, whose loss would be collected and not used. "
            f"Add the penalty to the loss: loss + rate * tf.nn.l2_loss(variable)."
        )
    scope = _around.get()
    full = _joined(scope.name, name)

    def make() -> Variable:
        given = scope.initializer if initializer is None else initializer
        given = _usual(full) if given is None else given
        # `initializer=tf.zeros_initializer`, without parentheses, as TensorFlow 1 accepts it.
        given = given() if inspect.isclass(given) or hasattr(given, "is_class") else given
        kind = jnp.float32 if dtype is None else dtype

        def initial() -> Any:
            return given(tuple(shape or ()), kind) if callable(given) else given

        made = Variable(initial, trainable, full, dtype)
        for collection in options.get("collections") or ():
            if collection not in ("variables", "trainable_variables"):  # those are looked up
                collections_of_graph().setdefault(collection, []).append(made)
        return made

    # The name is the identity: each trace of a program asks again, and finds the variable of the
    # trace before.
    found = prepared(_store.get(), full, make)
    if shape is not None and found.shape != tuple(shape):
        raise IPUValueError(
            f"Trying to share variable {full}, but specified shape {tuple(shape)} and found shape "
            f"{found.shape}."
        )
    return found


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    default_name: str | None = None,
    initializer: TensorLike | Callable[..., Any] = None,
    **_: Any,
) -> Iterator[VariableScope]:
    """Names of `get_variable` begin with this name inside.

    Args:
        name_or_scope: a name, or what an earlier `with variable_scope(...) as scope` gave.
        default_name: the name if there is none.
        initializer: the initializer of variables inside that have none of their own.
        **_: `reuse`, `use_resource`...: without effect.

    >>> from tailrace.compat import ipu
    >>> with ipu.variable_scope("layer"), ipu.variable_scope("dense") as scope:
    ...     print(scope.name)
    layer/dense
    """
    around = _around.get()
    given = around.initializer if initializer is None else initializer
    if isinstance(name_or_scope, VariableScope):
        # Entered again: by its own whole name, wherever that is done.
        own = name_or_scope.initializer if initializer is None else initializer
        inner = VariableScope(name_or_scope.name, own)
    else:
        inner = VariableScope(_joined(around.name, name_or_scope or default_name or ""), given)
    token = _around.set(inner)
    try:
        yield inner
    finally:
        _around.reset(token)


def free_scope(name: str) -> str:
    """This name, or the next with a number, that no variable of the scope around is in."""
    number, free = 0, name
    # TensorFlow numbers scopes, not variables: `dense`, `dense_1`.
    while any(full.startswith(f"{_joined(_around.get().name, free)}/") for full in _store.get()):
        number += 1
        free = f"{name}_{number}"
    return free


def get_variable_scope() -> VariableScope:
    """The `VariableScope` around.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.variable_scope("encoder"):
    ...     print(tf.get_variable_scope().name)
    encoder
    """
    return _around.get()


def global_variables() -> list[Variable]:
    """The variables of the graph around: those of `get_variable`, and those created in it.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default():
    ...     step = tf.get_variable("step", initializer=0, trainable=False)
    ...     print(len(tf.global_variables()), len(tf.trainable_variables()))
    1 0
    """
    return list(_store.get().values())


def variables_by_name() -> Store:
    """The same, by their names in the graph."""
    return dict(_store.get())


def trainable_variables(scope: str | None = None) -> list[Variable]:
    """The variables of the graph around that are trained.

    Args:
        scope: what their names begin with.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default():
    ...     w = tf.get_variable("w", initializer=2.0)
    ...     print([variable.name for variable in tf.trainable_variables()])
    ['w']
    """
    found = [variable for variable in global_variables() if variable.trainable]
    return [variable for variable in found if variable.name.startswith(scope or "")]


_collections: dict[int, tuple[Store, dict[str, list[Any]]]] = {}


def collections_of_graph() -> dict[str, list[Any]]:
    """What a program has put into collections of the graph around, by their names."""
    store = _store.get()
    # With the store itself, so that its id is not used again by another graph's.
    return _collections.setdefault(id(store), (store, {}))[1]


def enter_variable(variable: VariableLike, name: str) -> None:
    """Make a variable one of the graph around, under its name or the next free one."""
    store, number, free = _store.get(), 0, name
    while free in store:
        number += 1
        free = f"{name}_{number}"
    store[free] = variable


# Weak: slots end with their optimizer; a graph only resets them.
_slots: weakref.WeakKeyDictionary[Variable, Store] = weakref.WeakKeyDictionary()


def slot(leaf: TensorLike) -> Variable:
    """A variable that an optimizer keeps; the initializer of the graph around resets it, too."""
    first = leaf.reshape(-1)[:1]
    # Nearly all of them are filled with one number, which takes no memory to keep.
    filled = leaf.size > 0 and bool((leaf == first).all())
    shape, dtype = leaf.shape, leaf.dtype

    def initial() -> Any:
        return jnp.full(shape, first[0], dtype) if filled else leaf

    made = Variable(initial, trainable=False, name="slot")
    _slots[made] = _store.get()
    return made


def initializer() -> Callable[[], None]:
    """What gives the variables of the graph around, and its optimizers' slots, their first values."""
    store = _store.get()

    def initialize() -> None:
        # Listed when it runs: slots are made in the first trace, after this operation.
        slots = [variable for variable, home in _slots.items() if home is store]
        for variable in (*store.values(), *slots):
            variable.reset()

    return initialize


def forget_variables() -> None:
    """Let `get_variable` create all variables again, as in a new graph of the original."""
    _store.get().clear()
    _collections.pop(id(_store.get()), None)


@contextlib.contextmanager
def variables_of(store: Store | None) -> Iterator[None]:
    """Inside, `get_variable` finds the variables of a graph; None: those of the default graph."""
    # Another graph has no scopes open yet.
    tokens = _store.set(_default if store is None else store), _around.set(_OUTSIDE)
    try:
        yield
    finally:
        _around.reset(tokens[1])
        _store.reset(tokens[0])


def set_initial_seed(seed: int) -> None:
    """Draw other numbers for variables that say no initializer."""
    _seed[0] = int(seed)


def _joined(around: str, name: str) -> str:
    return "/".join(filter(None, (around, name)))


def _usual(name: str) -> Callable[..., Any]:
    """The original's initializer: numbers follow from the name, so that each process has the same."""

    def numbers(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.zeros(shape, dtype)
        # TensorFlow's fans: the last two axes, each times the window of a kernel. A vector counts
        # its length twice.
        field = math.prod(shape[:-2])
        fans = [field * size for size in shape[-2:]] or [1]
        limit = math.sqrt(6.0 / max(1, fans[0] + fans[-1]))
        # crc32, not `hash`, which Python salts in every process.
        random = np.random.default_rng([zlib.crc32(name.encode()), _seed[0]])
        return jnp.asarray(random.uniform(-limit, limit, shape), dtype)

    return numbers
