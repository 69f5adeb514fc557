"""Variables that are read and written as the program goes along, made into a function of arrays.

A program of the original changes its variables as a side effect. A compiled program is a function. So
a program is looked through twice: the first time (`discover`) to learn which variables it reads and
writes, with the values they have now; the second time those values are arguments, what is written
is in the `Scope` of the code that wrote it, and loops carry it from iteration to iteration.

Variables of Keras take part: inside a program, a `keras.StatelessScope` hands their reads and writes
to the scope.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import VariableLike
from tailrace.errors import ProgramError


class Prepare(BaseException):
    """Something must be made before the program can be traced: variables of an optimizer.

    It leaves the trace (it is not an Exception, because a program might catch that); `action` is then
    called where arrays are concrete, and the trace starts over.
    """

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__("something must be made first")
        self.action = action


def prepared(made: dict[Any, Any], key: object, make: Callable[[], Any]) -> Any:
    """What `make` makes, once, where arrays are real: outside of the program being traced."""
    if key not in made:
        if current() is None:
            made[key] = make()
        else:
            # Made here, it would hold a tracer: so the trace is left, and started over afterwards.
            raise Prepare(lambda: made.setdefault(key, make()))
    return made[key]


class Keep:
    """What optimizers that are made inside of a program keep, from one trace of it to the next.

    Each trace creates them again, in the same order; so the n-th gets the value of the n-th before.
    """

    def __init__(self) -> None:
        self._made: list[dict[Any, Any]] = []
        self._taken = 0

    def begin(self) -> None:
        """A trace begins."""
        self._taken = 0

    def take(self) -> dict[Any, Any]:
        """What the next optimizer keeps."""
        self._taken += 1
        if self._taken > len(self._made):
            self._made.append({})
        return self._made[self._taken - 1]


def kept() -> dict[Any, Any]:
    """A place for what an optimizer makes: its own, or that of its place in the program."""
    scope = current()
    return {} if scope is None else scope.found.keep.take()


@dataclasses.dataclass
class Found:
    """The variables of a program, in the order in which it first touches them.

    Attributes:
        variables: all of them, by identity.
        written: those that it changes.
        infeeds: the infeeds that it reads, by number.
        pipelines: how many pipelines it runs.
        trains: whether one of them trains.
        loops: the number of its other loops.
        shards: how many devices one copy of it takes.
        keep: what optimizers made inside of it keep.
        limits: (whether it was reached, what to say) for each limit that a run may reach.
    """

    variables: dict[int, Any] = dataclasses.field(default_factory=dict)
    written: dict[int, Any] = dataclasses.field(default_factory=dict)
    infeeds: dict[int, Any] = dataclasses.field(default_factory=dict)
    pipelines: int = 0
    trains: bool = False
    loops: int = 0
    shards: int = 1
    keep: Keep = dataclasses.field(default_factory=Keep)
    limits: list[tuple[Any, str]] = dataclasses.field(default_factory=list)

    def carried(self) -> list[Any]:
        """What changes, and so is carried by every loop."""
        return list(self.written.values())


@dataclasses.dataclass(eq=False)
class Scope:
    """The values of variables at the current point of the trace.

    Attributes:
        found: what is known about the variables of the whole program.
        looking: whether the program is only being looked through.
        values: the values that differ from those around it, by identity of the variable.
        around: the scope of the code around, if any.
        loop: how many passes the loop around has; -1 if only running it shows that; None: no loop.
        seen: variables touched so far, in order, in either pass.
    """

    found: Found
    looking: bool
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    around: Scope | None = None
    loop: int | None = None
    seen: dict[int, Any] = dataclasses.field(default_factory=dict)

    def read(self, variable: VariableLike) -> Any:
        """The value of a variable here; None for the one it has outside of all programs."""
        self.seen[id(variable)] = variable
        if self.looking:
            self.found.variables[id(variable)] = variable
        # Innermost first: the body of a loop sees what it wrote itself, then what is around it.
        scope: Scope | None = self
        while scope is not None:
            if id(variable) in scope.values:
                return scope.values[id(variable)]
            scope = scope.around
        # Its value would become a constant of the compiled program, and later changes be lost.
        if not self.looking:
            raise ProgramError(_CHANGED.format(variable=variable))
        return None

    def write(self, variable: VariableLike, value: object) -> None:
        """Change a variable, for what comes after."""
        self.seen[id(variable)] = variable
        if self.looking:
            self.found.variables[id(variable)] = variable
            self.found.written[id(variable)] = variable
        # Loops around have been built already, without carrying this variable.
        elif id(variable) not in self.found.written:
            raise ProgramError(_CHANGED.format(variable=variable))
        self.values[id(variable)] = value

    @contextlib.contextmanager
    def inner(
        self, variables: Sequence[Any] = (), values: Sequence[Any] = (), **changes: Any
    ) -> Iterator[Scope]:
        """A scope for code that is traced apart, such as the body of a loop."""
        given = {id(variable): value for variable, value in zip(variables, values, strict=True)}
        # `seen` is shared with the scope around: variables touched inside count as touched.
        inner = dataclasses.replace(self, values=given, around=self, **changes)
        token = _scope.set(inner)
        try:
            yield inner
        finally:
            _scope.reset(token)


_CHANGED = (
    "A program must touch the same variables each time it is traced. {variable} was not there the "
    "first time. Make variables outside of the function, and let nothing else decide what it does."
)

_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("ipu_scope", default=None)


def current() -> Scope | None:
    """The scope of the program that is being traced, if one is."""
    return _scope.get()


def inside(what: str) -> Scope:
    """The same; an error that names `what` if none is."""
    scope = _scope.get()
    if scope is None:
        raise ProgramError(
            f"{what} means something only inside a program. Call it in the function given to "
            f"ipu_compiler.compile(...) or to strategy.run(...)."
        )
    return scope


def value_of(variable: VariableLike) -> Any:
    """The value of a variable, here and now."""
    if _is_keras(variable):
        return variable.value
    return variable.value()


def write_host(variable: VariableLike, value: object) -> None:
    """Give a variable the value that a program left it with."""
    if _is_keras(variable):
        # Keras' own method: `tf.Variable` has one that a graph of TensorFlow 1 only describes.
        sys.modules["keras"].Variable.assign(variable, value)
    else:
        variable.settle(value)


@contextlib.contextmanager
def scope_of(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def run_if(predicate: TensorLike, action: Callable[[], Any]) -> None:
    """Call `action`, which changes variables, in those passes in which `predicate` holds."""
    scope = inside("a conditional update")
    # The first look learns what is touched; whether the predicate holds makes no difference.
    if scope.looking:
        with scope.inner():
            action()
        return
    # All that the program changes anywhere: what `action` writes is not known before it is traced.
    carried = scope.found.carried()

    def act(values: Tree) -> Any:
        with scope.inner(carried, values) as inner:
            action()
            return [inner.read(variable) for variable in carried]

    after = lax.cond(
        predicate, act, lambda values: values, [scope.read(variable) for variable in carried]
    )
    for variable, value in zip(carried, after, strict=True):
        scope.write(variable, value)


# -- variables of Keras -------------------------------------------------------------------------


def _is_keras(variable: VariableLike) -> bool:
    # Not imported here: a program without Keras has no variables of it, and need not wait for it.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(variable, keras.Variable)


def is_variable(value: object) -> bool:
    """Whether `value` is a variable, ours or Keras'."""
    return hasattr(value, "settle") or _is_keras(value)
