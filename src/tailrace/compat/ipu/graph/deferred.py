"""What TensorFlow 1 describes first and a session runs later."""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import Index
from tailrace.base.trees import Tree
from tailrace.compat.arguments import SessionLike
from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.nests import map_leaves
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import is_tracing

later: dict[str, Callable[..., Any]] = {}
"""Functions of files that come after this one, which put them here: how a function is looked through,
how it becomes a program, and what a shape and a dtype are."""


class Operation:
    """Something that a program does, without a value; bodies and stages may return it, after tensors.

    In the original it had to be returned, or it was not done. Here calling what makes it is enough.
    `initializer` and `deleter` of a feed have been done when they are read.

    Args:
        name: what it is called.
        action: what calling it on the host does; None: nothing.

    >>> from tailrace.compat import ipu
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> outfeed.deleter
    <Operation outfeed deleter>
    """

    def __init__(self, name: str, action: Callable[[], Any] | None = None) -> None:
        self.name, self._action = name, action

    def __call__(self) -> Any:
        """Do it."""
        return None if self._action is None else self._action()

    def run(self, feed_dict: object = None, session: SessionLike = None) -> None:
        """Do it.

        Args:
            feed_dict: without effect.
            session: without effect.
        """
        del feed_dict, session
        self()

    def __repr__(self) -> str:
        return f"<Operation {self.name}>"


class Feed(dict[int, Any]):
    """The values of placeholders, by their identity, and everything computed from them so far.

    Attributes:
        fed: the values that a session was given, as they came.
    """

    def __init__(self, fed: Iterable[tuple[int, Any]] = ()) -> None:
        super().__init__(fed)
        # A copy: the feed grows by what is computed, and the inputs of a program are only these.
        self.fed: dict[int, Any] = dict(self)


class Forms(Feed):
    """A feed of placeholders that have forms and no values.

    Attributes:
        unknown: the length of axes that have none.
    """

    def __init__(self, unknown: int) -> None:
        super().__init__()
        self.unknown = unknown


class Deferred:
    """A value that is computed when a session runs.

    Args:
        compute: called with the feed, returns the value.
        name: what it is called in messages.

    Attributes:
        changes: whether it updates variables, so that a session runs it after its other fetches.
    """

    changes = False
    __array_ufunc__ = None  # numpy leaves arithmetic to the operators below

    def __init__(self, compute: Callable[[Feed], Any], name: str = "deferred") -> None:
        self._compute, self.name = compute, name
        # Noted where it is described: a session runs these first, as `tf.control_dependencies`
        # promises.
        self._before = control_inputs()

    def value(self, feed: Feed) -> Any:
        """The value in this run; computed once in it."""
        # A run computes each value once: two fetches that share a part see the same random numbers.
        if id(self) not in feed:
            do(self._before, feed)
            with computing(feed):
                feed[id(self)] = self._compute(feed)
        return feed[id(self)]

    def eval(self, feed_dict: Mapping[Any, Any] | None = None, session: SessionLike = None) -> Any:
        """The value, in a session or the enclosing one."""
        found = session or current_session()
        return found.run(self, feed_dict)

    def run(self, feed_dict: Mapping[Any, Any] | None = None, session: SessionLike = None) -> None:
        """Compute it, in a session or the enclosing one."""
        self.eval(feed_dict, session)

    @property
    def shape(self) -> Any:
        """The shape; None for a length that only a run shows."""
        # Traced with two lengths for what is unknown: an axis that differs depends on it. Neither
        # is 1, which would broadcast.
        few, more = self._form(2).shape, self._form(3).shape
        return later["shape"](a if a == b else None for a, b in zip(few, more, strict=True))

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return later["dtype"](self._form(2).dtype)

    def get_shape(self) -> Any:
        """The shape."""
        return self.shape

    def _form(self, unknown: int) -> Any:
        """What it is where lengths of placeholders that are not known have this one."""
        found: list[Any] = []

        def look() -> int:
            feed = Forms(unknown)
            with computing(feed):
                found[:] = [self.value(feed)]
            return 0

        later["discover"](look, [])  # a trace: nothing is computed or changed
        return found[0]

    def __getitem__(self, key: Index) -> Any:
        return deferred_call(operator.getitem, (self, key), {})

    def __iter__(self) -> Any:
        # Python unpacks `a, b = tf.split(x, 2)` before a session runs; the number of parts is known
        # from a trace.
        form = self._form(2) if running() is None else self.value(running() or Feed())
        if isinstance(form, list | tuple):  # of several results, as of tf.split
            return iter([self[number] for number in range(len(form))])
        raise IPURuntimeError(
            f"{self!r} has no value before a session runs it, so it cannot be iterated."
        )

    def __bool__(self) -> bool:
        feed = running()
        if feed is not None:
            return bool(self.value(feed))
        raise IPURuntimeError(f"{self!r} has no value before a session runs it: sess.run(it).")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Step(Deferred):
    """Something done in a program of its own: what `minimize` of a loss returns, or gradients.

    Args:
        action: called with the feed, in a program.
        name: what it is called in messages.
        changes: whether it changes variables: a session then runs it last.
    """

    def __init__(self, action: Callable[[Feed], Any], name: str, changes: bool = True) -> None:
        super().__init__(self._run, name)
        self._action, self.changes = action, changes
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}

    def _run(self, feed: Feed) -> Any:
        if current() is not None:  # a part of the program around
            return self._action(feed)
        # A program for each set of fed placeholders: those are its inputs.
        keys = tuple(feed.fed)
        if keys not in self._programs:
            self._programs[keys] = self._program(keys)
        return self._programs[keys](*feed.fed.values())

    def _program(self, keys: tuple[int, ...]) -> Callable[..., Any]:
        def computation(*values: Any) -> Any:
            feed = Feed(zip(keys, values, strict=True))
            with computing(feed):
                return self._action(feed)

        return later["compiled"](computation)


