"""The only module that uses JAX below its public API, and the only one with version branches.

Supported: jax 0.10.1, 0.11 and 0.12. Everything here comes from `jax.extend` and `jax.interpreters`,
which promise less than `jax` itself: when a new JAX release breaks us, it breaks here. `jax_seams.py`
lists everything we rely on, with a probe for each.

Under the upgrade flags of JAX 0.12 (remat3, custom_vjp3, custom_jvp3) one primitive that carries an
object replaces a primitive for each kind of call; `operation` and `parameters` read both forms.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax

from tailrace.base.seams import Package
from tailrace.errors import VersionError

PACKAGE = Package("JAX", "jax", jax.__version__, newest="0.12.0.1")

try:
    from jax.core import ShapedArray, Trace, Tracer
    from jax.extend import source_info_util
    from jax.extend.core import (
        ClosedJaxpr,
        Jaxpr,
        JaxprEqn,
        Literal,
        Primitive,
        Var,
        get_opaque_trace_state,
        jaxpr_as_fun,
        primitives,
        set_current_trace,
        take_current_trace,
    )
    from jax.interpreters import ad, batching, mlir
    from jax.interpreters import partial_eval as pe

    # The registries that marks use when this package is imported.
    _ = (pe.dce_rules, pe.dce_jaxpr, batching.primitive_batchers, mlir.register_lowering)
    _ = (ad.primitive_jvps, ad.primitive_transposes, ad.Zero, ad.is_undefined_primal, ad.deflinear2)
    _ = (Primitive.def_impl, Primitive.def_abstract_eval, Primitive.def_effectful_abstract_eval)
except (ImportError, AttributeError) as _error:
    raise PACKAGE.unknown(f"what jax.extend and jax.interpreters offer ({_error})") from _error

Atom: TypeAlias = Var | Literal
"""An operand of an equation, or a result of a program."""

__all__ = [
    "PACKAGE",
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "ShapedArray",
    "Trace",
    "Var",
    "Tracer",
    "ad",
    "batching",
    "bind_again",
    "compiler_options",
    "kernels_of_any_size",
    "separate_kernels",
    "contents",
    "coordination_client",
    "debug_effect",
    "define_marker",
    "is_backward",
    "is_barrier",
    "is_custom",
    "is_remat",
    "is_replay",
    "equation_context",
    "form_of",
    "function_name",
    "inner_jaxprs",
    "is_library",
    "jaxpr_as_fun",
    "keeps_apart",
    "key_generator",
    "lines_of",
    "name_stack_of",
    "nbytes",
    "operation",
    "parameters",
    "primitives",
    "refuse_scan3",
    "replayed",
    "scan_sizes",
    "scope_names",
    "scopes_of",
    "set_current_trace",
    "take_current_trace",
    "trace_level",
    "user_frame",
    "value_of",
    "variables",
    "version",
    "without_dead_code",
]


def define_marker(
    name: str, is_shown: Callable[..., bool], is_passing: Callable[..., bool]
) -> Primitive:
    """A primitive that returns its operands unchanged and is not removed as dead code.

    The caller adds derivative rules; evaluation, lowering, batching and dead-code rules are the same
    for every marker.

    Args:
        name: the primitive's name.
        is_passing: whether an equation with these parameters is only on the way to another one, and may
            be removed as dead code.
        is_shown: whether an equation with these parameters has a visible effect (an enqueue, a print).
            Such an equation survives even where JAX keeps only effects: in a differentiated loop.
    """
    marker = Primitive(name)
    marker.multiple_results = True
    marker.def_impl(lambda *values, **_: list(values))
    marker.def_effectful_abstract_eval(
        lambda *avals, **params: (list(avals), debug_effect() if is_shown(**params) else set())
    )
    mlir.register_lowering(marker, lambda _context, *values, **__: list(values))
    batching.primitive_batchers[marker] = lambda values, dims, **params: (
        marker.bind(*values, **params),
        dims,
    )

    def live_inputs(used: list[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
        # The equation is the last argument; since 0.12 the liveness of the inputs comes before it.
        equation = rest[-1]
        # A mark whose result is unused must survive: it says "show this", not "compute with this".
        lives = any(used) or not is_passing(**equation.params)
        return [lives] * len(equation.invars), equation if lives else None

    pe.dce_rules[marker] = live_inputs
    return marker


@functools.cache
def debug_effect() -> set[Any]:
    """The effect that keeps equations of `jax.debug` alive wherever effects are allowed."""
    return set(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects)


def bind_again(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Emit `eqn` again on other inputs, under the current trace."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Until 0.10.1 a pair (functions, params); a bare dict of params in between.
    functions, params = bound if isinstance(bound, tuple) else ([], bound)
    out = eqn.primitive.bind(*functions, *inputs, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def equation_context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """A context whose equations get the name stack and the user traceback of `eqn`."""
    # Appended, not replaced: around the equation there may be a scope of the program it moves into.
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def name_stack_of(eqn: JaxprEqn) -> str:
    """The scopes an equation was traced in, outermost first, separated by slashes."""
    return str(eqn.source_info.name_stack)


_HELD = "call_hi_primitive"
_SAME = {
    "RematTraced": "remat2",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomVJPTraced": "custom_vjp_call",
    "CustomJVPTraced": "custom_jvp_call",
    "eval_jaxpr": "closed_call",  # since 0.11
}
"""Operations with other names in newer versions or under upgrade flags."""


_BINDING_AXES = ("shard_map", "xla_pmap")
"""Calls that define the names of mesh axes for the program inside."""


def operation(eqn: JaxprEqn) -> str:
    """The operation of an equation, by the name of its primitive in JAX 0.10."""
    name = eqn.primitive.name
    if name == _HELD:
        name = type(eqn.params["_prim"]).__name__
    return _SAME.get(name, name)


def parameters(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation, or of the object it carries."""
    return eqn.params["_prim"].params if eqn.primitive.name == _HELD else eqn.params


