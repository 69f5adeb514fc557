"""`tr.balance`: where to cut a model so that its slowest stage is as fast as possible."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.checks import check_count
from tailrace.base.trees import Tree, TreeDef
from tailrace.errors import OptionError, PipelineError
from tailrace.feeds.elements import call_with_element
from tailrace.jaxprs import internals, jax_seams
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.control import Cond, Scan, control, programs_in
from tailrace.jaxprs.internals import ClosedJaxpr, JaxprEqn, Var, nbytes, variables
from tailrace.jaxprs.marks import ProgramTrace, is_tracing, tracing
from tailrace.jaxprs.operations import multiplications
from tailrace.jaxprs.own_equations import is_mark
from tailrace.jaxprs.stretches import (
    bound,
    crossing_bytes,
    is_float,
    live_ins,
    made_by,
    results_of,
    run,
    used_by,
)
from tailrace.pipeline.balance_cuts import balanced_cut, stage_sums
from tailrace.pipeline.boundary import stage_boundary
from tailrace.pipeline.pipeline import Pipeline

_BACKWARD = 2.0
"""A backward pass has two matrix products for each one of the forward pass."""

_FLOPS_PER_BYTE = 4.0
"""The FLOPs of a device in the time it moves a byte: the price of elementwise operations."""


@dataclasses.dataclass(frozen=True)
class ProposedStage:
    """One stage of a proposed cut.

    Attributes:
        share: its share of the model's time.
        parameters: bytes of the parameters it uses.
        sends: bytes sent to the next stage per microbatch.
        begins: `file:line` of the model's code where it begins.
        seconds: the time of its forward and backward, if measured.
    """

    share: float
    parameters: int
    sends: int
    begins: str
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Balance:
    """A proposed cut; prints its expected costs. Call it like the original function.

    Attributes:
        stages: the expected cost of each stage.
        cut: the first operation of each stage after the first.
        function: the model.

    Raises:
        PipelineError: it is called with a batch for which the model has other operations.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tailrace as tr
        >>> def model(params, x):
        ...     return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]).mean()
        >>> params = [np.ones((16, 16), np.float32)] * 2
        >>> balance = tr.balance(model, params, np.ones((8, 16), np.float32), stages=2)
        >>> len(balance.stages), balance.speedup > 1
        (2, True)
    """

    stages: tuple[ProposedStage, ...]
    cut: tuple[int, ...]
    function: Callable[..., Any]
    operations: int
    takes_whole_element = True

    @property
    def slowest(self) -> float:
        """The share of the slowest stage; 1 / stages would be even."""
        return max(stage.share for stage in self.stages)

    @property
    def speedup(self) -> float:
        """The best possible speedup over one device, without ramp-up and ramp-down."""
        return 1 / self.slowest

    def pipeline(self, **options: Any) -> Pipeline:
        """A `tr.Pipeline` of the model, cut like this; options are those of `tr.Pipeline`."""
        return Pipeline(self, **options)

    def __call__(self, *args: Tree) -> Any:
        """The function's result, with boundaries where stages end."""
        *first, element = args

        def whole(*args: Tree) -> Any:
            return call_with_element(self.function, args[:-1], args[-1])

        leaves, structure = jax.tree.flatten((*first, element))
        closed, form = _traced(whole, structure, leaves)
        # The cut is an index into the operations, so it is valid only for the same operations.
        if len(closed.jaxpr.eqns) != self.operations:
            raise PipelineError(
                f"This cut was made for a model of {self.operations} operations; on this batch it "
                f"has {len(closed.jaxpr.eqns)}. Balance it again with an example like the batch."
            )
        return jax.tree.unflatten(form, _with_boundaries(closed, self.cut, leaves))

    def __repr__(self) -> str:
        lines = [
            f"{len(self.stages)} stages; the slowest takes {self.slowest:.1%} of the time (even "
            f"would be {1 / len(self.stages):.1%}), at best {self.speedup:.2f} times one device"
        ]
        for number, stage in enumerate(self.stages):
            measured = "" if stage.seconds is None else f", {stage.seconds * 1e3:.3g} ms"
            sends = f", sends {stage.sends:,} bytes" if number < len(self.stages) - 1 else ""
            where = f", from {stage.begins}" if stage.begins else ""
            lines.append(
                f"  stage {number}: {stage.share:.1%}{measured}, {stage.parameters:,} bytes of "
                f"parameters{sends}{where}"
            )
        return "\n".join(lines)


