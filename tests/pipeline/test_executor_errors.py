"""Bad pipelines are answered with a sentence: the rule, what was received, what to change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import dense_stages, elements

import tailrace as tr
from tailrace.errors import (
    DataError,
    OptionError,
    PipelineError,
    PlanError,
    ReplicaError,
    TailraceError,
)

STAGES, PARAMS, LOSS = dense_stages([3, 5, 4])


def fit(pipeline, params=PARAMS, data=None, **options):
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    steps = options.pop("steps", 1)
    trainer = tr.Trainer(pipeline, optimizer, params, **options)
    trainer.fit(elements(8, 3) if data is None else data, steps=steps)


def two(**options):
    return tr.Pipeline(STAGES, LOSS, **{"accumulation": 4, **options})


# -- stages that do not fit -----------------------------------------------------------------------


def test_a_stage_that_takes_other_values_than_the_last_returns():
    def three(p, h, y, more):
        return h

    with pytest.raises(PipelineError, match="takes what the stage before it returns") as caught:
        fit(tr.Pipeline([STAGES[0], three], accumulation=4))
    text = str(caught.value)
    assert (
        "Stage 1 (three) cannot be called with 1 argument(s) of its own and the 2 value(s)" in text
    )
    assert "(float32[4, 5], float32[4])" in text
    assert "missing a required argument: 'more'" in text


def test_a_stage_that_fails_on_the_shapes_of_the_last():
    params = [PARAMS[0], {"kernel": np.ones((7, 4), np.float32), "bias": np.ones(4, np.float32)}]
    with pytest.raises(PipelineError, match=r"Stage 1 \(stage\) failed on what stage 0 returned"):
        fit(two(), params)
    with pytest.raises(PipelineError, match=r"\(float32\[4, 5\], float32\[4\]\)"):
        fit(two(), params)


def test_a_loss_that_does_not_take_what_the_last_stage_returns():
    def only(h):
        return h.mean()

    with pytest.raises(
        PipelineError, match="only cannot be called with the 2 value.s. from stage 1"
    ):
        fit(tr.Pipeline(STAGES, only, accumulation=4))


def test_one_stage_only():
    rule = "A pipeline has at least two stages"
    with pytest.raises(PipelineError, match=f"{rule}. Received: 1.*give the loss function to"):
        tr.Pipeline([STAGES[0]], LOSS)
    with pytest.raises(PipelineError, match=f"{rule}. Received: one.*tr.stage_boundary"):
        fit(tr.Pipeline(lambda p, x, y: LOSS(*STAGES[0](p[0], x, y)), accumulation=4))


@pytest.mark.parametrize("stages", [3, "stage", {"a": STAGES[0]}])
def test_stages_that_are_no_list(stages):
    with pytest.raises(OptionError, match="stages is a list of functions, or one function"):
        tr.Pipeline(stages)


def test_a_stage_that_is_no_function():
    with pytest.raises(OptionError, match="A stage is a function, or a list.*Stage 1 is 3"):
        tr.Pipeline([STAGES[0], 3])
    with pytest.raises(OptionError, match="Stage 1 is \\[\\]"):
        tr.Pipeline([STAGES[0], []])


def test_a_loss_function_besides_one_function():
    with pytest.raises(OptionError, match="has its loss in that function.*Call it inside"):
        tr.Pipeline(STAGES[0], LOSS)


# -- counts, devices, schedules -------------------------------------------------------------------


def test_count_rules():
    with pytest.raises(PlanError, match="must be a multiple of 4, but it is 6.*Use accumulation=4"):
        two(accumulation=6)
    with pytest.raises(PlanError, match="must be a multiple of 2, but it is 3"):
        two(accumulation=3, schedule="interleaved")
    two(accumulation=3, schedule="sequential")


def test_a_mapping_of_the_wrong_length():
    with pytest.raises(PlanError, match="3 mappings != 2 stages"):
        two(device_mapping=[0, 1, 2])
    with pytest.raises(TailraceError, match="device_mapping"):
        two(device_mapping=3)


def test_a_mapping_without_the_list_of_concurrent_stages():
    with pytest.raises(PlanError, match="(?i)stage 1"):
        tr.Pipeline([STAGES[0], [STAGES[1], STAGES[1]]], LOSS, device_mapping=[0, 1])


def test_a_device_too_few():
    stages, params, loss = dense_stages([3] * 10)
    text = "on 9 devices needs as many, and there are 8. Put several stages on one device"
    with pytest.raises(ReplicaError, match=text):
        fit(tr.Pipeline(stages, loss, accumulation=18), params)
    with pytest.raises(ReplicaError, match="5 replicas of a model.*2 devices.*replicas=4 at most"):
        fit(two(), replicas=5)


def test_two_stages_on_one_device_with_interleaved():
    with pytest.raises(PlanError, match="not support multiple.*stages 0 and 1"):
        two(schedule="interleaved", device_mapping=[0, 0])


def test_an_unknown_schedule():
    with pytest.raises((OptionError, PlanError), match="grouped.*interleaved.*sequential"):
        two(schedule="zigzag")


def test_recompute_is_one_of_four():
    with pytest.raises(OptionError, match="recompute is False, True, 'then' or 'interleaved'"):
        two(recompute="always")


# -- tracing --------------------------------------------------------------------------------------


def test_a_stage_that_closes_over_a_tracer():
    outside = []

    def first(p, x, y):
        return x @ p["kernel"] * outside[-1], y

    trainer = tr.Trainer(
        tr.Pipeline([first, STAGES[1]], LOSS, accumulation=4), optax.sgd(0.1), PARAMS
    )

    @jax.jit
    def inside_jit(scale):
        outside.append(scale)
        trainer.fit(elements(4, 3), steps=1)

    rule = "closes over it. Pass it through the stages"
    with pytest.raises(PipelineError, match=rule):
        inside_jit(1.0)
    with pytest.raises(PipelineError, match=rule):  # the tracer of a trace that has ended
        trainer.fit(elements(4, 3), steps=1)


def test_a_shape_that_changes_between_microbatches():
    data = [*elements(3, 3), *elements(1, 3, batch=5)]
    with pytest.raises(DataError, match="shape|form") as caught:
        fit(two(), data=data)
    assert "float32[5, 3]" in str(caught.value) or "(5, 3)" in str(caught.value)


def test_a_boundary_where_a_model_cannot_be_cut():
    def loss(p, x, y):
        def layer(h, _):
            return tr.stage_boundary(jnp.tanh(h)), None

        h, _ = jax.lax.scan(layer, x @ p[0]["kernel"], None, length=2)
        return LOSS(h, y)

    with pytest.raises(PipelineError, match="is inside 'scan', where a model cannot be cut"):
        fit(tr.Pipeline(loss, accumulation=4))


def test_a_boundary_inside_a_stage():
    def first(p, x, y):
        return tr.stage_boundary(STAGES[0](p, x, y))

    with pytest.raises(PipelineError, match="Do not call tr.stage_boundary inside a stage"):
        fit(tr.Pipeline([first, STAGES[1]], LOSS, accumulation=4))


def test_a_boundary_without_values():
    with pytest.raises(PipelineError, match="at least one. Received: \\(\\)"):
        tr.stage_boundary(())


def test_a_loss_that_no_parameter_reaches():
    with pytest.raises(PipelineError, match="The loss of a pipeline depends on its parameters"):
        fit(tr.Pipeline(STAGES, lambda h, y: (y**2).mean(), accumulation=4))


# -- what belongs to the trainer ------------------------------------------------------------------


def test_an_accumulation_optimizer_inside_a_pipeline():
    with pytest.raises(OptionError, match="Gradients are accumulated once"):
        fit(two(), optimizer=tr.optimizers.gradient_accumulation(optax.sgd(0.1), 2))


def test_accumulation_given_to_the_trainer_too():
    with pytest.raises(OptionError, match="given to it: tr.Pipeline.*Leave it out there"):
        fit(two(), accumulation=4)


def test_parameters_by_stage():
    with pytest.raises(PipelineError, match="an entry for each stage. There are 2 stages.*: 3"):
        fit(two(), [*PARAMS, PARAMS[0]])
    with pytest.raises(PipelineError, match="Received: a dict"):
        fit(two(), {"a": np.ones(3, np.float32)})


def test_parameters_of_concurrent_stages():
    stages = [STAGES[0], [STAGES[1], STAGES[1]]]
    with pytest.raises(PipelineError, match="Stage 1 has 2 concurrent members"):
        fit(tr.Pipeline(stages, lambda a, y, b, z: LOSS(a + b, y), accumulation=4))


def test_a_stage_that_returns_no_state():
    with pytest.raises(PipelineError, match="returns \\(outputs, new_state\\). Stage 0"):
        fit(
            tr.Pipeline([lambda p, s, x, y: x @ p["kernel"], STAGES[1]], LOSS, accumulation=4),
            model_state=[np.float32(0), np.float32(0)],
        )


def test_shared_weights_that_do_not_exist_or_differ():
    with pytest.raises(PipelineError, match="There is no '0/table'; there are \\['0/bias'"):
        fit(two(shared=[("0/table", "1/bias")]))
    with pytest.raises(PipelineError, match="'1/kernel' differs from '0/kernel'"):
        fit(two(shared=[("0/kernel", "1/kernel")]))


def test_inputs_that_are_no_tuple():
    with pytest.raises(OptionError, match="inputs is a tuple"):
        two(inputs=np.float32(1))
    plain = tr.Trainer(lambda w, x, y: (x @ w).mean(), optax.sgd(0.1), np.ones(3, np.float32))
    with pytest.raises(OptionError, match="inputs belong to a pipeline"):
        plain.fit(elements(2, 3), steps=1, inputs=(np.float32(1),))


def test_inputs_of_another_form():
    def first(p, scale, x, y):
        return STAGES[0](p, x * scale, y)

    trainer = tr.Trainer(
        tr.Pipeline([first, STAGES[1]], LOSS, accumulation=4, inputs=(np.float32(1),)),
        optax.sgd(0.1),
        PARAMS,
    )
    trainer.fit(elements(4, 3), steps=1)
    with pytest.raises(TailraceError, match="inputs"):
        trainer.fit(elements(4, 3), steps=1, inputs=(np.ones(3, np.float32),))
    with pytest.raises(TailraceError, match="inputs"):
        trainer.fit(elements(4, 3), steps=1, inputs=())


def test_a_dataset_that_is_too_short():
    with pytest.raises(DataError, match="1 x 4 x 1 = 4"):
        fit(two(), data=elements(3, 3))
