"""Marks: identity operations that carry information about a value inside a traced program.

A Python side effect cannot request "send this out" from inside `jax.grad`: it would leak tracers. A
mark can, because it is an equation of the program: it survives differentiation, `jit`, `scan`, `remat`
and `vmap`, and is found when the program's jaxpr is read. Four kinds of equation exist:

* `mark(values, tag)` returns its values. The tag names them and says what to do with them.
* `dequeue(counter, queue, ...)` represents the next element of an infeed.
* `ambient(what)` represents a number that is known only at run time (a key, a counter).
* `unit(program, operands, ...)` calls a program: the forward or backward of a stage of a pipeline.

Outside a program, marks are no-ops; the public wrappers of the others raise an error.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import traceback
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.errors import ProgramError
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ad
from tailrace.jaxprs.replica_reductions import reduced_dtype

FORWARD, TANGENT, COTANGENT = "forward", "tangent", "cotangent"


@dataclasses.dataclass(frozen=True)
class Tag:
    """The content of a mark.

    Attributes:
        role: the purpose of the mark: "loop", "outfeed", "value", "print", "stage", ...
        name: the name of the value, by the contract ("grad/dense/kernel"), or a title.
        payload: additional data of the role: a queue, print options, a loop's length.
        follow_gradient: whether to mark the gradient that flows back through the mark too.
        direction: `FORWARD`, `TANGENT` or `COTANGENT`; set by differentiation, not by the caller.
        site: the number of the call that made the mark, so that an error can name a lost one.
        of_user: whether `tr.mark` made it: its name need not be the only one of its kind.
    """

    role: str
    name: str = ""
    payload: Any = None
    follow_gradient: bool = False
    direction: str = FORWARD
    site: int = -1
    of_user: bool = False


mark_p = internals.define_marker(
    "tailrace_mark",
    is_shown=lambda *, tag: tag.site >= 0 and tag.direction == FORWARD,
    # Nothing flows back through a tangent that nothing depends on. Kept alive in a `jax.checkpoint`, it
    # would be transposed all the same, and JAX cannot transpose a scan whose rows have no cotangent.
    is_passing=lambda *, tag: tag.direction == TANGENT,
)
cross_replica_p = internals.Primitive("tailrace_cross_replica")
gather_p = internals.Primitive("tailrace_gather")
dequeue_p = internals.Primitive("tailrace_dequeue")
ambient_p = internals.Primitive("tailrace_ambient")
unit_p = internals.Primitive("tailrace_unit")


def mark(values: Any, tag: Tag) -> Any:
    """Return `values` (a tree), marked with `tag`."""
    leaves, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, mark_p.bind(*map(jnp.asarray, leaves), tag=tag))


def name_values(kind: str, tree: Any, alone: str = "0") -> Any:
    """Mark every leaf of `tree` as `kind/path`, the name by which observers find it.

    A tree that is a single array has no path; its name is `kind/alone`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [
        mark(leaf, Tag("value", f"{kind}/{path_name(path) or alone}")) for path, leaf in leaves
    ]
    return jax.tree.unflatten(structure, named)