def balance(
    fn: Callable[..., Any],
    params: Tree,
    example: Tree,
    *,
    stages: int,
    model_state: Tree = None,
    measure: bool = False,
) -> Balance:
    """Propose where to cut a model into stages.

    Operations keep their order. The slowest stage is as fast as possible; of nearly equal cuts, the
    one that the fewest bytes cross is chosen.

    Args:
        fn: the model, called like a trainer's loss function.
        params: its parameters.
        example: an element of the dataset.
        stages: the number of stages.
        model_state: the model state, if it has one.
        measure: whether to run the stages and correct the estimate by their times, twice.

    Raises:
        OptionError: `fn` is not a function, or `stages` is not a whole number of at least 1.
        PipelineError: the model has fewer operations than stages, or there is something other than
            arrays in `params`, `model_state` or `example`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tailrace as tr
        >>> def model(params, x):
        ...     for w in params:
        ...         x = jnp.tanh(x @ w)
        ...     return x.mean()
        >>> params = [np.ones((16, 16), np.float32)] * 4
        >>> tr.balance(model, params, np.ones((8, 16), np.float32), stages=2).slowest < 0.6
        True
    """
    if not callable(fn):
        raise OptionError(
            f"balance cuts a function, called like a loss function. Received: {fn!r}."
        )
    stages = check_count("stages", stages, at_least=1, error=OptionError)
    first = (params,) if model_state is None else (params, model_state)
    check_arrays("tr.balance takes", (*first, example), error=PipelineError)

    def whole(*args: Tree) -> Any:
        return call_with_element(fn, args[:-1], args[-1])

    leaves, structure = jax.tree.flatten((*first, example))
    closed, _ = _traced(whole, structure, leaves)
    eqns = closed.jaxpr.eqns
    count = len(jax.tree.leaves(params))
    costs = np.array([cost_of(eqn) for eqn in eqns])
    if len(eqns) < stages:
        raise PipelineError(
            f"Each stage has at least one operation: this model has {len(eqns)}, and {stages} stages "
            f"were asked for. Ask for fewer."
        )
    cut, seconds = _cheap_cut(closed, costs, stages), None
    if measure:
        # Twice, because the corrected cut has stages that were never measured.
        for _ in range(2):
            _correct(costs, cut, _measured(closed, cut, leaves))
            cut = _cheap_cut(closed, costs, stages)
        seconds = _measured(closed, cut, leaves)
    sums = seconds if seconds is not None else stage_sums(costs.tolist(), cut)
    proposed = _proposed(closed, cut, np.array(sums), measure, closed.jaxpr.invars[:count])
    return Balance(proposed, cut, fn, len(eqns))


def _correct(costs: np.ndarray, cut: tuple[int, ...], seconds: Sequence[float]) -> None:
    """Scale the estimated costs of operations so that each stage's sum is its measured time."""
    estimates = stage_sums(costs.tolist(), cut)
    edges = [0, *cut, len(costs)]
    for number, took in enumerate(seconds):
        # Only the sum of a stage is known; within it, the estimates keep their ratios.
        costs[edges[number] : edges[number + 1]] *= took / max(estimates[number], 1e-30)


def _proposed(
    closed: ClosedJaxpr,
    cut: tuple[int, ...],
    sums: np.ndarray,
    measured: bool,
    parameters: Sequence[Var],
) -> tuple[ProposedStage, ...]:
    """The stages of a cut; `sums` are their costs, or their seconds if they were measured."""
    eqns = closed.jaxpr.eqns
    proposed = []
    edges = [0, *cut, len(eqns)]
    crossing = crossing_bytes(eqns, closed.jaxpr.outvars)
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        part = eqns[first:last]
        used = used_by(part)
        weights = sum(nbytes(v.aval) for v in parameters if v in used)
        proposed.append(
            ProposedStage(
                float(sums[number] / sums.sum()),
                weights,
                crossing[last] if last < len(eqns) else 0,
                next((found for eqn in part if (found := internals.user_frame(eqn))), ""),
                float(sums[number]) if measured else None,
            )
        )
    return tuple(proposed)


def cost_of(eqn: JaxprEqn) -> float:
    """The cost of one operation, forward and backward, in FLOPs."""
    if inside := programs_in(eqn):
        found = control(eqn)
        sums = [sum(cost_of(e) for e in jaxpr.eqns) for jaxpr in inside]
        # A while loop, whose length is data, counts as one iteration. Of branches, the most
        # expensive one counts.
        passes = found.length if isinstance(found, Scan) else 1
        return passes * (max(sums) if isinstance(found, Cond) else sum(sums))
    if is_mark(eqn):
        return 0.0
    # A device computes and moves at the same time: the slower of the two is the cost.
    moved = _FLOPS_PER_BYTE * sum(nbytes(v.aval) for v in [*eqn.invars, *eqn.outvars])
    return (1 + _BACKWARD) * max(multiplications(eqn), moved)


