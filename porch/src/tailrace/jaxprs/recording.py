"""Operations that run one by one on real arrays, kept so that they can be differentiated afterwards.

While a `Recording` is open, JAX hands every operation to it. It computes the result as always and keeps
the operation with the arrays that went in and came out. A gradient is asked for afterwards: the
operations between the sources and the target are then run once more, as one function that JAX
differentiates. Arrays are known by identity, so each must be kept, and is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs.internals import Trace, jaxpr_as_fun, set_current_trace, take_current_trace


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation that ran.

    Attributes:
        again: runs it, on other arrays.
        taken: what went in.
        made: what came out.
    """

    again: Callable[..., Any]
    taken: Sequence[Any]
    made: Sequence[Any]


class Recording(Trace):
    """Keeps the operations that run while it is open; a context manager.

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
        with take_current_trace() as self._around:
            pass
        self._open.append(set_current_trace(self))
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    # -- what JAX calls -------------------------------------------------------------------------

    def stage_value(self, val: Any) -> Any:
        """A value as it is."""
        return self._around.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Run an operation and keep it."""

        def again(*arrays: Any) -> Any:
            return primitive.bind(*arrays, **params)

        with set_current_trace(self._around):
            out = again(*tracers)
        made = out if primitive.multiple_results else [out]
        self.operations.append(Operation(again, list(tracers), list(made)))
        return out

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **options: Any
    ) -> Any:
        """Run a function that has a forward rule of its own, and keep it with the rule."""
        return self._with_rule(
            lambda trace, arrays: trace.process_custom_jvp_call(
                primitive, fun, jvp, arrays, **options
            ),
            tracers,
        )

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **options: Any
    ) -> Any:
        """Run a function that has a backward rule of its own, and keep it with the rule."""
        return self._with_rule(
            lambda trace, arrays: trace.process_custom_vjp_call(
                primitive, fun, fwd, bwd, arrays, **options
            ),
            tracers,
        )

    def _with_rule(self, process: Callable[..., Any], tracers: Any) -> Any:
        def call(*arrays: Any) -> Any:
            with take_current_trace() as inner:
                pass
            return process(inner, arrays)

        with set_current_trace(self._around):
            # Traced, because such a function can be called once only.
            again = jaxpr_as_fun(jax.make_jaxpr(call)(*tracers))
            out = again(*tracers)
        self.operations.append(Operation(again, list(tracers), list(out)))
        return out

    # -- afterwards -----------------------------------------------------------------------------

    def gradients(
        self, targets: Sequence[Any], sources: Sequence[Any], given: Sequence[Any] | None = None
    ) -> list[Any]:
        """The gradient of the sum of the targets in each source; None where no target depends on it.

        Args:
            targets: arrays that were made while it was open.
            sources: arrays that went in.
            given: what each element of the targets is weighted with; None: 1.
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
            reached = [known.get(id(target), target) for target in targets]
            return sum(
                jnp.sum(value if weight is None else value * weight)
                for value, weight in zip(reached, weights, strict=True)
            )

        found = iter(jax.grad(forward)([sources[n] for n in places]))
        return [next(found) if n in places else None for n in range(len(sources))]

    def function(self, target: Any, sources: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """`target` as a function of the sources."""
        way = self._way([target], sources)

        def forward(values: Sequence[Any]) -> Any:
            known = {id(source): value for source, value in zip(sources, values, strict=True)}
            _run(way, known)
            return known.get(id(target), target)

        return forward

    def _way(self, targets: Sequence[Any], sources: Sequence[Any]) -> list[Operation]:
        """The operations between the sources and the targets, in order."""
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
    """Run operations again; `known` has the arrays that differ from those of before, by identity."""
    for operation in operations:
        out = operation.again(*(known.get(id(array), array) for array in operation.taken))
        made = out if isinstance(out, list | tuple) else [out]
        known.update(zip(map(id, operation.made), made, strict=True))