def path_name(path: Sequence[Any]) -> str:
    """A tree path as a name: `("layers", 0, "kernel")` becomes `layers/0/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


# -- differentiation ----------------------------------------------------------------------------


def _mark_jvp(primals: Any, tangents: Any, *, tag: Tag) -> Any:
    out = mark_p.bind(*primals, tag=tag)
    if tag.follow_gradient:
        along = dataclasses.replace(tag, direction=TANGENT)
        # A symbolic zero has no array that could be marked.
        tangents = [t if isinstance(t, ad.Zero) else mark_p.bind(t, tag=along)[0] for t in tangents]
    return out, list(tangents)


def _mark_transpose(cotangents: Any, *operands: Any, tag: Tag) -> Any:
    back = dataclasses.replace(tag, direction=COTANGENT)
    return [
        None
        # Only operands that the function is linear in have a cotangent.
        if not ad.is_undefined_primal(operand)
        else (ct if isinstance(ct, ad.Zero) else mark_p.bind(ct, tag=back)[0])
        for ct, operand in zip(cotangents, operands, strict=True)
    ]


ad.primitive_jvps[mark_p] = _mark_jvp
ad.primitive_transposes[mark_p] = _mark_transpose


# -- elements of an infeed ----------------------------------------------------------------------

dequeue_p.multiple_results = True
dequeue_p.def_abstract_eval(lambda counter, *, queue, avals: list(avals))
# Elements are data: a gradient with respect to one is zero.
ad.primitive_jvps[dequeue_p] = lambda primals, tangents, **params: (
    (out := dequeue_p.bind(*primals, **params)),
    [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in out],
)


class WeakQueue:
    """A weak reference to a queue: JAX's caches keep alive whatever an equation's parameters hold."""

    def __init__(self, queue: Any) -> None:
        self._queue = weakref.ref(queue)

    @property
    def queue(self) -> Any:
        """The queue; the traced program keeps it alive."""
        queue = self._queue()
        assert queue is not None
        return queue


def dequeue(counter: jax.Array, queue: Any, spec: Any) -> Any:
    """The next element of `queue`, whose leaves have the shapes and dtypes of `spec`."""
    leaves, structure = jax.tree.flatten(spec)
    avals = tuple(internals.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    current_trace("tr.repeat").feeds.append(queue)
    # The counter makes the equation loop-variant: without it, differentiation would hoist the equation
    # out of the loop and every iteration would see the same element.
    out = dequeue_p.bind(counter, queue=WeakQueue(queue), avals=avals)
    return jax.tree.unflatten(structure, out)


# -- numbers that are known at run time ---------------------------------------------------------

# Functions, because the dtype of a key depends on the configuration when the program is traced.
_AMBIENT = {
    "key": lambda: jax.eval_shape(lambda: jax.random.key(0)),
    "step": lambda: jax.ShapeDtypeStruct((), jnp.int32),
    "microbatch": lambda: jax.ShapeDtypeStruct((), jnp.int32),
    "replica": lambda: jax.ShapeDtypeStruct((), jnp.int32),
}


def _ambient_aval(*, what: str, **_: Any) -> Any:
    shape = _AMBIENT[what]()
    return internals.ShapedArray(shape.shape, shape.dtype)


ambient_p.def_abstract_eval(_ambient_aval)


def ambient(what: str, call: int, depth: int) -> Any:
    """A value known only at run time; `depth` is the number of loops around the call."""
    return ambient_p.bind(what=what, call=call, depth=depth)


# -- units of a pipeline ------------------------------------------------------------------------
# One equation each, so that an executor can run them on another device and at another time; running
# the program as written executes their contents in place.

unit_p.multiple_results = True
unit_p.def_abstract_eval(lambda *_, program, **__: [var.aval for var in program.jaxpr.outvars])


def unit(
    program: internals.ClosedJaxpr, operands: Sequence[Any], kind: str, stage: int, member: int
) -> list[Any]:
    """Call `program`, the forward ("F") or backward ("B") of a member of a stage."""
    return unit_p.bind(*operands, program=program, kind=kind, stage=stage, member=member)


# -- reductions over replicas -------------------------------------------------------------------
# Not `lax.psum`: the program is traced before it is replicated, so no mesh axis exists yet.

cross_replica_p.def_abstract_eval(
    lambda value, *, mean: internals.ShapedArray(value.shape, reduced_dtype(value.dtype, mean))
)
ad.deflinear2(cross_replica_p, lambda ct, value, *, mean: [cross_replica_p.bind(ct, mean=mean)])
internals.batching.primitive_batchers[cross_replica_p] = lambda values, dims, *, mean: (
    cross_replica_p.bind(*values, mean=mean),
    dims[0],
)


gather_p.def_abstract_eval(
    lambda value, *, replicas: internals.ShapedArray((replicas, *value.shape), value.dtype)
)

# -- the program that is being traced -----------------------------------------------------------


@dataclasses.dataclass(eq=False)
class ProgramTrace:
    """State of the trace of a program's function.

    `feeds` keeps the program's queues alive: its equations refer to them weakly.
    """

    replicas: int = 1
    loops: int = 0
    calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    sites: dict[int, str] = dataclasses.field(default_factory=dict)
    feeds: list[Any] = dataclasses.field(default_factory=list)
    draws_keys: bool = False

    def new_site(self, what: str) -> int:
        """Number a call that must appear in the traced program, and record its source line."""
        number = len(self.sites)
        # The innermost frame of the user's own code: what the message about a lost mark points at.
        frame = next(
            (
                f
                for f in reversed(traceback.extract_stack())
                if not internals.is_library(f.filename)
            ),
            None,
        )
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        self.sites[number] = f"{what}{where}"
        return number


_current: contextvars.ContextVar[ProgramTrace | None] = contextvars.ContextVar(
    "tailrace_program_trace", default=None
)


def current_trace(caller: str) -> ProgramTrace:
    """The program being traced; an error that names `caller` if there is none."""
    trace = _current.get()
    if trace is None:
        raise ProgramError(
            f"{caller} means something only inside a program. It was called outside one. "
            f"Call it in the function given to tr.compile(...), or in the step of a tr.Trainer."
        )
    return trace


def is_tracing() -> bool:
    """Whether a program is being traced."""
    return _current.get() is not None


@contextlib.contextmanager
def tracing(trace: ProgramTrace) -> Generator[ProgramTrace]:
    """Make `trace` the current one."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


@contextlib.contextmanager
def inside_loop(trace: ProgramTrace) -> Generator[None]:
    """Count one more loop around everything traced in this context."""
    trace.loops += 1
    try:
        yield
    finally:
        trace.loops -= 1