def _both_ways(name: str) -> None:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    setattr(Deferred, f"__{name}__", lambda a, b: deferred_call(function, (a, b), {}))
    setattr(Deferred, f"__r{name}__", lambda a, b: deferred_call(function, (b, a), {}))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    _both_ways(_name)
# Without `==`: values are keys of feeds, and TensorFlow 1 compares them by identity.
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "invert"):
    _function = getattr(operator, _name)
    setattr(Deferred, f"__{_name}__", lambda *args, _f=_function: deferred_call(_f, args, {}))


def deferred_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A call that is made when a session runs, with the values that its arguments have then.

    While one runs, and in a program, it is made at once.
    """

    def compute(feed: Feed) -> Any:
        out = function(*evaluated(args, feed), **evaluated(kwargs, feed))
        return evaluated(out, feed)  # a branch may return what was described before

    feed = running()
    return (
        Deferred(compute, getattr(function, "__name__", "call")) if feed is None else compute(feed)
    )


def evaluated(nest: Tree, feed: Feed) -> Any:
    """A nest with everything deferred computed."""
    return map_leaves(lambda leaf: leaf.value(feed) if isinstance(leaf, Deferred) else leaf, nest)


def do(parts: Sequence[Any], feed: Feed) -> None:
    """Do what has been described, once in a run; in a program, operations have been done already."""
    for part in parts:
        evaluated(part, feed)
        if isinstance(part, Operation) and current() is None and id(part) not in feed:
            feed[id(part)] = part()


def value_now(value: object) -> Any:
    """What is described, computed with nothing fed; other values as they are."""
    # For initial values: they may be described, and are needed before any session runs.
    return value.value(Feed()) if isinstance(value, Deferred) else value


# -- whether something is described or computed ---------------------------------------------------

# For all threads, unlike the rest: programs switch to TensorFlow 1's behaviour once, at their
# start.
_everywhere = [False]
_in_graph: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tensorflow_in_graph", default=False
)
_running: contextvars.ContextVar[tuple[Feed, Any] | None] = contextvars.ContextVar(
    "tensorflow_running", default=None
)
_control: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "tensorflow_control_inputs", default=()
)


def describe_everywhere(on: bool) -> None:
    """Let operations be described for a session in the whole process, as in TensorFlow 1, or not."""
    _everywhere[0] = on


def describes_everywhere() -> bool:
    """Whether the whole process has TensorFlow 1's behaviour."""
    return _everywhere[0]


@contextlib.contextmanager
def in_graph() -> Iterator[None]:
    """Operations inside are described for a session."""
    token = _in_graph.set(True)
    try:
        yield
    finally:
        _in_graph.reset(token)


def describing() -> bool:
    """Whether operations are described: in a graph, outside of programs and of what a session runs."""
    if not (_everywhere[0] or _in_graph.get()):
        return False
    if _running.get() is not None or current() is not None or is_tracing():
        return False
    # Keras traces layers by JAX alone, to learn the shapes of their outputs.
    return not isinstance(jnp.zeros(()), Tracer)


def _program() -> Any:
    scope = current()
    return None if scope is None else scope.found


@contextlib.contextmanager
def computing(feed: Feed) -> Iterator[None]:
    """What is described inside is computed at once, with this feed."""
    # With the program: a feed from outside must not be used inside a program (`running`).
    token = _running.set((feed, _program()))
    try:
        yield
    finally:
        _running.reset(token)


def running() -> Feed | None:
    """What a session feeds to what is computed here; None: it is described.

    A program is given only what is one of its inputs: what was fed outside of it would become a
    constant of it, and the value of a later run be lost.
    """
    found = _running.get()
    if found is not None and found[1] is _program():
        return found[0]
    return None if current() is None else Feed()


def control_inputs() -> tuple[Any, ...]:
    """What is done before what is described here."""
    return _control.get() if describing() else ()


@contextlib.contextmanager
def after(inputs: Sequence[Any]) -> Iterator[None]:
    """What is described inside is done after these."""
    token = _control.set((*_control.get(), *inputs))
    try:
        yield
    finally:
        _control.reset(token)


# -- the session around ---------------------------------------------------------------------------

_sessions: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "tensorflow_sessions", default=()
)


def current_session() -> Any:
    """The innermost session that is open.

    Raises:
        IPURuntimeError: no session is open.
    """
    found = _sessions.get()
    if not found:
        raise IPURuntimeError("No session is open. Use it in `with tf.compat.v1.Session():`.")
    return found[-1]


def open_session(session: SessionLike) -> Any:
    """Make a session the innermost one; returns what `close_session` takes."""
    return _sessions.set((*_sessions.get(), session))


def close_session(token: contextvars.Token[tuple[Any, ...]]) -> None:
    """Put back the session around."""
    _sessions.reset(token)
