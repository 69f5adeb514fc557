"""The one reader of jaxprs: views of equations, the visitor, and stretches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tailrace.jaxprs import internals, stretches
from tailrace.jaxprs.control import Call, Cond, Scan, While, control, jit_of, programs_in, scan_of
from tailrace.jaxprs.marks import Tag, mark
from tailrace.jaxprs.own_equations import has_role, is_mark, tag_in
from tailrace.jaxprs.visitor import Emitter
from tailrace.jaxprs.walk import by_surrounding, walk


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x) * 2


ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))


def scanned(x):
    (a, b), ys = lax.scan(
        lambda c, t: ((c[0] * 0.5 + x.sum(), c[1] + t), c[0] * t), (x, x[0]), x, reverse=True
    )
    return a, b, ys


def looped(x):
    limit = x.sum() + 7
    return lax.while_loop(lambda c: c.sum() < limit, lambda c: c + jnp.abs(x) + 0.1, x)


def chosen(x):
    branches = [jnp.sin, lambda v: v * x[0], lambda v: mark(v, Tag("value", "inside"))]
    return lax.switch((x[1] + 1).astype(jnp.int32), branches, x)


@jax.jit
def called(x):
    return jnp.tanh(x) + 1


def recomputed(x):
    return jax.checkpoint(lambda v: jnp.cos(v) * x, prevent_cse=False)(x)


KINDS = {
    scanned: Scan,
    looped: While,
    chosen: Cond,
    called: Call,
    recomputed: Call,
    ruled: Call,
}
X = np.array([0.3, 1.2, -0.4], np.float32)


def equations(function, *args):
    return jax.make_jaxpr(function)(*(args or (X,))).jaxpr.eqns


def total(function, x):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(x)))


def view(function):
    return next(found for eqn in equations(function) if (found := control(eqn)) is not None)


class Everything(Emitter[list]):
    """Enters every equation, and notes where it was."""

    def enters(self, eqn, here):
        return True

    def made(self, eqn, inputs, outputs, around, here):
        around.append((here, eqn))
        return outputs


@pytest.mark.parametrize("function", KINDS, ids=lambda f: getattr(f, "__name__", "ruled"))
def test_what_an_equation_is(function):
    assert type(view(function)) is KINDS[function]


def test_the_parts_of_a_scan():
    scan = view(scanned)
    assert (scan.num_carry, scan.length, scan.reverse) == (2, 3, True)
    consts, carried, rows = scan.split(scan.eqn.invars)
    assert len(consts) == scan.num_consts
    assert len(carried) == 2
    assert len(rows) == 1
    after, stacked = scan.split_results(scan.eqn.outvars)
    assert [v.aval.shape for v in after] == [(3,), ()]
    assert [v.aval.shape for v in stacked] == [(3, 3)]


def test_the_kinds_of_calls():
    assert view(called).is_jit
    assert view(recomputed).is_remat
    assert view(ruled).is_custom
    assert not view(called).is_custom
    assert not view(recomputed).is_replay
    replays = [
        c for eqn in equations(jax.grad(lambda x: recomputed(x).sum())) if (c := control(eqn))
    ]
    assert any(isinstance(call, Call) and call.is_replay for call in replays)


# While loops have no reverse-mode derivative.
GRADIENTS = [functools.partial(total, function) for function in KINDS if function is not looped]


@pytest.mark.parametrize("function", [*KINDS, *map(jax.grad, GRADIENTS)])
def test_a_program_emitted_again_computes_the_same(function):
    closed = jax.make_jaxpr(function)(X)
    seen = []

    @jax.jit
    def again(x):
        return Everything().run(closed.jaxpr, closed.consts, [x], seen)

    expected = jax.tree.leaves(jax.jit(function)(X))
    for made, plain in zip(again(X), expected, strict=True):
        np.testing.assert_array_equal(made, plain)
    places = {place.position: place.equation for place in walk(closed.jaxpr.eqns)}
    assert {here for here, _ in seen} == set(places)
    assert all(places[here] is eqn for here, eqn in seen)


def test_the_function_inside_a_reduction_is_not_called():
    # Of as many operands and results as the reduction itself: once it was taken for a call.
    odd = lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 2, (0,))  # noqa: E731
    (eqn,) = [e for e in equations(odd) if programs_in(e)]
    assert control(eqn) is None


def test_other_equations_are_nothing():
    (eqn,) = equations(jnp.sin)
    assert control(eqn) is scan_of(eqn) is jit_of(eqn) is tag_in(eqn) is None
    (marked,) = equations(lambda x: mark(x, Tag("value", "me")))
    assert is_mark(marked)
    assert has_role(marked, "value")
    assert not has_role(marked, "loop")
    assert tag_in(marked).name == "me"


def test_positions_by_what_surrounds_them():
    found = by_surrounding({(3, 0, 1, 0, 2): "ab", (3, 0, 4): "c", (5,): "d"})
    assert found == {(3,): ["a", "b", "c"], (3, 0, 1): ["a", "b"]}


# -- stretches ----------------------------------------------------------------------------------


@functools.cache
def random_program(seed):
    random = np.random.default_rng(seed)

    def function(x, y):
        values = [x, y, x.sum()]
        for _ in range(20):
            a, b = (values[i] for i in random.integers(0, len(values), 2))
            values.append(a * b + 1)
        return [values[i] for i in random.integers(0, len(values), 3)]

    return jax.make_jaxpr(function)(X, X[0])


@pytest.mark.parametrize("seed", range(5))
def test_what_a_stretch_reads_and_makes(seed):
    closed = random_program(seed)
    eqns, outs = closed.jaxpr.eqns, closed.jaxpr.outvars
    parts = stretches.stretches([eqns[:7], eqns[7:20], eqns[20:]], outs)
    known = stretches.bound(closed.jaxpr, closed.consts, [X, X[0]])
    available = dict(known)
    for part in parts:
        assert set(part.reads) <= set(available)
        here = {var: available[var] for var in part.reads}
        stretches.run(part.equations, here)  # needs nothing else
        available.update((var, here[var]) for var in part.makes)
    stretches.run(eqns, known)
    for var in internals.variables(outs):
        np.testing.assert_array_equal(available[var], known[var])
    made = [var for part in parts for var in part.makes]
    assert len(made) == len(set(made))
    used_later = {v for part in parts for v in part.reads} | set(internals.variables(outs))
    assert set(made) <= used_later


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_cross(seed):
    closed = random_program(seed)
    eqns, outs = closed.jaxpr.eqns, closed.jaxpr.outvars
    for place, crossing in enumerate(stretches.crossing_bytes(eqns, outs)):
        before = set(stretches.made_by(eqns[:place]))
        after = {*stretches.used_by(eqns[place:]), *internals.variables(outs)}
        assert crossing == sum(internals.nbytes(var.aval) for var in before & after)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_needed_for_a_result(seed):
    closed = random_program(seed)
    for out in internals.variables(closed.jaxpr.outvars):
        known = stretches.bound(closed.jaxpr, closed.consts, [X, X[0]])
        whole = dict(known)
        needed = stretches.needed_for(closed.jaxpr.eqns, [out])
        stretches.run(needed, known)
        stretches.run(closed.jaxpr.eqns, whole)
        np.testing.assert_array_equal(known[out], whole[out])
        useful = stretches.useful_for(closed.jaxpr.eqns, [out])
        assert all(set(eqn.outvars) & useful for eqn in needed)


def test_calls_are_opened():
    nested = jax.jit(lambda x: called(x) * 2)
    closed = jax.make_jaxpr(nested)(X)
    opened = stretches.opened(closed, [X])
    assert not any(map(jit_of, opened.jaxpr.eqns))
    np.testing.assert_array_equal(internals.jaxpr_as_fun(opened)(X)[0], nested(X))
    outer = stretches.opened(closed, [X], lambda eqn: eqn is closed.jaxpr.eqns[0])
    assert sum(jit_of(eqn) is not None for eqn in outer.jaxpr.eqns) == 1
