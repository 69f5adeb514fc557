"""Sessions and graphs: what was described is run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPURuntimeError, IPUValueError
from tailrace.compat.ipu.graph import deferred
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, Forms, deferred_call
from tailrace.compat.ipu.graph.named_variables import (
    Store,
    forget_variables,
    initializer,
    variables_by_name,
    variables_of,
)
from tailrace.compat.ipu.graph.operations import Operation, ResultText, Undelivered
from tailrace.compat.ipu.graph.state import current, is_variable, value_of
from tailrace.compat.ipu.ipu_compiler import CompiledOp
from tailrace.compat.nests import map_leaves
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.tensor_shape import TensorShape
from tailrace.jaxprs.marks import is_tracing


class Placeholder(Deferred):
    """A value that each run of a session is given; made by `placeholder`.

    Args:
        dtype: its dtype; 64 bits become 32.
        shape: its shape.
        name: its name.
        default: the value in runs that are given none.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> x = tf.placeholder(tf.float32, [2], "x")
    >>> x.shape.as_list()
    [2]
    """

    shape: Any = None
    dtype: Any = None

    def __init__(
        self,
        dtype: DTypeLike,
        shape: ShapeLike = None,
        name: str | None = None,
        default: TensorLike = None,
    ):
        super().__init__(self._missing, name or "Placeholder")
        self.dtype, self._default = narrowed(dtype), default
        self.shape = TensorShape(shape)

    def _missing(self, feed: Feed) -> Any:
        # Only the form is asked for, in a trace: any values will do.
        if isinstance(feed, Forms) and self.shape.rank is not None:
            lengths = self.shape.as_list()
            return jnp.zeros([feed.unknown if n is None else n for n in lengths], self.dtype)
        if self._default is not None:
            return np.asarray(deferred.evaluated(self._default, feed), self.dtype)
        if current() is not None:
            raise IPURuntimeError(
                f"The placeholder {self.name!r} is used in a compiled program, and is none of its "
                f"inputs. Give it as one: ipu_compiler.compile(function, inputs=[placeholder])."
            )
        raise IPURuntimeError(
            f"You must feed a value for the placeholder {self.name!r}: "
            f"sess.run(..., feed_dict={{placeholder: value}})."
        )


def placeholder(dtype: DTypeLike, shape: ShapeLike = None, name: str | None = None) -> Placeholder:
    """A value that each run of a session is given.

    Args:
        dtype: its dtype; 64 bits become 32.
        shape: its shape; not checked.
        name: its name.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> x = tf.placeholder(tf.float32)
    >>> with tf.Session() as sess:
    ...     print(sess.run(x + 1, feed_dict={x: 2.0}))
    3.0
    """
    return Placeholder(dtype, shape, name)


def placeholder_with_default(
    input: TensorLike, shape: ShapeLike, name: str | None = None
) -> Placeholder:
    """A placeholder with a value for runs that are given none.

    Args:
        input: the value.
        shape: its shape; not checked.
        name: its name.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> rate = tf.placeholder_with_default(0.5, [])
    >>> with tf.Session() as sess:
    ...     print(sess.run(rate * 2))
    1.0
    """
    return Placeholder(np.asarray(input).dtype, shape, name, input)


deferred.later["shape"] = TensorShape


class Session:
    """Runs programs, operations, and what is computed from placeholders; also `InteractiveSession`.

    Variables have their values when they are created and keep them from session to session;
    `global_variables_initializer` gives them their first values again.

    Args:
        target: without effect.
        graph: the graph whose variables it sees; None: the one around.
        config: without effect.

    >>> from tailrace.compat import ipu
    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> program = ipu.ipu_compiler.compile(lambda x: x + 1, inputs=[1.0])
    >>> with tf.Session() as sess:
    ...     print(sess.run(program)[0])
    2.0
    """

    def __init__(self, target: str = "", graph: Graph | None = None, config: object = None) -> None:
        del target, config
        self.graph = graph or get_default_graph()
        self._token: Any = None

    def __enter__(self) -> Session:
        self._token = deferred.open_session(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def as_default(self) -> Session:
        """The session as the one around."""
        return self

    def close(self) -> None:
        """No longer be the session around."""
        if self._token is not None:
            deferred.close_session(self._token)
        self._token = None

    def run(
        self,
        fetches: Tree,
        feed_dict: Mapping[Any, Any] | None = None,
        options: object = None,
        run_metadata: object = None,
    ) -> Any:
        """The values of what is fetched: one thing, or a nest of them.

        Args:
            fetches: tensors, variables, operations, programs.
            feed_dict: values of placeholders.
            options: without effect.
            run_metadata: without effect.

        Raises:
            IPURuntimeError: a placeholder has no value.
        """
        del options, run_metadata
        # In the placeholder's dtype, as TensorFlow converts what it is fed.
        feed = Feed(
            (id(key), np.asarray(value, key.dtype) if isinstance(key, Placeholder) else value)
            for key, value in (feed_dict or {}).items()
        )
        steps: list[Deferred] = []
        # Programs are traced when they first run, and ask for variables of the graph.
        with self.graph.as_default(), deferred.computing(feed):
            found = map_leaves(lambda one: _fetched(one, feed, steps), fetches)
            for step in steps:  # at the end: what else is fetched is of before the update
                step.value(feed)
        return found

    def make_callable(self, fetches: Tree, feed_list: Sequence[Any] = (), **_: Any) -> Any:
        """A function of the values of placeholders that returns what is fetched.

        Args:
            fetches: as for `run`.
            feed_list: the placeholders, in the order of the function's arguments.
        """
        return lambda *values: self.run(fetches, dict(zip(feed_list, values, strict=True)))


def _fetched(fetch: object, feed: Feed, steps: list[Deferred]) -> Any:
    # Before other values: what updates variables runs after all other fetches.
    if isinstance(fetch, Deferred) and fetch.changes:
        steps.append(fetch)
        return None
    # A text is the name of a variable, unless a benchmark returned it.
    if isinstance(fetch, str):
        return fetch if isinstance(fetch, ResultText) else _host(_named(fetch))
    if isinstance(fetch, Undelivered):
        return fetch.again()
    if isinstance(fetch, CompiledOp | Deferred):
        return jax.tree.map(_host, fetch.value(feed))
    if isinstance(fetch, Operation):
        return fetch()
    return _host(fetch)


def _named(name: str) -> Any:
    found = variables_by_name()
    if name.removesuffix(":0") not in found:
        raise IPUValueError(
            f"A session fetches variables by their names. Received: {name!r}. The graph has: "
            f"{', '.join(found) or 'none'}. Fetch other values as objects: sess.run(value)."
        )
    return found[name.removesuffix(":0")]


def _host(value: TensorLike) -> Any:
    if is_variable(value):
        value = value_of(value)
    return np.asarray(value) if isinstance(value, jax.Array) else value


class Graph:
    """What a session runs: here the variables that `get_variable` creates in it.

    Args:
        outermost: whether it is the graph that programs have without making one.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> graph = tf.Graph()
    >>> with graph.as_default():
    ...     w = tf.get_variable("w", initializer=2.0)
    ...     print([variable.name for variable in tf.global_variables()])
    ['w']
    """

    def __init__(self, outermost: bool = False) -> None:
        # None: the variables that programs have without making a graph (`variables_of`).
        self._variables: Store | None = None if outermost else {}

    @property
    def name(self) -> str:
        """Whether a program is being made, or Keras asks a layer for the shape of its outputs."""
        # TensorFlow's name for the second, by which programs tell the two apart.
        return "graph" if is_tracing() else "keras_scratch_graph"

    @contextlib.contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Inside, variables are those of this graph."""
        token = _graphs.set(self)
        # The graph that programs have without making one is used by those of TensorFlow 2 as well.
        described = contextlib.nullcontext() if self._variables is None else deferred.in_graph()
        try:
            with variables_of(self._variables), described:
                yield self
        finally:
            _graphs.reset(token)

    def device(self, name: object) -> Any:
        """Without effect.

        Args:
            name: without effect.
        """
        del name
        return contextlib.nullcontext()

    def finalize(self) -> None:
        """Without effect."""


