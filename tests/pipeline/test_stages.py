"""Stages as data: made once, called by a plain step in which every equation has a declared unit."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import assert_same_training, dense_stages, elements, trained

import tailrace as tr
from oracles import assert_close
from tailrace.errors import PipelineError
from tailrace.jaxprs.internals import variables
from tailrace.jaxprs.own_equations import unit_in
from tailrace.pipeline.lowering.stage import AHEAD

_, PARAMS, _ = dense_stages([3, 4, 2])
DATA = elements(4, 3)


@pytest.fixture(scope="module")
def jobs():
    """The loop of a step with all that can be around stages: weights, state, aux, a loss scale."""

    def first(p, state, x, y):
        return (jnp.tanh(x @ p["kernel"]), y), {"mean": state["mean"] * 0.9 + x.mean()}

    def second(p, state, h, y):
        error = (h @ p["kernel"]).sum(-1) - y
        return (
            (error**2).mean(),
            {"mae": jnp.abs(error).mean(), "error": error, "table": jnp.arange(3)},
        ), state

    trainer = tr.Trainer(
        tr.Pipeline(
            [first, second],
            accumulation=tr.Accumulation(2, weight=lambda x, y: jnp.abs(y).sum()),
            schedule="sequential",
        ),
        optax.sgd(0.1),
        PARAMS,
        model_state=[{"mean": np.float32(0)}, {}],
        loss_scale=128.0,
    )
    runner, _ = trainer.engine.program_for(DATA)
    return runner.assembly.jobs


def test_every_equation_names_its_unit_or_is_free(jobs):
    """What no unit claims depends on the element, the counter and constants: no unit's value."""
    claimed = {*jobs.carry_in}
    for eqn in jobs.body.eqns:
        if unit_in(eqn) is not None:
            claimed.update(eqn.outvars)
        else:
            assert claimed.isdisjoint(variables(eqn.invars)), eqn
    units = [unit.who for unit in map(unit_in, jobs.body.eqns) if unit is not None]
    assert set(units) == {AHEAD, *jobs.jobs}


def test_units_use_only_what_units_before_them_made(jobs):
    order = [AHEAD, *jobs.jobs]
    made = {}
    for index, eqn in enumerate(jobs.body.eqns):
        unit = unit_in(eqn)
        if unit is not None:
            used = {made[v] for v in variables(eqn.invars) if v in made}
            assert all(order.index(who) <= order.index(unit.who) for who in used), index
            made.update(dict.fromkeys(eqn.outvars, unit.who))


# -- what becomes of the model state ----------------------------------------------------------------


def first(p, state, x, y):
    return (x * p, y), state


def second(after):
    def stage(p, state, h, y):
        error = (h * p).sum(-1) - y
        return (error**2).mean(), after(state, h, y)

    return stage


def composed(stages):
    def plain(params, states, x, y):
        values, new = (x, y), []
        for stage, p, state in zip(stages, params, states, strict=True):
            values, state = stage(p, state, *values)
            new.append(state)
        return values, (new, None)

    return plain


@pytest.mark.parametrize(
    "after",
    [
        lambda s, h, y: {"a": h.sum(), "b": s["b"]},  # written, never read
        lambda s, h, y: {"a": jnp.float32(7), "b": y.mean()},  # no stage's value
        lambda s, h, y: {"a": s["b"], "b": s["a"]},  # exchanged
        lambda s, h, y: {"a": s["a"] + s["b"], "b": h[0, 0]},
    ],
    ids=["written", "constant", "exchanged", "read"],
)
def test_model_state_that_a_later_stage_replaces(after):
    """The same as without a pipeline, whatever the new state is made of."""
    stages, params = [first, second(after)], [np.full(3, 0.5, np.float32)] * 2
    state = [{"c": np.float32(1)}, {"a": np.float32(2), "b": np.float32(3)}]
    options = {"model_state": state, "observe": [tr.Tap("buffer/*", reduce="norm")]}
    found = trained(
        tr.Pipeline(stages, accumulation=2, schedule="sequential"),
        optax.sgd(0.1),
        params,
        DATA,
        2,
        **options,
    )
    expected = trained(composed(stages), optax.sgd(0.1), params, DATA, 2, accumulation=2, **options)
    assert_same_training(found, expected)
    assert found.records.names == expected.records.names
    for name in found.records.names:
        assert_close(found.records[name].values, expected.records[name].values)


def test_values_of_a_last_group_do_not_meet():
    """The loss of one member, the aux of another: no unit has both."""
    stages = [
        lambda p, x, y: (x * p, y),
        [lambda p, h, y: ((h * p).sum() ** 2,), lambda p, h, y: {"aux": (h * p).sum() + y.sum()}],
    ]
    weight = np.ones(3, np.float32)
    pipeline = tr.Pipeline(stages, accumulation=4, schedule="sequential")
    with pytest.raises(PipelineError, match="used together, and no stage comes after"):
        trained(pipeline, optax.sgd(0.1), [weight, [weight, weight]], DATA, 1)
