"""What TensorFlow 1 describes first and a session runs later."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.data.trees import Tree


class Feed(dict[int, Any]):
    """The values of placeholders, by their identity, and everything computed from them so far.

    Attributes:
        fed: the values that a session was given, as they came.
    """

    def __init__(self, fed: Any = ()) -> None:
        super().__init__(fed)
        self.fed: dict[int, Any] = dict(self)


class Deferred:
    """A value that is computed when a session runs.

    Args:
        compute: called with the feed, returns the value.
        name: what it is called in messages.
    """

    def __init__(self, compute: Callable[[Feed], Any], name: str = "deferred") -> None:
        self._compute, self.name = compute, name

    def value(self, feed: Feed) -> Any:
        """The value in this run; computed once in it."""
        # A run computes each value once: two fetches that share a part see the same random numbers.
        if id(self) not in feed:
            feed[id(self)] = self._compute(feed)
        return feed[id(self)]

    def eval(self, feed_dict: Mapping[Any, Any] | None = None, session: Any = None) -> Any:
        """The value, in a session or the one around."""
        found = session or current_session()
        return found.run(self, feed_dict)

    def minimized_by(self, minimize: Callable[[Any], Any]) -> Deferred:
        """A step of training that a session runs: `minimize` of the value, in a program."""
        return Step(self, minimize)

    def __getitem__(self, key: Any) -> Deferred:
        return deferred_call(operator.getitem, (self, key), {})

    def __iter__(self) -> Any:
        raise IPURuntimeError(
            f"{self!r} has no value before a session runs it, so it cannot be iterated."
        )

    def __bool__(self) -> bool:
        raise IPURuntimeError(f"{self!r} has no value before a session runs it: sess.run(it).")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Step(Deferred):
    """What `minimize` of a loss that is computed from placeholders returns.

    Attributes:
        loss: the loss.
        minimize: called with its value, in a program.
        program: what a session made of it.
    """

    def __init__(self, loss: Deferred, minimize: Callable[[Any], Any]) -> None:
        super().__init__(self._alone, "minimize")
        self.loss, self.minimize = loss, minimize
        self.program: Callable[[Feed], None] | None = None

    def _alone(self, feed: Feed) -> Any:
        del feed
        raise IPURuntimeError("A step of training is run by a session, by itself: sess.run(step).")


def _both_ways(name: str) -> None:
    function = getattr(operator, name)
    setattr(Deferred, f"__{name}__", lambda a, b: deferred_call(function, (a, b), {}))
    setattr(Deferred, f"__r{name}__", lambda a, b: deferred_call(function, (b, a), {}))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _both_ways(_name)
for _name in ("lt", "le", "gt", "ge", "neg"):
    _function = getattr(operator, _name)
    setattr(Deferred, f"__{_name}__", lambda *args, _f=_function: deferred_call(_f, args, {}))


def deferred_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Deferred:
    """A call that is made when a session runs, with the values that its arguments have then."""

    def compute(feed: Feed) -> Any:
        return function(*evaluated(args, feed), **evaluated(kwargs, feed))

    return Deferred(compute, getattr(function, "__name__", "call"))


def evaluated(nest: Tree, feed: Feed) -> Any:
    """A nest with everything deferred computed."""
    if isinstance(nest, Deferred):
        return nest.value(feed)
    if isinstance(nest, dict):
        return {key: evaluated(value, feed) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(evaluated(value, feed) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(evaluated(value, feed) for value in nest)
    return nest


# -- whether programs are described first, and the session around --------------------------------

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


def open_session(session: Any) -> Any:
    """Make a session the innermost one; returns what `close_session` takes."""
    return _sessions.set((*_sessions.get(), session))


def close_session(token: Any) -> None:
    """Put back the session around."""
    _sessions.reset(token)
