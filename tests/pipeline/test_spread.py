"""Spreading a program over devices: nothing is used where it is not, everything runs once."""

import random

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.jaxprs.internals import Literal
from tailrace.jaxprs.marks import Tag, cross_replica_p, mark
from tailrace.pipeline.lowering.update_partition import Spread, guess_homes

drawn = settings(deadline=None, max_examples=60)
DEVICES = range(3)


def random_program(seed, inputs=5):
    """A jaxpr of small and large operations on inputs of two sizes."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 1, 20_000]) for _ in range(inputs)]

    def program(*args):
        values = list(args)
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            a, b = rng.choice(values), rng.choice(values)
            if kind < 0.15:
                values.append(mark(a, Tag("value", "name")))
            elif kind < 0.3:
                values.append(cross_replica_p.bind(a, mean=True))
            elif kind < 0.5:
                values.append(a.sum()[None])
            else:
                values.append(a * b if a.shape == b.shape else a * b.sum())
        return values

    forms = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    return rng, jax.make_jaxpr(program)(*forms).jaxpr


def spread_out(seed, replicas):
    rng, jaxpr = random_program(seed)
    held = {
        var: frozenset(rng.sample(DEVICES, rng.choice([1, 1, 2])))
        for var in jaxpr.invars
        if rng.random() < 0.8
    }
    outputs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    needed = {
        var: rng.choice([None, frozenset([rng.choice(DEVICES)])])
        for var in rng.sample(outputs, min(3, len(outputs)))
    }
    return jaxpr, held, needed, Spread(jaxpr.eqns, held, needed, replicas)


@drawn
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_every_equation_runs_once_on_each_of_its_devices(seed, replicas):
    jaxpr, _, _, spread = spread_out(seed, replicas)
    runs = {index: [] for index in range(len(jaxpr.eqns))}
    for phase in spread.phases:
        for index in phase.everywhere:
            runs[index].append("everywhere")
        for index in phase.reduced:
            runs[index].append("reduced")
        for device, equations in phase.local.items():
            for index in equations:
                runs[index].append(device)
    for index, found in runs.items():
        where = spread.where(index)
        assert sorted(found) in ([["everywhere"]] if not where else [["reduced"], where])
        is_reduction = jaxpr.eqns[index].primitive is cross_replica_p and replicas > 1
        assert ("reduced" in found) == (is_reduction and bool(where))


@drawn
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_nothing_is_used_before_it_is_made_or_sent(seed, replicas):
    jaxpr, held, needed, spread = spread_out(seed, replicas)
    have = {d: {v for v in jaxpr.invars if v not in held or d in held[v]} for d in DEVICES}

    def run(index, devices):
        eqn = jaxpr.eqns[index]
        operands = {spread.root(v) for v in eqn.invars if not isinstance(v, Literal)}
        for device in devices:
            assert operands <= have[device], f"equation {index} on device {device}"
        for device in devices:
            have[device].update(v for v in eqn.outvars if v not in spread.same)

    for phase in spread.phases:
        for var in phase.sent:
            source = min(spread.at[var])
            assert var in have[source]
            for device in DEVICES:
                have[device].add(var)
        for index in phase.reduced:
            run(index, spread.where(index))
        for index in phase.everywhere:
            run(index, DEVICES)
        for device, equations in phase.local.items():
            for index in equations:
                run(index, [device])
    for var, where in needed.items():
        for device in DEVICES if where is None else where:
            assert spread.root(var) in have[device]


@drawn
@given(st.integers(0, 10**6))
def test_large_values_are_not_sent_to_all_where_small_ones_will_do(seed):
    jaxpr, _, needed, spread = spread_out(seed, 1)
    wanted = {spread.root(v) for v in needed}
    for phase in spread.phases:
        for index in phase.everywhere:
            operands = [spread.root(v) for v in jaxpr.eqns[index].invars if v in spread.at]
            for var in operands:  # an equation that all run uses no large value of one device
                if var.aval.size > 16_384 and var not in wanted:
                    assert var not in spread.sent_at


def test_a_norm_over_all_devices_sends_scalars_only():
    def norm(a, b, c):
        total = (a**2).sum() + (b**2).sum() + (c**2).sum()
        scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(total))
        return a * scale, b * scale, c * scale

    form = jax.ShapeDtypeStruct((100, 1000), jnp.float32)
    jaxpr = jax.make_jaxpr(norm)(form, form, form).jaxpr
    held = {var: frozenset([d]) for d, var in enumerate(jaxpr.invars)}
    needed = {out: frozenset([d]) for d, out in enumerate(jaxpr.outvars)}
    spread = Spread(jaxpr.eqns, held, needed, replicas=1)
    sent = [var for phase in spread.phases for var in phase.sent]
    assert [var.aval.shape for var in sent] == [()] * 3
    assert len(spread.phases) <= 3


def test_gradients_are_averaged_over_replicas_where_they_are():
    def update(w, v, g, h):
        mean = [cross_replica_p.bind(x, mean=True) for x in (g, h)]
        return w - mean[0], v - mean[1]

    form = jax.ShapeDtypeStruct((100, 1000), jnp.float32)
    jaxpr = jax.make_jaxpr(update)(form, form, form, form).jaxpr
    held = {var: frozenset([d % 2]) for d, var in enumerate(jaxpr.invars)}
    needed = {out: frozenset([d]) for d, out in enumerate(jaxpr.outvars)}
    spread = Spread(jaxpr.eqns, held, needed, replicas=2)
    assert [phase.sent for phase in spread.phases] == [[]] * len(spread.phases)
    assert sum(len(phase.reduced) for phase in spread.phases) == 2


def test_two_names_of_one_value_are_needed_where_each_is():
    jaxpr = jax.make_jaxpr(lambda a: (b := a + 1.0, mark(b, Tag("value", "name"))))(1.0).jaxpr
    held = {jaxpr.invars[0]: frozenset([0])}
    for needs in ((None, frozenset([0])), (frozenset([0]), None), (frozenset([0]), frozenset([1]))):
        spread = Spread(jaxpr.eqns, held, dict(zip(jaxpr.outvars, needs, strict=True)), 1)
        assert list(spread.sent_at) == [jaxpr.outvars[0]]


def test_homes_are_where_a_value_is_needed():
    def update(w, v, m, n, both):
        return w + m, v + n, (w * both).sum() + (v * both).sum()

    form = jax.ShapeDtypeStruct((3,), jnp.float32)
    jaxpr = jax.make_jaxpr(update)(*[form] * 5).jaxpr
    w, v, m, n, both = jaxpr.invars
    held = {w: frozenset([0]), v: frozenset([1])}
    assert guess_homes(jaxpr.eqns, held, [m, n, both]) == {
        m: frozenset([0]),
        n: frozenset([1]),
    }
