"""Operations that run one by one on concrete arrays, recorded so that they can be differentiated later.

While a `Recording` is open, JAX passes every operation to it. It computes the result as usual and
records the operation with its input and output arrays. To compute a gradient, the operations between
sources and targets run again as one function that JAX differentiates. Arrays are identified by `id`,
so the recording keeps every one of them alive: a freed array's id could be reused.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs.internals import Trace, jaxpr_as_fun, set_current_trace, take_current_trace


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One recorded operation.

    Attributes:
        again: runs it on other arrays.
        taken: its input arrays.
        made: its output arrays.
    """

    again: Callable[..., Any]
    taken: Sequence[Any]
    made: Sequence[Any]


class Recording(Trace):
    """Records the operations that run while it is open; a context manager.

    >>> x = jnp.float32(3.0)
    >>> with Recording() as recording:
    ...     y = x * x
    >>> float(recording.gradients([y], [x])[0])
    6.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._around: Any = None
        self._open: list[Any] = []

    def __enter__(self) -> Recording:
        # Taken and given back at once, to learn which one it is: there is no other way to read it.
        with take_current_trace() as self._around:
            pass
        self._open.append(set_current_trace(self))
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    # -- called by JAX --------------------------------------------------------------------------

    def stage_value(self, val: Any) -> Any:
        """A value, unchanged."""
        return self._around.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Run an operation and record it."""

        def again(*arrays: jax.Array) -> Any:
            return primitive.bind(*arrays, **params)

        # Under the trace around it: the operation must run, not be recorded again.
        with set_current_trace(self._around):
            out = again(*tracers)
        # With the parameters, not the values: a replay under `jax.grad` binds the same primitive to
        # tracers.
        made = out if primitive.multiple_results else [out]
        self.operations.append(Operation(again, list(tracers), list(made)))
        return out

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **options: Any
    ) -> Any:
        """Run a function with a custom JVP rule, and record it with the rule."""
        return self._with_rule(
            lambda trace, arrays: trace.process_custom_jvp_call(
                primitive, fun, jvp, arrays, **options
            ),
            tracers,
        )

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **options: Any
    ) -> Any:
        """Run a function with a custom VJP rule, and record it with the rule."""
        return self._with_rule(
            lambda trace, arrays: trace.process_custom_vjp_call(
                primitive, fun, fwd, bwd, arrays, **options
            ),
            tracers,
        )

    def _with_rule(self, process: Callable[..., Any], tracers: Any) -> Any:
        def call(*arrays: jax.Array) -> Any:
            with take_current_trace() as inner:
                pass
            return process(inner, arrays)

        with set_current_trace(self._around):
            # Traced to a jaxpr, because JAX lets such a function object be called only once.
            again = jaxpr_as_fun(jax.make_jaxpr(call)(*tracers))
            out = again(*tracers)
        self.operations.append(Operation(again, list(tracers), list(out)))
        return out

    # -- gradients ------------------------------------------------------------------------------

    def gradients(
        self, targets: Sequence[Any], sources: Sequence[Any], given: Sequence[Any] | None = None
    ) -> list[Any]:
        """Gradients of the sum of the targets with respect to each source; None if independent of it.

        Args:
            targets: arrays computed while the recording was open.
            sources: arrays that operations took as inputs.
            given: the weight of each element of the targets; None for 1.
        """
        way = self._way(targets, sources)
        depends = {id(array) for operation in way for array in operation.taken}
        depends |= {id(target) for target in targets}
        places = [n for n, source in enumerate(sources) if id(source) in depends]
        if not places:
            return [None] * len(sources)
        weights = [None] * len(targets) if given is None else list(given)

        def forward(values: Sequence[Any]) -> Any:
            known = {id(sources[n]): value for n, value in zip(places, values, strict=True)}
            _run(way, known)
            # A target that no source reaches is itself: a constant, with gradient zero.
            reached = [known.get(id(target), target) for target in targets]
            return sum(
                jnp.sum(value if weight is None else value * weight)
                for value, weight in zip(reached, weights, strict=True)
            )

        found = iter(jax.grad(forward)([sources[n] for n in places]))
        return [next(found) if n in places else None for n in range(len(sources))]

    def function(self, target: jax.Array, sources: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """`target` as a function of the sources."""
        way = self._way([target], sources)

        def forward(values: Sequence[Any]) -> Any:
            known = {id(source): value for source, value in zip(sources, values, strict=True)}
            _run(way, known)
            return known.get(id(target), target)

        return forward

    def _way(self, targets: Sequence[Any], sources: Sequence[Any]) -> list[Operation]:
        """The operations between the sources and the targets, in order.

        Forward from the sources, then backward from the targets: the way is what both directions reach.
        """
        touched, forward = {id(source) for source in sources}, []
        for operation in self.operations:
            begins_here = any(id(array) in touched for array in operation.taken)
            if begins_here:
                touched.update(map(id, operation.made))
                forward.append(operation)
        needed, way = {id(target) for target in targets}, []
        for operation in reversed(forward):
            if any(id(array) in needed for array in operation.made):
                needed.update(map(id, operation.taken))
                way.append(operation)
        return way[::-1]


def _run(operations: Sequence[Operation], known: dict[int, Any]) -> None:
    """Run operations again; `known` maps the id of an original array to its replacement."""
    for operation in operations:
        out = operation.again(*(known.get(id(array), array) for array in operation.taken))
        made = out if isinstance(out, list | tuple) else [out]
        known.update(zip(map(id, operation.made), made, strict=True))