def is_custom(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a function with a custom derivative."""
    return operation(eqn) in ("custom_jvp_call", "custom_vjp_call")


def is_remat(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.checkpoint`, or the recomputation that one causes."""
    return operation(eqn) == "remat2"


def is_replay(eqn: JaxprEqn) -> bool:
    """Whether an equation recomputes a forward pass for the backward pass."""
    if not is_remat(eqn):
        return False
    if "differentiated" in eqn.params:
        return bool(eqn.params["differentiated"])
    # Under remat3 the equation has no flag; JAX then names the scope of a recomputation.
    return [name for name, _ in scopes_of(eqn)][-1:] == [_REPLAYED]


def inner_jaxprs(eqn: JaxprEqn) -> list[tuple[str, int, Jaxpr, tuple[Any, ...]]]:
    """The programs inside an equation: (parameter, position in it, jaxpr, constants)."""
    found = []
    for key, value in parameters(eqn).items():
        for position, item in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if eqn.primitive.name == _HELD:
                item = getattr(item, "jaxpr", item)  # a function, traced
            if isinstance(item, ClosedJaxpr):
                found.append((key, position, item.jaxpr, tuple(item.consts)))
            elif isinstance(item, Jaxpr):
                found.append((key, position, item, ()))
    return found


def value_of(known: Mapping[Any, Any], var: Atom) -> Any:
    """The value of a variable (looked up in `known`) or of a literal."""
    return var.val if isinstance(var, Literal) else known[var]


def variables(operands: Iterable[Atom]) -> list[Var]:
    """Operands of an equation, or results of a program, without the literals."""
    return [var for var in operands if isinstance(var, Var)]


def nbytes(form: Any) -> int:
    """The bytes of an array of this shape and dtype; a random key, whose size is hidden, counts 8."""
    return math.prod(form.shape) * getattr(form.dtype, "itemsize", 8)


def form_of(var: Atom, *, weak: bool = False) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable, to trace with.

    With `weak`, weakly typed if the variable is. Without: a value that was kept in a stash or a buffer
    has lost that.
    """
    aval: Any = var.aval
    weak = weak and getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def contents(eqn: JaxprEqn) -> tuple[int, Jaxpr, tuple[Any, ...]] | None:
    """The one program that an equation such as `jit` or `remat` calls, or None.

    With its index in `inner_jaxprs`. Its inputs and results must have the shapes and dtypes of the
    equation's: this excludes the scalar function inside a reduction, which is not called on the
    operands.
    """
    # Its contents mean something only inside it: they may name its mesh axes.
    if operation(eqn) in _BINDING_AXES:
        return None
    # By forms, not by the name of a parameter: those differ between primitives and versions.
    for number, (_, _, inner, consts) in enumerate(inner_jaxprs(eqn)):
        if _same_forms(inner.invars, eqn.invars) and _same_forms(inner.outvars, eqn.outvars):
            return number, inner, consts
    return None


def _same_forms(inside: Iterable[Atom], outside: Iterable[Atom]) -> bool:
    return [_form(var.aval) for var in inside] == [_form(var.aval) for var in outside]


def _form(aval: Any) -> Any:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else aval


def without_dead_code(
    closed: ClosedJaxpr, used: list[bool], keep: list[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """A program that computes only the used outputs, and a flag per input: whether it is still taken.

    Inputs that become unused are dropped, unless `keep` is true for them.
    """
    jaxpr, needed = pe.dce_jaxpr(closed.jaxpr, used, instantiate=keep)
    return ClosedJaxpr(jaxpr, closed.consts), list(needed)


def coordination_client() -> Any:
    """The connection of this process to the service that `jax.distributed` started."""
    from jax.experimental import multihost_utils  # late: only multi-process programs need it

    try:
        # Reached through a module that imports it: `jax._src.distributed` itself is private.
        return multihost_utils.distributed.global_state.client  # type: ignore[attr-defined]
    except AttributeError as error:
        raise PACKAGE.unknown("the connection to its coordination service") from error


def refuse_scan3() -> None:
    """Refuse the upgrade flag that changes loops: JAX itself cannot train with it yet."""
    if getattr(jax.config, "jax_scan3", False):
        raise VersionError(
            "Tailrace does not run under JAX_SCAN3: loops made with it have no reverse-mode derivative "
            "in JAX, and ignore reverse=True. Leave JAX_SCAN3 unset, or call "
            "jax.config.update('jax_scan3', False) before importing tailrace."
        )


def function_name(eqn: JaxprEqn) -> str:
    """The name of the Python function that an equation's program was traced from, if known."""
    for _, _, inner, _ in inner_jaxprs(eqn):
        return str(getattr(getattr(inner, "debug_info", None), "func_name", ""))
    return ""


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of constants and the number of carried values among a scan's operands."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since 0.11
    return len(consts), len(carry)


def keeps_apart(eqn: JaxprEqn) -> bool:
    """Whether a recomputation must not be merged with the computation it repeats."""
    prevent = parameters(eqn).get("prevent_cse", True)
    return any(prevent) if isinstance(prevent, tuple | list) else bool(prevent)


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether a recomputation itself prevents merging; under remat3 an equation before it does."""
    return "differentiated" in eqn.params and keeps_apart(eqn)


def replayed(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Emit `function(*args)`, a list, marked as a forward pass that is repeated for its backward."""
    leaves, structure = jax.tree.flatten(args)
    # Through a checkpoint that is traced and then flagged: JAX has no public way to emit an equation
    # that counts as a recomputation.
    again = jax.checkpoint(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))
    closed = jax.make_jaxpr(again)(*leaves)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, leaves, strict=True))
    for eqn in closed.jaxpr.eqns:
        inputs = [value_of(known, var) for var in eqn.invars]
        made = _replay(eqn, inputs) if is_remat(eqn) else bind_again(eqn, inputs)
        known.update(zip(eqn.outvars, made, strict=True))
    return [value_of(known, var) for var in closed.jaxpr.outvars]


