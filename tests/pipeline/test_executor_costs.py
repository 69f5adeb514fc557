"""What a pipeline says about itself: is it right, what does it cost, where should it be cut."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import assert_same_training, dense_stages, elements, trained

import tailrace as tr
from tailrace.errors import OptionError, PipelineError, ProgramError

STAGES, PARAMS, LOSS = dense_stages([3, 40, 20])


def nbytes(tree):
    return sum(leaf.nbytes for leaf in tree.values())


# -- verify ---------------------------------------------------------------------------------------


def test_verify_lists_every_tensor_of_the_update():
    pipeline = tr.Pipeline(STAGES, LOSS, accumulation=4)
    found = tr.verify(pipeline, PARAMS, elements(4, 3), optimizer=optax.sgd(0.1, momentum=0.9))
    names = {row.name for row in found}
    paths = [f"{stage}/{leaf}" for stage in (0, 1) for leaf in ("kernel", "bias")]
    assert names == {"loss", *(f"{k}/{p}" for k in ("accumulated", "updated") for p in paths)}
    assert found.within(1e-6)
    assert found.worst == max(row.relative for row in found)
    text = str(found)  # what differs, and nothing else
    assert all((row.name in text) == (row.absolute > 0) for row in found if row.name != "loss")


def test_verify_finds_a_pipeline_that_computes_something_else():
    """A stage that counts how often it is traced is another one in the pipeline."""
    calls = []

    def first(p, x, y):
        calls.append(1)
        return STAGES[0](p, x * float(len(calls)), y)

    pipeline = tr.Pipeline([first, STAGES[1]], LOSS, accumulation=4)
    found = tr.verify(pipeline, PARAMS, elements(4, 3))
    assert not found.within(1e-3)
    assert found[0].relative >= found[-1].relative


def test_verify_wants_a_pipeline():
    with pytest.raises(OptionError, match="verify compares a tr.Pipeline"):
        tr.verify(LOSS, PARAMS, elements(1, 3)[0])


# -- report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["grouped", "interleaved"])
def test_a_report_adds_up(schedule):
    pipeline = tr.Pipeline(STAGES, LOSS, accumulation=4, schedule=schedule)
    trainer = trained(pipeline, optax.sgd(0.1, momentum=0.9), PARAMS, elements(4, 3), 1)
    report = trainer.report()
    assert [stage.parameters for stage in report.stages] == [nbytes(p) for p in PARAMS]
    assert list(report.held) == [2 * nbytes(p) for p in PARAMS]  # and their momentum
    plan = tr.plan(2, 4, schedule)
    assert [stage.slots for stage in report.stages] == [plan.slots(0), plan.slots(1)]
    one = [stage.stash // stage.slots for stage in report.stages]
    assert plan.stash_bytes(one).stages == tuple(stage.stash for stage in report.stages)
    assert report.bubble == plan.bubble
    hidden = 4 * 40 * 4  # a batch of 4, 40 features: forward from stage 0, backward from stage 1
    assert [stage.sends for stage in report.stages] == [hidden, hidden]
    assert all(stage.forward > 0 and stage.backward > 0 for stage in report.stages)
    assert report.expected > 0
    assert "bubble" in str(report)


def test_what_is_explained_before_it_runs():
    trainer = tr.Trainer(tr.Pipeline(STAGES, LOSS, accumulation=4), optax.sgd(0.1), PARAMS)
    explained = trainer.explain(elements(1, 3)[0], steps=1)
    assert [stage.parameters for stage in explained.pipeline.stages] == [nbytes(p) for p in PARAMS]
    assert "stage" in str(explained)


def test_a_report_needs_a_pipeline_and_a_fit():
    pipeline = tr.Pipeline(STAGES, LOSS, accumulation=4)
    with pytest.raises(ProgramError, match="after a fit. Received: no fit yet"):
        tr.Trainer(pipeline, optax.sgd(0.1), PARAMS).report()
    plain = tr.Trainer(lambda w, x, y: (x @ w).mean(), optax.sgd(0.1), np.ones(3, np.float32))
    with pytest.raises(ProgramError, match="a trainer without a pipeline"):
        plain.report()


# -- balance --------------------------------------------------------------------------------------


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x.mean()


def test_equal_layers_are_cut_evenly():
    params = [np.full((64, 64), 0.1, np.float32)] * 6
    found = tr.balance(deep, params, np.ones((8, 64), np.float32), stages=3)
    assert len(found.stages) == 3
    assert found.slowest < 0.37
    assert [stage.parameters for stage in found.stages] == [2 * 64 * 64 * 4] * 3
    assert [stage.sends for stage in found.stages] == [8 * 64 * 4, 8 * 64 * 4, 0]
    assert "test_executor_costs.py" in found.stages[1].begins


def test_a_heavy_layer_gets_a_stage_of_its_own():
    widths = [16, 16, 16, 2048, 16]
    params = [np.full(shape, 0.01, np.float32) for shape in itertools.pairwise(widths)]
    found = tr.balance(deep, params, np.ones((8, 16), np.float32), stages=2)
    assert found.stages[1].parameters >= 2048 * 16 * 4


def test_a_proposal_can_be_measured():
    params = [np.full((64, 64), 0.1, np.float32)] * 2
    found = tr.balance(deep, params, np.ones((8, 64), np.float32), stages=2, measure=True)
    assert all(stage.seconds > 0 for stage in found.stages)


def test_more_stages_than_operations():
    with pytest.raises(PipelineError, match="Each stage has at least one operation"):
        tr.balance(lambda w, x: w * x, np.float32(1), np.float32(1), stages=3)


@pytest.mark.parametrize("stages", [0, -1, "2", 2.0, True, None])
def test_stages_that_are_no_number_of_them(stages):
    with pytest.raises(tr.errors.OptionError, match="stages must be a whole number >= 1"):
        tr.balance(lambda w, x: w * x, np.float32(1), np.float32(1), stages=stages)


def test_a_model_that_is_no_function():
    with pytest.raises(tr.errors.OptionError, match="balance cuts a function"):
        tr.balance("model", np.float32(1), np.float32(1), stages=1)


def test_a_proposal_is_a_pipeline_that_computes_what_the_model_does():
    def model(params, x, y):
        h = jnp.tanh(x @ params[0])
        kept = jax.random.bernoulli(tr.key(), 0.8, h.shape)
        h = jnp.tanh(jnp.where(kept, h, 0.0) @ params[1])
        error = h @ params[2] - y
        return (error**2).mean(), {"mae": jnp.abs(error).mean()}

    rng = np.random.default_rng(0)
    params = [rng.normal(size=s).astype(np.float32) for s in ((3, 8), (8, 8), (8,))]
    proposal = tr.balance(model, params, elements(1, 3)[0], stages=2)
    data = elements(8, 3)
    found = trained(proposal.pipeline(accumulation=4), optax.sgd(0.1), params, data, 2)
    expected = trained(model, optax.sgd(0.1), params, data, 2, accumulation=4)
    assert_same_training(found, expected)
    assert found.engine.placement.stages == 2


def test_a_proposal_for_another_model_is_refused():
    def model(params, x, y):
        h = x @ params[0]
        if x.shape[0] > 4:
            h = jnp.tanh(h)
        return ((h @ params[1] - y) ** 2).mean()

    params = [np.ones((3, 8), np.float32), np.ones(8, np.float32)]
    proposal = tr.balance(model, params, elements(1, 3)[0], stages=2)
    trainer = tr.Trainer(proposal.pipeline(accumulation=4), optax.sgd(0.1), params)
    with pytest.raises(PipelineError, match="Balance it again with an example like the batch"):
        trainer.fit(elements(4, 3, batch=6), steps=1)
