"""`repeat` and `while_loop`: loops on the device, fed by an infeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import IPUTypeError
from tailrace.compat.ipu.graph.gradients import evaluate
from tailrace.compat.ipu.graph.operations import Operation, tensors_of
from tailrace.compat.ipu.graph.state import Scope, inside, is_variable, value_of
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.ipu.ipu_infeed_queue import IPUInfeedQueue, arguments_of
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import ProgramError
from tailrace.feeds import dispatch_table
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import current_trace, inside_loop
from tailrace.program import loops as engine


class NeedsNumber(ProgramError):
    """A fed loop whose length is a value of the program: it must be known when it is compiled."""


def as_count(n: TensorLike) -> Any:
    """A count as an integer, unless it is a value of the program that is being traced."""
    n = value_of(n) if is_variable(n) else n
    if isinstance(n, Tracer):
        return n
    # A float count is a mistake that `int` would hide: 2.5 passes.
    if np.ndim(n) or not np.issubdtype(np.asarray(n).dtype, np.integer):
        raise IPUTypeError(f"A count is an integer. Received: {n!r}.")
    return int(n)


def repeat(
    n: TensorLike,
    body: Callable[..., Any],
    inputs: TensorLike = None,
    infeed_queue: IPUInfeedQueue | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Run `body` n times on the device. Call it in a function given to `ipu_compiler.compile`.

    Args:
        n: how many times; an integer, or a value of the program. With an infeed it must be known when
            the program is compiled.
        body: called with the carried values, then with what an element supplies. Returns the carried
            values, and operations after them.
        inputs: the carried values: one, or a list.
        infeed_queue: where each pass takes an element from.
        use_while_v1: which loop of TensorFlow this became; without effect.

    Returns:
        The carried value; a list of several; an operation if there is none.

    Raises:
        IPUTypeError: `n` is not an integer, or the body takes or returns other values than
            those carried.
        ProgramError: it is called outside a program.

    >>> from tailrace.compat import ipu
    >>> program = ipu.ipu_compiler.compile(lambda x: ipu.loops.repeat(3, lambda x: x * 2, x), [1.0])
    >>> program()[0].item()
    8.0
    """
    del use_while_v1
    loop = _Loop(body, inputs, infeed_queue, "loop body")
    n = as_count(n)
    if isinstance(n, Tracer) and infeed_queue is not None:
        raise NeedsNumber(
            "loops.repeat with an infeed needs a number of passes that is known when the program "
            "is compiled. Give an integer, or make it an input of the program."
        )
    # -1 says "known when it runs": gradient accumulation inside refuses it, because it must divide
    # the length.
    length = -1 if isinstance(n, Tracer) else n
    return loop.run(
        length,
        lambda one_pass, carry, queue: engine.repeat_with(engine.whole, n, one_pass, carry, queue),
    )


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: TensorLike = None,
    infeed_queue: IPUInfeedQueue | None = None,
    maximum_iterations: int | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Run `body` for as long as `condition(*carried)` holds; see `repeat`.

    Args:
        condition: called with the carried values; returns a boolean.
        body: as for `repeat`.
        inputs: the carried values.
        infeed_queue: where each pass takes an element from; elements that are not read go back.
        maximum_iterations: the most iterations. With an infeed and without it, an execution
            stages as many elements as a loop may plausibly read, and notes it once.
        use_while_v1: without effect.

    Returns:
        The carried value; a list of several; an operation if there is none.

    Raises:
        IPUTypeError: the body or the condition takes or returns other values than those
            carried.
        ProgramError: it is called outside a program.
        OutOfRangeError: when it runs: the loop needs more passes than it has elements for.

    >>> from tailrace.compat import ipu
    >>> def until_ten(x):
    ...     return ipu.loops.while_loop(lambda x: x < 10, lambda x: x * 2, x)
    >>> ipu.ipu_compiler.compile(until_ten, [1.0])()[0].item()
    16.0
    """
    del use_while_v1
    loop = _Loop(body, inputs, infeed_queue, "loop body")
    _check_arity(condition, len(loop.inputs), (), {}, "loop condition")
    most = maximum_iterations
    # All elements of an execution are staged before it starts, so an unbounded loop needs a bound here.
    if infeed_queue is not None and most is None:
        queue = loop.queue()
        assert queue is not None
        fitting = max(1, dispatch_table.UNSAID_BYTES // queue.spec().nbytes)
        most = min(dispatch_table.UNSAID_PASSES, fitting)
        # A pass takes an element for each replica; more than the dataset has would fail before it
        # starts.
        most = queue.remaining(most * loop.trace.replicas) // loop.trace.replicas
        note_once(
            f"A while loop with an infeed has at most {most} passes here, because it says no number "
            f"itself and all elements it may read are staged first. Give maximum_iterations=."
        )

    def again(carry: Tree) -> Any:
        values, variables = carry
        with loop.scope.inner(loop.carried, variables):
            return jnp.asarray(condition(*values), jnp.bool_).reshape(())

    # In the first look no loop is built, so the condition is called here for what it reads.
    if loop.scope.looking:
        with loop.scope.inner():
            condition(*loop.inputs)
    after = loop.run(
        -1,
        lambda one_pass, carry, queue: engine.while_loop(again, one_pass, carry, queue, most),
    )
    if most is not maximum_iterations and not loop.scope.looking:
        values = after if isinstance(after, list) else [after] if loop.inputs else []
        # Asked once more after the loop: whether it ended by its condition, or because its elements
        # ran out.
        wanted = jnp.asarray(condition(*values), jnp.bool_).reshape(())
        text = (
            f"A while loop with an infeed wanted more than {most} passes, for which elements were "
            f"there. Give maximum_iterations=, or a longer dataset."
        )
        loop.scope.found.limits.append((wanted, text))
    return after


class _Loop:
    """A loop whose body reads and writes variables, as one of the engine's that carries them."""

    def __init__(
        self,
        body: Callable[..., Any],
        inputs: TensorLike,
        infeed_queue: IPUInfeedQueue | None,
        what: str,
    ) -> None:
        self.scope: Scope = inside("a loop")
        self.trace = current_trace("a loop")
        if infeed_queue is not None and not isinstance(infeed_queue, IPUInfeedQueue):
            raise IPUTypeError(
                f"infeed_queue must be an IPUInfeedQueue. Received: {type(infeed_queue).__name__}."
            )
        given: Sequence[Any] = (
            inputs if isinstance(inputs, list | tuple) else [] if inputs is None else [inputs]
        )
        self.inputs = [as_array(value) for value in given]
        self.body, self._infeed, self._what = body, infeed_queue, what
        self.carried = self.scope.found.carried()

    def queue(self) -> Any:
        """The engine's infeed, or None."""
        if self._infeed is None:
            return None
        # The number of replicas is known only after the first pass over the program.
        return self._infeed.take_part(None if self.scope.looking else self.trace.replicas)

    def run(self, length: int, engine_loop: Callable[..., Any]) -> Any:
        """Run it: `engine_loop(one_pass, carry, queue)` is the loop of the engine."""
        queue = self.queue()
        element = None if queue is None else queue.spec().tree()
        if element is not None:
            args, kwargs = arguments_of(element)
            _check_arity(self.body, len(self.inputs), args, kwargs, self._what)
        else:
            _check_arity(self.body, len(self.inputs), (), {}, self._what)
        # What the body writes is known after the first look; from then on the loop carries it.
        before = () if self.scope.looking else self.carried
        variables = [self.scope.read(variable) for variable in before]
        arguments = (self.inputs, variables, element)

        def once(inputs: TensorLike, values: TensorLike, element: Tree) -> Any:
            args, kwargs = ((), {}) if queue is None else arguments_of(element)
            with self.scope.inner(before, values, loop=length) as inner:
                out = tensors_of(
                    self.body(*inputs, *args, **kwargs), "IPU loop body", len(self.inputs)
                )
                self._check(inputs, out)
                return out, [inner.read(variable) for variable in before]

        with inside_loop(self.trace):
            # Traced once, here: the engine may run it several times until types agree.
            closed, form = jax.make_jaxpr(once, return_shape=True)(*arguments)
        # One trace of the body has shown what it touches; running the loop would add nothing.
        if self.scope.looking:
            self.scope.found.loops += 1
            return self._result(self.inputs)
        structure = jax.tree.structure(form)

        def one_pass(carry: Tree, *elements: Any) -> Any:
            inputs, values = carry
            leaves = jax.tree.leaves((inputs, values, *elements))
            return jax.tree.unflatten(structure, evaluate(closed, leaves))

        after, changed = engine_loop(one_pass, (self.inputs, variables), queue)
        for variable, value in zip(before, changed, strict=True):
            self.scope.write(variable, value)
        return self._result(after)

    def _result(self, after: Sequence[Any]) -> Any:
        return after[0] if len(after) == 1 else list(after) if after else Operation("loop")

    def _check(self, inputs: Sequence[Any], out: Sequence[Any]) -> None:
        was, now = [x.dtype.name for x in inputs], [x.dtype.name for x in out]
        if was != now:
            raise IPUTypeError(
                f"Mismatch between input types and output types for loop body: {was} vs {now}. A "
                f"body returns the values it carries, of the same number and dtypes."
            )


def _check_arity(
    function: Callable[..., Any],
    inputs: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    what: str,
) -> None:
    try:
        signature = inspect.signature(function)
    # Builtins and some objects have no signature; then calling the body shows what is wrong.
    except (TypeError, ValueError):
        return
    try:
        # Before the body is traced: a TypeError inside of it would look like one about its arguments.
        signature.bind(*range(inputs), *args, **kwargs)
    except TypeError:
        extra = len(args) + len(kwargs)
        fed = f" and {extra} additional inputs from infeed" if extra else ""
        raise IPUTypeError(
            f"Supplied {what} function cannot be called with the specified inputs. You specified "
            f"{inputs} inputs{fed}, but the {what} needs {_needs(signature)}."
        ) from None


def _needs(signature: inspect.Signature) -> str:
    parameters = signature.parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in parameters if p.kind in kinds]
    required = sum(p.default is inspect.Parameter.empty for p in named)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        how, count = "at least", required
    elif required == len(named):
        how, count = "exactly", required
    else:
        how, count = "at most", len(named)
    return f"{how} {count} argument{'s' * (count != 1)}"


__getattr__, __dir__ = missing_from(__name__)