def _traced(whole: Callable[..., Any], structure: TreeDef, leaves: Sequence[Any]) -> Any:
    jax_seams.check()
    form: list[Any] = []

    def flat(*leaves: jax.Array) -> list[Any]:
        out, out_form = jax.tree.flatten(whole(*jax.tree.unflatten(structure, leaves)))
        form[:] = [out_form]
        return out

    shapes = [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for x in leaves]
    # Inside a trainer's trace, keys and counters belong to it; outside, to a trace of their own.
    if is_tracing():
        return jax.make_jaxpr(flat)(*shapes), form[0]
    with tracing(ProgramTrace()):
        return jax.make_jaxpr(flat)(*shapes), form[0]


def _with_boundaries(closed: ClosedJaxpr, cut: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
    """Run a model, with a boundary before each operation that begins a stage."""
    jaxpr = closed.jaxpr
    known = bound(jaxpr, closed.consts, inputs)
    edges = [0, *cut, len(jaxpr.eqns)]
    for first, last in itertools.pairwise(edges):
        if first:
            # A boundary is a mark on a value. If no value crosses it, any value is marked.
            crossing = [v for v in _alive(closed, first) if v not in jaxpr.invars] or [
                v for v in known if v not in jaxpr.constvars
            ][:1]
            marked = stage_boundary([known[v] for v in crossing])
            known.update(zip(crossing, marked, strict=True))
        run(jaxpr.eqns[first:last], known)
    return results_of(known, jaxpr.outvars)


def _alive(closed: ClosedJaxpr, index: int) -> list[Var]:
    """The variables that are live before an operation."""
    jaxpr = closed.jaxpr
    before = set(made_by(jaxpr.eqns[:index]))
    later = [*used_by(jaxpr.eqns[index:]), *variables(jaxpr.outvars)]
    return [v for v in dict.fromkeys(later) if v in before]


def _cheap_cut(closed: ClosedJaxpr, costs: np.ndarray, stages: int) -> tuple[int, ...]:
    """The balanced cut, each boundary moved to where the fewest bytes cross, at almost no cost."""
    cut = list(balanced_cut(costs.tolist(), stages))
    # Less than the error of the estimates, and enough to move a boundary from the middle of a block
    # to its end, where only one activation crosses.
    slack = 0.02 * costs.sum() / stages
    crossing = crossing_bytes(closed.jaxpr.eqns, closed.jaxpr.outvars)
    for number, place in enumerate(cut):
        low = cut[number - 1] + 1 if number else 1
        high = (cut[number + 1] if number + 1 < len(cut) else len(costs)) - 1
        near = [
            i
            for i in range(low, high + 1)
            if abs(costs[min(i, place) : max(i, place)].sum()) <= slack
        ]
        # In place: the next boundary must stay behind this one where it is now.
        cut[number] = min(near, key=lambda i: (crossing[i], abs(i - place)))
    return tuple(cut)


def _measured(closed: ClosedJaxpr, cut: Sequence[int], leaves: Sequence[Any]) -> list[float]:
    """Seconds of each stage's forward and backward, the best of a few runs."""
    jaxpr = closed.jaxpr
    edges = [0, *cut, len(jaxpr.eqns)]
    known = bound(jaxpr, closed.consts, list(map(jnp.asarray, leaves)))
    seconds = []
    for first, last in itertools.pairwise(edges):
        part = jaxpr.eqns[first:last]
        used, made = live_ins(part), set(made_by(part))
        ends = [v for v in _alive(closed, last) if v in made] or [
            v for v in jaxpr.outvars if v in made
        ]
        # Only floats have gradients; integers and keys are constants of the stage.
        floats = [v for v in used if is_float(v)]
        rest = {v: known[v] for v in used if v not in floats}

        def stage(
            *values: Any, part: Any = part, floats: Any = floats, rest: Any = rest, ends: Any = ends
        ) -> Any:
            here = {**rest, **dict(zip(floats, values, strict=True))}
            run(part, here)
            return [here[v] for v in ends]

        both = _both_ways(stage)
        values = [known[v] for v in floats]
        outputs, _ = jax.block_until_ready(both(*values))
        # The fastest of a few: whatever else the machine does can only add time.
        times = []
        for _ in range(5):
            started = time.perf_counter()
            jax.block_until_ready(both(*values))
            times.append(time.perf_counter() - started)
        seconds.append(min(times))
        # So that the next stage is measured on real values: NaN or denormal ones would change its time.
        known.update(zip(ends, outputs, strict=True))
    return seconds


def _both_ways(stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage and its backward, compiled together."""

    def floats_of(*values: Any) -> list[Any]:
        return [out for out in stage(*values) if jnp.issubdtype(out.dtype, jnp.inexact)]

    def both(*values: Any) -> Any:
        out, pull = jax.vjp(floats_of, *values)
        return stage(*values), pull([jnp.ones_like(x) for x in out])

    return jax.jit(both)