_REPLAYED = "rematted_computation"


def _replay(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    if "differentiated" in eqn.params:
        return bind_again(eqn.replace(params={**eqn.params, "differentiated": True}), inputs)
    # As JAX itself does under remat3: the barrier keeps the recomputation apart, the scope names it.
    with jax.named_scope(_REPLAYED):
        return bind_again(eqn, list(jax.lax.optimization_barrier(inputs)))


def scopes_of(eqn: JaxprEqn) -> list[tuple[str, int]]:
    """The named scopes of an equation, outermost first: name, and the identity of that scope's entry.

    The identity is that of JAX's scope object, which differentiation preserves: it tells two entries of
    scopes with the same name apart. A pass that is differentiated again, for its recomputation, lists
    the scopes around it twice; here each appears once.
    """
    stack = eqn.source_info.name_stack.stack
    # By the class' name: the class itself is private to JAX.
    found = {id(item): item.name for item in stack if type(item).__name__ == "Scope"}
    return [(name, identity) for identity, name in found.items()]


def scope_names(chain: Iterable[JaxprEqn]) -> list[str]:
    """The names of the scopes of a chain of nested equations, each scope once."""
    found = {identity: name for eqn in chain for name, identity in scopes_of(eqn)}
    return list(found.values())


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to the backward pass."""
    stack = eqn.source_info.name_stack.stack
    return any(type(i).__name__ == "Transform" and i.name == "transpose" for i in stack)


_LIBRARIES = frozenset(
    ["jax", "jaxlib", "flax", "equinox", "haiku", "keras", "optax", "tailrace", "torch", "torchax"]
)
_OWN_FILES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_library(path: str) -> bool:
    """Whether a file belongs to us or to a library, not to the user, wherever the user's files are."""
    _, installed, inside = path.replace(os.sep, "/").rpartition("site-packages/")
    return path.startswith(_OWN_FILES) or bool(installed and inside.split("/")[0] in _LIBRARIES)


def user_frame(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that an equation comes from, or an empty string."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        path = frame.file_name
        if not is_library(path) and path[:1] != "<":
            return f"{path}:{frame.line_num}"
    return ""


def lines_of(eqn: JaxprEqn) -> tuple[tuple[str, int], ...]:
    """File and line of each call that led to an equation, innermost first, up to Tailrace's code.

    JAX's functions come last: their callers are more telling.
    """
    trace = eqn.source_info.traceback
    inside, around = [], []
    for frame in trace.frames if trace is not None else ():
        if frame.file_name.startswith(_OWN_FILES):
            break
        place = (frame.file_name, frame.line_num)
        (inside if _is_jax(frame.file_name) else around).append(place)
    return (*around, *inside)


def _is_jax(path: str) -> bool:
    return path.replace(os.sep, "/").rpartition("site-packages/")[2].startswith(("jax/", "jaxlib/"))


def key_generator(dtype: Any) -> str:
    """The name of the random generator that keys of this dtype belong to."""
    return dtype._impl.name


def trace_level() -> Any:
    """A token for the function being traced: equal within one function, different in another."""
    return get_opaque_trace_state()


def compiler_options(equations: Iterable[JaxprEqn], platform: str) -> dict[str, str] | None:
    """Compiler options that a program of these equations needs for correct results; None for none.

    JAX 0.10's CPU compiler hands window reductions (max pooling) to a library that reads wrong elements
    if the operand is a reshaped slice of a scanned array.
    """
    if version()[:2] != (0, 10) or platform != "cpu" or not _has_windows(equations):
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def separate_kernels(platform: str) -> dict[str, str]:
    """Options by which a profiler sees each kernel under the name of its instruction.

    A GPU launches many kernels as one graph, and its profiler names the graph alone. A graph that must
    have more kernels than any program is never made; what the kernels compute is the same.
    """
    return {"xla_gpu_graph_min_graph_size": "2147483647"} if platform == "gpu" else {}


def kernels_of_any_size(platform: str) -> dict[str, str]:
    """Options by which loops are compiled alike, however small they are.

    XLA's CPU compiler makes one kernel of a loop that touches less than about 1 KiB. In it, products
    are added up in another order, and bfloat16 is rounded in fewer places. One more value in the loop,
    such as what a tap reads, and it is compiled as larger ones are.
    """
    return {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if platform == "cpu" else {}


def _has_windows(equations: Iterable[JaxprEqn]) -> bool:
    return any(
        "reduce_window" in eqn.primitive.name
        or any(_has_windows(inner.eqns) for _, _, inner, _ in inner_jaxprs(eqn))
        for eqn in equations
    )


def version() -> tuple[int, ...]:
    """The version of JAX as numbers."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


refuse_scan3()  # at import: nothing that follows would work