_OUTERMOST = Graph(outermost=True)
_graphs: contextvars.ContextVar[Graph] = contextvars.ContextVar(
    "tensorflow_graph", default=_OUTERMOST
)


def get_default_graph() -> Graph:
    """The graph around.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> graph = tf.Graph()
    >>> with graph.as_default():
    ...     print(tf.get_default_graph() is graph)
    True
    """
    return _graphs.get()


def reset_default_graph() -> None:
    """Forget the variables of the graph around.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Graph().as_default():
    ...     w = tf.get_variable("w", initializer=2.0)
    ...     tf.reset_default_graph()
    ...     print(tf.global_variables())
    []
    """
    forget_variables()


def assignment(method: str) -> Callable[..., Any]:
    """`tf.assign` and others: done at once in a program, otherwise when a session runs it."""

    def assign(ref: VariableLike, value: TensorLike, *_: Any, **__: Any) -> Any:
        # Not `describing`: outside of programs `tf.assign` is an operation, also where nothing else
        # is described.
        if is_tracing():
            return getattr(ref, method)(value)
        return deferred_call(done, (ref, value), {})

    def done(ref: VariableLike, value: TensorLike) -> Any:
        return value_of(getattr(ref, method)(value))

    assign.__name__ = done.__name__ = method
    return assign


def global_variables_initializer() -> Operation:
    """An operation that gives the variables of the graph around their first values (again).

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Session() as sess:
    ...     sess.run(tf.global_variables_initializer())
    """
    return Operation("global variables initializer", initializer())


def variables_initializer(var_list: Sequence[VariableLike], name: str = "init") -> Operation:
    """An operation that gives some variables their first values (again).

    Args:
        var_list: the variables.
        name: what the operation is called.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> tf.variables_initializer([])
    <Operation init>
    """
    variables = list(var_list)

    def initialize() -> None:
        for variable in variables:
            variable.reset()

    return Operation(name, initialize)


def local_variables_initializer(name: str = "init") -> Operation:
    """An operation that does nothing: there are no local variables, nor tables, to initialize.

    Args:
        name: what the operation is called.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Session() as sess:
    ...     sess.run(tf.local_variables_initializer())
    """
    return Operation(name)


def get_default_session() -> Session | None:
    """The session around, or None.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> with tf.Session() as sess:
    ...     print(tf.get_default_session() is sess)
    True
    """
    try:
        return deferred.current_session()
    except IPURuntimeError:
        return None


def InteractiveSession(
    target: str = "", graph: Graph | None = None, config: object = None
) -> Session:
    """A session that is the one around from now on, until it is closed.

    Args:
        target: without effect.
        graph: the graph that it runs; None: the one around.
        config: without effect.

    >>> from tailrace.compat.tensorflow.compat import v1 as tf
    >>> sess = tf.InteractiveSession()
    >>> tf.get_default_session() is sess
    True
    >>> sess.close()
    """
    return Session(target, graph, config).__enter__()


def nothing(*_: Any, **__: Any) -> None:
    """What is asked of TensorFlow itself, and has no effect here."""
