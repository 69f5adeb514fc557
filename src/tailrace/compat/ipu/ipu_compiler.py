"""`compile`: a function becomes one device program, which runs when it is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu import config
from tailrace.compat.ipu.errors import (
    FailedPreconditionError,
    IPURuntimeError,
    IPUTypeError,
    IPUValueError,
    OutOfRangeError,
)
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, evaluated, later
from tailrace.compat.ipu.graph.discovery import discover, keras_scope
from tailrace.compat.ipu.graph.gradients import evaluate
from tailrace.compat.ipu.graph.result import Result
from tailrace.compat.ipu.graph.seeding import seeding
from tailrace.compat.ipu.graph.state import (
    Found,
    Keep,
    Scope,
    scope_of,
    value_of,
    write_host,
)
from tailrace.compat.ipu.graph.user_lines import user_line
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.ipu.loops import NeedsNumber
from tailrace.compat.ipu.pipelining.pipelines import PipelineProgram
from tailrace.compat.ipu.scopes import current_ordinal
from tailrace.compat.originals.missing import missing_from
from tailrace.devices import devices
from tailrace.errors import DataExhausted, FeedError, ProducerError
from tailrace.program.compile import Program
from tailrace.program.compile import compile as compile_program


def compile(computation: Callable[..., Any], inputs: Sequence[Any] | None = None) -> CompiledOp:
    """Build one device program from a function.

    It returns the program itself, to be called; in the original it returned the operations that a
    session ran. A session of `tf.compat.v1` takes the program too.

    Args:
        computation: called with the inputs; may use loops, feeds, variables and pipelines.
        inputs: its inputs, a list of arrays and numbers.

    Returns:
        The program. Calling it runs it, with the inputs given here or with others of their form, and
        returns what the function returns: a list, also for a single value; None if it returns nothing
        but operations.

    Raises:
        IPUValueError: `inputs` is not a list.

    >>> from tailrace.compat import ipu
    >>> program = ipu.ipu_compiler.compile(lambda x: x + 1, inputs=[1.0])
    >>> program()[0].item(), program(2.0)[0].item()
    (2.0, 3.0)
    """
    if inputs is not None and not isinstance(inputs, list | tuple):
        raise IPUValueError(f"inputs is a list. Received: {type(inputs).__name__}.")
    return CompiledOp(computation, list(inputs or ()))


class CompiledOp:
    """A device program; made by `compile`, run by calling it.

    Args:
        computation: what it computes.
        inputs: what it is called with if nothing else is given.
        plain: whether it is an ordinary function: it runs on the first device alone, and returns what
            `computation` returns, in its own form.

    >>> from tailrace.compat import ipu
    >>> double = ipu.ipu_compiler.compile(lambda x: x * 2, inputs=[2.0])
    >>> double(4.0)[0].item()
    8.0
    """

    def __init__(
        self, computation: Callable[..., Any], inputs: list[Any], plain: bool = False
    ) -> None:
        self.computation, self.inputs, self._plain = computation, inputs, plain
        # Of the scope in which it is made, as in the original; it may be called outside of it.
        self._ordinal = current_ordinal()
        self._versions: dict[Hashable, Callable[..., Any]] = {}
        self._numbers_known = False
        # For all versions: an optimizer made inside keeps its state when inputs of another form come.
        self._keep = Keep()

    def value(self, feed: Feed) -> Any:
        """What it returns in a run of a session; it runs once in it.

        Args:
            feed: the values that the run was given and has computed.
        """
        if id(self) not in feed:
            feed[id(self)] = self(*evaluated(self.inputs, feed))
        return feed[id(self)]

    def __getitem__(self, key: int | slice) -> Deferred:
        """One of its results, for a session to run."""
        return Deferred(lambda feed: self.value(feed)[key], "result")

    def __iter__(self) -> Any:
        # Python would index it without end: each index is a `Deferred`, never an IndexError.
        raise IPURuntimeError(
            "How many results a compiled program has is known when it has run. Take them by number: "
            "ipu_compiler.compile(...)[0]; or run all: sess.run(program)."
        )

    def __call__(self, *inputs: Any) -> Any:
        """Run it; returns what the function returns.

        Raises:
            IPUTypeError: the function calls an operation of another library.
            OutOfRangeError: the dataset has fewer elements than the program takes.
            FailedPreconditionError: the dataset raised, or an outfeed got values of
                another form.
        """
        given = list(inputs) if inputs else self.inputs
        group = config.group(self._ordinal)
        group = group[:1] if self._plain else group
        before = devices.chosen()
        # For this call alone: two programs of one process may be on different devices.
        devices.use(group)
        try:
            return self._run(given, tuple(device.id for device in group))
        # JAX names a tracer and a page of its own; the user has called an operation of another library.
        except jax.errors.TracerArrayConversionError as error:
            raise IPUTypeError(_FOREIGN.format(where=user_line(error))) from error
        except jax.errors.TracerBoolConversionError:
            raise  # a `tf.function` says what rewrites its branches
        except jax.errors.ConcretizationTypeError as error:
            raise IPUTypeError(_UNKNOWN.format(where=user_line(error))) from error
        except DataExhausted as error:
            raise OutOfRangeError(
                f"Infeed dataset iterator out of range. Are you trying to dequeue more elements than "
                f"are in the dataset? {error}"
            ) from error
        except ProducerError as error:
            raise FailedPreconditionError(
                f"An infeed dataset iterator has failed. {error}"
            ) from error
        except FeedError as error:
            # Other errors of feeds are about this program alone, and already say what to change.
            if "one structure" not in str(error) and "one shape" not in str(error):
                raise
            raise FailedPreconditionError(
                f"Outfeed already exists but with a different tensor shape or replication factor. "
                f"{error}"
            ) from error
        finally:
            devices.use(before)

    def _run(self, given: list[Any], where: tuple[int, ...]) -> Any:
        while True:
            # Numbers are arrays at first: one program then serves all of them.
            plain = [_is_number(x) and self._numbers_known for x in given]
            arrays = [int(x) if p else as_array(x) for x, p in zip(given, plain, strict=True)]
            # Compiled for these devices, seeds, forms of arrays, and numbers that loops need.
            key = (
                where,
                seeding(),
                tuple(a if p else jax.typeof(a) for a, p in zip(arrays, plain, strict=True)),
            )
            try:
                if key not in self._versions:
                    self._versions[key] = self._version(arrays, plain)
                changing = [x for x, p in zip(arrays, plain, strict=True) if not p]
                return self._versions[key](changing)
            except (NeedsNumber, FeedError) as error:
                # By its text: the engine has one class of errors for all misuse of feeds.
                needed = isinstance(error, NeedsNumber) or "needs an upper bound" in str(error)
                if not needed or self._numbers_known or not any(map(_is_number, given)):
                    raise
                # A loop takes its length from an input: compile for the number that was given.
                self._numbers_known = True

    def _version(self, arrays: list[Any], plain: list[bool]) -> Callable[..., Any]:
        def computation(*changing: Any) -> Any:
            rest = iter(changing)
            return self.computation(
                *(x if p else next(rest) for x, p in zip(arrays, plain, strict=True))
            )

        forms = [x for x, p in zip(arrays, plain, strict=True) if not p]

        def looked_through(*changing: Any) -> Any:
            return Result(computation(*changing), self._plain).tensors

        found = discover(looked_through, forms, self._keep)
        # An inference pipeline next to loops or writes runs as a loop on one device: its order matters.
        alone = not found.loops and not found.written
        if found.trains or (found.pipelines and alone):
            return self._pipelined(found, computation)
        replicas = 1 if self._plain else config.replicas(found.shards, self._ordinal)
        return _Version(found, computation, replicas, self._plain)

    def _pipelined(self, found: Found, computation: Callable[..., Any]) -> Callable[..., Any]:
        if found.pipelines > 1:
            raise FailedPreconditionError(
                "Only a single ipu.pipeline() is allowed in a compiled program. Compile the others "
                "by themselves."
            )
        if found.loops:
            raise FailedPreconditionError(
                "A training pipeline and a loop are in one compiled program. Compile the loop by "
                "itself, or use repeat_count= of the pipeline."
            )
        return PipelineProgram(computation, self._ordinal)


class _Version:
    """A program for inputs of one form."""

    def __init__(
        self, found: Found, computation: Callable[..., Any], replicas: int, plain: bool
    ) -> None:
        self._found, self._computation, self._plain = found, computation, plain
        self._result: Result | None = None
        self._variables = list(found.variables.values())
        self._program: Program = compile_program(
            self._function, replicas=replicas, seed=seeding().seed
        )

    def __call__(self, inputs: list[Any]) -> Any:
        """Run it on these inputs."""
        for infeed in self._found.infeeds.values():
            infeed.queue()  # it may have been deleted since
        values = [value_of(variable) for variable in self._variables]
        changed, tensors, reached = self._program(values, inputs)
        # Before variables are written: a loop that was cut off must not leave half of its effects.
        for flag, (_, text) in zip(reached, self._found.limits, strict=True):
            if bool(flag):
                raise OutOfRangeError(text)
        for variable, value in zip(self._found.carried(), changed, strict=True):
            write_host(variable, value)
        assert self._result is not None
        if self._plain:
            return self._result.as_returned(list(tensors))
        return self._result.with_values(list(tensors))

    def _function(self, values: Tree, inputs: Tree) -> Any:
        given = dict(zip(map(id, self._variables), values, strict=True))
        scope = Scope(self._found, looking=False)

        def computation(values: Tree, inputs: Tree) -> Any:
            scope.values = dict(zip(given, values, strict=True))
            # This function may be traced again: what a trace collects starts empty each time.
            self._found.keep.begin()
            self._found.limits.clear()
            with scope_of(scope):
                self._result = Result(self._computation(*inputs), self._plain)
                changed = [scope.read(variable) for variable in self._found.carried()]
            reached = [flag for flag, _ in self._found.limits]
            return changed, self._result.tensors, reached

        with keras_scope():
            closed, form = jax.make_jaxpr(computation, return_shape=True)(values, inputs)
        out = evaluate(closed, jax.tree.leaves((values, inputs)))
        return jax.tree.unflatten(jax.tree.structure(form), out)


later["discover"] = discover
later["compiled"] = lambda computation: CompiledOp(computation, [], plain=True)

_FOREIGN = (
    "An operation of TensorFlow or numpy was given a value of the program{where}. Functions, bodies of "
    "loops and stages compute with keras.ops or jax.numpy: keras.ops.mean for tf.reduce_mean."
)

_UNKNOWN = (
    "Python asked for a number that is a value of the program{where}: it is known only when the "
    "program runs. Lengths and shapes must be known before: take them from x.shape or tf.shape(x), or "
    "give a Python number. A loop over a value of the device is `for _ in tf.range(n)` in a "
    "tf.function, or ipu.loops.repeat(n, body)."
)


def _is_number(value: TensorLike) -> bool:
    """Whether a value may be a count: an integer, of Python or in an array of no dimensions."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and value.shape == () and jnp.issubdtype(dtype, jnp.integer)


__getattr__, __dir__ = missing_from(__name__)
