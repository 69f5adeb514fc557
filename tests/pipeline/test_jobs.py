"""The step as jobs: each equation once, each value there before it is used, only neighbours talk."""

import random

import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelined import dense_stages, elements

import tailrace as tr
from tailrace.jaxprs.internals import Literal
from tailrace.jaxprs.marks import unit_p

# Each example traces a step.
drawn = settings(deadline=None, max_examples=12)


def random_loss(seed):
    """A loss with boundaries, skips, shared weights and values of the element used anywhere."""

    def loss(params, x, y):
        rng = random.Random(seed)
        values = [x * params["w0"]]
        stages = rng.randint(2, 4)
        for stage in range(stages):
            if stage:
                chosen = rng.randrange(len(values))
                values[chosen] = tr.stage_boundary(values[chosen])
            for _ in range(rng.randint(1, 3)):
                other = rng.choice([*values, x, y[:, None] * jnp.ones_like(x)])
                weight = params[f"w{rng.randrange(3)}"]
                values.append(jnp.sin(rng.choice(values)) * weight + other)
        return sum((v**2).mean() for v in (values[-1], rng.choice(values))) + y.mean()

    return loss


def dissected(pipeline, params):
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), params)
    runner, _ = trainer.engine.program_for(elements(1, 3))
    return runner.assembly


def random_assembly(seed):
    params = {f"w{i}": np.full(3, 0.5, np.float32) for i in range(3)}
    weight = (lambda x, y: jnp.abs(y).sum()) if seed % 3 == 0 else None
    accumulation = tr.Accumulation(4, weight=weight)
    loss = random_loss(seed)
    return dissected(tr.Pipeline(loss, accumulation=accumulation, schedule="sequential"), params)


@drawn
@given(st.integers(0, 10**6))
def test_every_equation_runs_once_and_what_it_needs_is_there(seed):
    jobs = random_assembly(seed).jobs
    body = jobs.body
    consts = body.invars[: jobs.consts]
    first = {}
    done = {}
    for who, job in jobs.jobs.items():
        have = {*consts, body.invars[-1], *(jobs.carry_in[n] for n in job.carries)}
        have |= {*jobs.from_ahead, *job.takes, *(v for each in job.receives.values() for v in each)}
        for index in job.equations:
            eqn = body.eqns[index]
            if eqn.primitive is unit_p:
                assert who == tuple(eqn.params[name] for name in ("kind", "stage", "member"))
            missing = {v for v in eqn.invars if not isinstance(v, Literal)} - have
            assert not missing, f"{who} uses {missing} in {eqn.primitive}"
            have.update(eqn.outvars)
            if index not in job.copies:
                assert index not in first, f"{eqn.primitive} has its effects in two jobs"
                first[index] = who
        assert {*job.puts, *(v for each in job.sends.values() for v in each)} <= have
        for number in job.carries:
            assert number not in done
            done[number] = who
            result = jobs.carry_out[number]
            assert isinstance(result, Literal) or result in have
    units = [i for i, eqn in enumerate(body.eqns) if eqn.primitive is unit_p]
    assert set(units) <= {*first, *jobs.ahead}
    for number, out in enumerate(
        jobs.carry_out
    ):  # a unit owns all that changes, or it is run ahead
        changes = not isinstance(out, Literal) and out is not jobs.carry_in[number]
        assert not changes or number in done or number in jobs.loose


@drawn
@given(st.integers(0, 10**6))
def test_messages_go_to_neighbours_and_arrive(seed):
    jobs = random_assembly(seed).jobs.jobs
    for who, job in jobs.items():
        for to, variables in job.sends.items():
            assert jobs[to].receives[who] == variables
            step = 1 if who[0] == "F" else -1
            assert to[0] == who[0]
            assert to[1] == who[1] + step
        for origin, variables in job.receives.items():
            assert jobs[origin].sends[who] == variables
        kind, *where = who
        if kind == "F":
            assert not job.takes
            assert sorted(map(id, job.puts)) == sorted(map(id, jobs["B", *where].takes))


@drawn
@given(st.integers(0, 10**6))
def test_no_device_sends_or_gets_two_messages_of_one_channel(seed):
    for channel in random_assembly(seed).channels:
        senders, receivers = zip(*channel.pairs, strict=True)
        assert len(set(senders)) == len(senders)
        assert len(set(receivers)) == len(receivers)


def test_neighbours_exchange_what_the_model_says_and_no_more():
    stages, params, loss = dense_stages([3, 6, 5, 2])
    assembly = dissected(tr.Pipeline(stages, loss, accumulation=6), params)
    for stage, width in enumerate((6, 5)):
        forward = assembly.jobs.jobs["F", stage, 0]
        backward = assembly.jobs.jobs["B", stage + 1, 0]
        for job in (forward, backward):
            (variables,) = job.sends.values()
            shapes = [v.aval.shape for v in variables]
            # The labels are in the element, which every device has: they are not sent.
            assert shapes == [(4, width)]


def test_parameters_are_not_stashed():
    stages, params, loss = dense_stages([3, 6, 5, 2])
    jobs = dissected(tr.Pipeline(stages, loss, accumulation=6), params).jobs.jobs
    kernels = {p["kernel"].shape for p in params}
    for job in jobs.values():
        assert not {v.aval.shape for v in job.puts} & kernels


def test_the_sum_of_weights_is_run_ahead():
    stages, params, loss = dense_stages([3, 6, 5])
    accumulation = tr.Accumulation(4, weight=lambda x, y: y.sum())
    jobs = dissected(tr.Pipeline(stages, loss, accumulation=accumulation), params).jobs
    assert len(jobs.loose) == 1
    assert all(jobs.owner(number) is None for number in jobs.loose)
