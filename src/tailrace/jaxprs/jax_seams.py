"""Everything Tailrace relies on in JAX beyond its documented API, with a probe for each.

The probes run once per process, before the first program is traced, on one small program that has an
equation of every kind we read. `tailrace doctor` prints them as a table.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tailrace.base.seams import Seam
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.marks import COTANGENT, Tag, mark, mark_p
from tailrace.jaxprs.recording import Recording


@functools.cache
def check() -> None:
    """Raise a `VersionError` if JAX does not behave as expected; runs once per process."""
    internals.refuse_scan3()
    # Whoever asked for the sample before may have done so under other flags of JAX.
    sample.cache_clear()
    internals.PACKAGE.check(seam for seam in SEAMS if not seam.late)
    sample.cache_clear()  # its programs serve the probes alone


# -- the small program --------------------------------------------------------------------------


@jax.custom_jvp
def _ruled_forward(x: jax.Array) -> Any:
    return x * 2.0


@jax.custom_vjp
def _ruled_backward(x: jax.Array) -> Any:
    return x * 2.0


_ruled_forward.defjvp(lambda primals, tangents: (_ruled_forward(*primals), tangents[0] * 2.0))
_ruled_backward.defvjp(lambda x: (x, None), lambda _, back: (back * 2.0,))


def _inner(x: jax.Array) -> Any:
    return lax.sin(checkpoint_name(x, "tailrace"))


def _everything(x: jax.Array) -> Any:
    # Unused results: tracing alone makes the equations, and nothing here is ever compiled.
    lax.scan(lambda c, _: (c * 2.0, c), x, None, length=2)
    lax.while_loop(lambda c: c < 3.0, lambda c: c * 2.0, x)
    lax.cond(True, _same, _same, x)
    return [jax.jit(_inner)(x), jax.checkpoint(_inner)(x), _ruled_forward(x), _ruled_backward(x)]


def _same(x: jax.Array) -> Any:
    return x


def _marked(x: jax.Array) -> Any:
    with jax.named_scope("probe"):
        x = mark(lax.sin(x), Tag("value", "probe", follow_gradient=True))
    return jax.checkpoint(_inner)(x)


_FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


@functools.cache
def sample(which: str) -> list[JaxprEqn]:
    """The equations of a small program: "plain" (one of every kind) or "gradient"."""
    function = _everything if which == "plain" else jax.grad(_marked)
    return list(jax.make_jaxpr(function)(_FLOAT).jaxpr.eqns)


def _one(name: str) -> JaxprEqn:
    return next(eqn for eqn in sample("plain") if internals.operation(eqn) == name)


# -- probes -------------------------------------------------------------------------------------


def _programs() -> bool:
    closed = jax.make_jaxpr(lax.sin)(_FLOAT)
    eqn = closed.jaxpr.eqns[0]
    parts = (closed.consts, closed.jaxpr.constvars, eqn.invars, eqn.params, eqn.effects)
    again = eqn.replace(params={**eqn.params})
    return (
        len(parts) == 5 and closed.jaxpr.invars == eqn.invars and again.primitive is eqn.primitive
    )


def _scan() -> bool:
    eqn = _one("scan")
    has = {"jaxpr", "length", "reverse", "unroll"} <= eqn.params.keys()
    return (
        has and internals.scan_sizes(eqn) == (0, 1) and len(eqn.params["jaxpr"].jaxpr.invars) == 1
    )


def _while() -> bool:
    params = _one("while").params
    inner = [params[key].jaxpr.outvars for key in ("cond_jaxpr", "body_jaxpr")]
    return len(inner) == 2 and (params["cond_nconsts"], params["body_nconsts"]) == (0, 0)


def _cond() -> bool:
    eqn = _one("cond")
    return len(eqn.params["branches"]) == 2 and len(eqn.invars) == 2


def _jit() -> bool:
    params = _one("jit").params
    return params["name"] == "_inner" and len(params["jaxpr"].jaxpr.eqns) == 2


def _checkpoint() -> bool:
    eqn = _one("remat2")
    has = {"policy", "prevent_cse"} <= internals.parameters(eqn).keys()
    return has and internals.contents(eqn) is not None and not internals.is_replay(eqn)


def _recomputation() -> bool:
    found = [eqn for eqn in sample("gradient") if internals.is_replay(eqn)]
    return len(found) == 1 and internals.is_backward(found[0])


def _name() -> bool:
    contents = internals.contents(_one("remat2"))
    assert contents is not None
    named = contents[1].eqns[0]
    return (
        internals.operation(named) == "name" and internals.parameters(named)["name"] == "tailrace"
    )


def _custom() -> bool:
    # The function's name is what a tap in it is called by.
    names = {"custom_jvp_call": "_ruled_forward", "custom_vjp_call": "_ruled_backward"}
    return all(
        internals.contents(_one(name)) is not None
        and internals.function_name(_one(name)) == function
        for name, function in names.items()
    )


def _scopes() -> bool:
    forward = next(e for e in sample("gradient") if internals.operation(e) == "sin")
    # Identities must be equal in both passes: gradients of activations are found by them.
    backward = [e for e in sample("gradient") if internals.is_backward(e)]
    scopes = internals.scopes_of(forward)
    return [name for name, _ in scopes] == ["probe"] and any(
        internals.scopes_of(e) == scopes for e in backward
    )


def _sources() -> bool:
    trace: Any = sample("plain")[0].source_info.traceback
    return all(frame.line_num >= 0 and frame.file_name for frame in trace.frames)


def _derivatives() -> bool:
    tags = [eqn.params["tag"] for eqn in sample("gradient") if eqn.primitive is mark_p]
    return any(tag.direction == COTANGENT for tag in tags)


def _unused(x: jax.Array) -> Any:
    mark(x, Tag("value", "unused"))
    return x


def _dead_code() -> bool:
    # A new lambda each time: JAX caches pruned programs by function.
    closed = jax.make_jaxpr(lambda x: _unused(x))(_FLOAT)
    left, needed = internals.without_dead_code(closed, [False], [False])
    return len(left.jaxpr.eqns) == 1 and needed == [True]


def _batches() -> bool:
    closed = jax.make_jaxpr(jax.vmap(_unused))(jax.ShapeDtypeStruct((2,), jnp.float32))
    return closed.jaxpr.eqns[0].primitive is mark_p


def _binding() -> bool:
    eqns = [_one(name) for name in ("jit", "custom_jvp_call", "custom_vjp_call")]

    def again(x: jax.Array) -> list[Any]:
        with internals.equation_context(eqns[0]):
            return [internals.bind_again(eqn, [x])[0] for eqn in eqns]

    return len(jax.make_jaxpr(again)(_FLOAT).jaxpr.eqns) == 3


def _levels() -> bool:
    # Equal within a function and different inside another: that is all that is asked of the token.
    outside, inside = internals.trace_level(), []
    jax.make_jaxpr(lambda x: inside.append(internals.trace_level()) or x)(1.0)
    return outside == internals.trace_level() and inside[0] != outside


def _names() -> bool:
    known = ("select_n", "dot_general", "conv_general_dilated", "add", "mul", "broadcast_in_dim")
    return all(getattr(internals.primitives, f"{name}_p").name == name for name in known)


def _keys() -> bool:
    return bool(internals.key_generator(jax.eval_shape(jax.random.key, 0).dtype))


def _client() -> bool:
    internals.coordination_client()
    return True


def _recorded() -> bool:
    # This probe runs operations on a device, which is slow: it is "late".
    x = jnp.float32(3.0)
    with Recording() as recording:
        y = _ruled_forward(x) * _ruled_backward(x)
    plain = jax.grad(lambda x: _ruled_forward(x) * _ruled_backward(x))(x)
    return float(recording.gradients([y], [x])[0]) == float(plain)


SEAMS = (
    Seam("the parts of a traced program", "everything", _programs),
    Seam("the names of operations", "catalogue, optimizer state in pieces", _names),
    Seam("scan's parameters", "loops", _scan),
    Seam("while_loop's parameters", "loops", _while),
    Seam("cond's parameters", "taps in branches", _cond),
    Seam("jit's parameters", "taps in jitted functions", _jit),
    Seam("checkpoint's parameters", "taps in jax.checkpoint", _checkpoint),
    Seam("the use of differentiation rules", "cotangents", _derivatives),
    Seam("the form of recomputations", "telling them from forward passes", _recomputation),
    Seam("checkpoint_name's parameters", "tr.recomputation_checkpoint", _name),
    Seam("the form of custom derivatives", "taps in and around them", _custom),
    Seam("the form of name stacks", "names, gradients of activations", _scopes),
    Seam("the form of source lines", "where a tensor comes from", _sources),
    Seam("the use of dead-code rules", "taps and enqueues that nothing else uses", _dead_code),
    Seam("the use of batching rules", "taps under jax.vmap", _batches),
    Seam("the way to emit an equation again", "every compiled program", _binding),
    Seam("the trace that operations go to", "tapes outside of programs", _recorded, late=True),
    Seam("the level of tracing", "tr.key and feeds in nested functions", _levels),
    Seam("the type of random keys", "run directories, checkpoints", _keys),
    Seam("the effect of jax.debug", "enqueues in loops", lambda: bool(internals.debug_effect())),
    Seam("the connection to its coordination service", "several processes", _client, late=True),
)
