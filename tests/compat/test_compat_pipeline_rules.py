"""Every rule of the arguments of a pipeline, with the original's words."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import infeed, run, use

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.ipu import GradientTape, Variable, ipu_compiler, loops, pipelining_ops
from tailrace.compat.ipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from tailrace.compat.ipu.ops import pipelining_ops as inner_module
from tailrace.compat.ipu.pipelining_ops import (
    OptimizerFunctionOutput,
    PipelineSchedule,
    PipelineStageOptions,
    RecomputationMode,
    pipeline,
)


def same(x):
    return x


def optimizer_function(loss):
    return OptimizerFunctionOutput(optax.sgd(0.1), loss)


def call(stages=(same, same), count=4, **options):
    options.setdefault("inputs", [1.0])
    options.setdefault("outfeed_queue", IPUOutfeedQueue())
    return run(lambda: pipeline(list(stages), count, **options))


ARGUMENTS = [
    ({"count": None}, ValueError, "gradient_accumulation_count must be specified"),
    ({"count": -1}, ValueError, "gradient_accumulation_count must be >= 0"),
    ({"count": 2**31}, ValueError, "fit into an int32"),
    (
        {"reduction_method": None, "optimizer_function": optimizer_function},
        ValueError,
        "Cannot parse None as one of GradientAccumulationReductionMethod. Valid values are: SUM, M",
    ),
    (
        {
            "reduction_method": "mean",
            "batch_serialization_iterations": 2,
            "optimizer_function": optimizer_function,
        },
        ValueError,
        "reduction_method SUM only",
    ),
    ({"continuous_weight_updates": True}, NotImplementedError, "not supported"),
    ({"pipeline_schedule": "grouped"}, TypeError, "PipelineSchedule enumeration"),
    ({"recomputation_mode": "auto"}, TypeError, "RecomputationMode enumeration"),
    (
        {
            "batch_serialization_iterations": 2,
            "pipeline_schedule": PipelineSchedule.Grouped,
        },
        NotImplementedError,
        "Batch serialization is only supported with the Sequential schedule",
    ),
    (
        {"batch_serialization_iterations": 2, "device_mapping": [0, 1]},
        NotImplementedError,
        "all the pipeline stages need to be mapped to a single IPU",
    ),
    (
        {
            "pipeline_schedule": PipelineSchedule.Sequential,
            "recomputation_mode": RecomputationMode.RecomputeThenBackpropagate,
        },
        ipu.errors.UnimplementedError,
        "Pipeline schedule Sequential does not support 'RecomputeThenBackpropagate' recomputation",
    ),
    (
        {
            "pipeline_schedule": PipelineSchedule.Interleaved,
            "recomputation_mode": RecomputationMode.RecomputeAndBackpropagateInterleaved,
        },
        ipu.errors.UnimplementedError,
        "Pipeline schedule Interleaved does not support",
    ),
    (
        {"device_mapping": {0: 1}},
        TypeError,
        "device_mapping argument needs to be a list or a tuple",
    ),
    (
        {"device_mapping": [0]},
        ValueError,
        "Each stage must be mapped to an IPU: 1 mappings != 2 stages",
    ),
    ({"device_mapping": [0, -1]}, NotImplementedError, "device_mapping -1"),
    ({"stages": (same,)}, ValueError, "Pipeline requires at least two computational stages"),
    ({"stages": (same, 3)}, TypeError, "A stage is a function"),
    (
        {"stages": (same, [same, [same]]), "device_mapping": [0, [0, 1]]},
        NotImplementedError,
        "Nested lists of concurrent stages",
    ),
    (
        {"stages": (same, [same, same]), "device_mapping": [0, 1]},
        ValueError,
        "Concurrent stages need a list of as many devices",
    ),
    ({"infeed_queue": 3}, TypeError, "infeed_queue is not an instance of"),
    ({"outfeed_queue": 3}, TypeError, "outfeed_queue is not an instance of"),
    (
        {
            "pipeline_schedule": PipelineSchedule.Interleaved,
            "optimizer_function": optimizer_function,
            "device_mapping": [0, 0],
        },
        NotImplementedError,
        "does not currently support multiple pipeline stages on the same device for training",
    ),
    (
        {"forward_propagation_stages_poplar_options": PipelineStageOptions()},
        TypeError,
        "forward_propagation_stages_poplar_options must be a list",
    ),
    (
        {"forward_propagation_stages_poplar_options": [PipelineStageOptions()]},
        ValueError,
        "the length of forward_propagation_stages_poplar_options need to be the same",
    ),
    (
        {
            "backward_propagation_stages_poplar_options": [1, 2],
            "optimizer_function": optimizer_function,
        },
        TypeError,
        "backward_propagation_stages_poplar_options must be a list of PipelineStageOptions",
    ),
    (
        {"weight_update_poplar_options": {}},
        TypeError,
        "weight_update_poplar_options to be of type PipelineStageOptions",
    ),
    (
        {"outfeed_mask": [True]},
        ValueError,
        "An optimizer_function must be provided when outfeed_mask is set",
    ),
    ({"outfeed_loss": True}, ValueError, "An optimizer_function must be provided when outfeed_lo"),
    (
        {"outfeed_loss": True, "outfeed_queue": None, "optimizer_function": optimizer_function},
        ValueError,
        "An outfeed_queue must be provided when outfeed_loss is True",
    ),
    (
        {"outfeed_loss": True, "outfeed_mask": [True], "optimizer_function": optimizer_function},
        ValueError,
        "Only one of `outfeed_loss` and `outfeed_mask` can be set",
    ),
    (
        {"accumulate_outfeed": True, "outfeed_queue": None},
        ValueError,
        "An outfeed_queue must be provided when accumulate_outfeed is True",
    ),
    (
        {"accumulate_outfeed": True, "outfeed_queue": IPUOutfeedQueue(IPUOutfeedMode.LAST)},
        ValueError,
        "To accumulate the outfeed, it must be in IPUOutfeedMode ALL",
    ),
    (
        {
            "replicated_optimizer_state_sharding": True,
            "offload_weight_update_variables": False,
        },
        ValueError,
        "To use replicated_optimizer_state_sharding, optimizer state must be offloaded",
    ),
    ({"repeat_count": 0}, ValueError, "repeat_count must be at least 1"),
    (
        {"outfeed_queue": None},
        ValueError,
        "The last computational stage has tensor outputs: .* but no outfeed_queue has been prov",
    ),
    (
        {"outfeed_mask": [True, False], "optimizer_function": optimizer_function},
        ValueError,
        "The length of the outfeed_mask",
    ),
    (
        {"optimizer_function": lambda loss: loss},
        TypeError,
        "optimizer_function must return an OptimizerFunctionOutput",
    ),
    ({"optimizer_function": optimizer_function}, ValueError, "No variables to optimize"),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), ARGUMENTS, ids=[str(i) for i in range(len(ARGUMENTS))]
)
def test_arguments(options, error, message):
    use(2)
    with pytest.raises(error, match=message) as caught:
        call(**options)
    assert isinstance(caught.value, tr.TailraceError)


@pytest.mark.parametrize(
    ("stages", "count", "schedule", "training", "multiple"),
    [
        (3, 10, "Grouped", False, 3),
        (3, 10, "Interleaved", False, 3),
        (3, 9, "Grouped", True, 6),
        (3, 10, "Interleaved", True, 3),
    ],
)
def test_how_many_mini_batches(stages, count, schedule, training, multiple):
    use(4)
    w = Variable(1.0)
    options = {"optimizer_function": optimizer_function} if training else {}
    with pytest.raises(
        ipu.errors.FailedPreconditionError,
        match=f"must be a multiple of {multiple}, but it is {count}",
    ):
        call(
            [lambda x: w * x, *[same] * (stages - 1)],
            count,
            pipeline_schedule=PipelineSchedule[schedule],
            **options,
        )


def test_too_many_stages_for_the_devices():
    use(6)
    with pytest.raises(ipu.errors.InternalError, match="with 6 IPUs and 4 shards"):
        call([same] * 3, 6)


def test_one_pipeline_in_a_program():
    use(2)
    w = Variable(1.0)

    def net():
        for _ in range(2):
            pipeline(
                [lambda x: w * x, same],
                4,
                inputs=[1.0],
                optimizer_function=optimizer_function,
                outfeed_queue=IPUOutfeedQueue(),
            )

    message = "Only a single ipu.pipeline\\(\\) is allowed in a compiled program"
    with pytest.raises(ipu.errors.FailedPreconditionError, match=message):
        run(net)
    with pytest.raises(RuntimeError, match="Use repeat_count="):
        run(
            lambda: loops.repeat(
                2,
                lambda: pipeline(
                    [lambda x: w * x, same],
                    4,
                    inputs=[1.0],
                    optimizer_function=optimizer_function,
                    outfeed_queue=IPUOutfeedQueue(),
                ),
                [],
            )
        )
    with pytest.raises(RuntimeError, match="A pipeline is part of a program"):
        pipeline([same, same], 4)


OUTPUTS = [
    ({"opt": "sgd"}, TypeError, "An optimizer is an optax"),
    ({"loss": "x"}, TypeError, "loss must be a tensor"),
    ({"compute_gradients_args": [1]}, TypeError, "compute_gradients_args must be a tuple"),
    ({"compute_gradients_kwargs": (1,)}, TypeError, "compute_gradients_kwargs must be a dict"),
    ({"apply_gradients_args": 3}, TypeError, "apply_gradients_args must be a tuple"),
    ({"apply_gradients_kwargs": 3}, TypeError, "apply_gradients_kwargs must be a dict"),
    ({"variables": [1]}, ValueError, "variables may only be used with OptimizerV2"),
    ({"tape": 3}, TypeError, "tape must be a GradientTape"),
    ({"tape": GradientTape()}, ValueError, "tape may only be used with OptimizerV2"),
    ({"captured_gradient_outfeed": IPUOutfeedQueue()}, ValueError, "cotangent"),
]


@pytest.mark.parametrize(("options", "error", "message"), OUTPUTS)
def test_what_an_optimizer_function_returns(options, error, message):
    given = {"opt": optax.sgd(1.0), "loss": 1.0} | options
    with pytest.raises(error, match=message):
        OptimizerFunctionOutput(**given)


def test_what_an_optimizer_function_returns_for_keras():
    keras = pytest.importorskip("keras")
    opt, variable = keras.optimizers.SGD(), keras.Variable(1.0)
    with pytest.raises(ValueError, match="may not be used with OptimizerV2 instances"):
        OptimizerFunctionOutput(opt, 1.0, (variable,))
    with pytest.raises(RuntimeError, match="No variables to optimize"):
        OptimizerFunctionOutput(opt, 1.0)
    with pytest.raises(ValueError, match="tape may not be used when"):
        OptimizerFunctionOutput(opt, 1.0, variables=[variable], tape=GradientTape())
    with pytest.raises(TypeError, match="tape must be a GradientTape"):
        OptimizerFunctionOutput(opt, 1.0, tape=3)


def test_an_output_keeps_its_arguments():
    """Under the names of the original, which its wrappers read."""
    given = {
        "compute_gradients_args": (1,),
        "compute_gradients_kwargs": {"a": 2},
        "apply_gradients_args": (3,),
        "apply_gradients_kwargs": {"b": 4},
    }
    output = OptimizerFunctionOutput(optax.sgd(1.0), 1.0, **given)
    assert {name: getattr(output, name) for name in given} == given
    for name in ("variables", "tape", "gradient_capture_context", "captured_gradient_outfeed"):
        assert getattr(output, name) is None


@pytest.mark.parametrize("name", ["convolution_options", "matmul_options", "slice_options"])
def test_options_of_a_stage(name):
    with pytest.raises(TypeError, match=f"{name} must be a dict"):
        PipelineStageOptions(**{name: ["a"]})
    assert getattr(PipelineStageOptions(**{name: {"a": "b"}}), name) == {"a": "b"}


def test_an_accumulating_optimizer_is_refused():
    use(2)
    from tailrace.compat.ipu import optimizers

    w = Variable(1.0)

    def accumulating(loss):
        return OptimizerFunctionOutput(
            optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 2), loss
        )

    with pytest.raises(ValueError, match="accumulates gradients itself"):
        call([lambda x: w * x, same], optimizer_function=accumulating)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["original", "keras"])
def test_an_optimizer_whose_minimize_nobody_would_call_is_refused(kind, wrapped):
    use(2)
    import keras

    from tailrace.compat.ipu import optimizers

    w = keras.Variable(1.0) if kind == "keras" else Variable(1.0)

    class Own(keras.optimizers.SGD if kind == "keras" else optimizers.Optimizer):
        def minimize(self, loss, *args, **kwargs):
            raise AssertionError("nobody calls it")

        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            raise AssertionError("refused before")

    def function(loss):
        optimizer = Own()
        optimizer = optimizers.CrossReplicaOptimizer(optimizer) if wrapped else optimizer
        return OptimizerFunctionOutput(
            optimizer, loss, variables=[w] if kind == "keras" and not wrapped else None
        )

    with pytest.raises(ValueError, match="Own must not override OptimizerV2.minimize"):
        call([lambda x: w * x, same], optimizer_function=function)


def test_variables_that_stages_and_optimizer_share():
    use(2)
    from tailrace.compat.ipu import optimizers

    w, rate = Variable(1.0), Variable(0.5, trainable=False)

    class Falling(optimizers.Optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            for grad, var in grads_and_vars:
                var.assign_sub(rate * grad)
            rate.assign(rate * 0.5)

    def function(loss):
        return OptimizerFunctionOutput(Falling(), loss)

    with pytest.raises(ValueError, match="is read by a stage and changed by the optimizer"):
        call([lambda x: w * x + rate, same], optimizer_function=function)

    def writing(x):
        rate.assign_add(1)
        return w * x

    with pytest.raises(ValueError, match="is written by a stage and used by the optimizer"):
        call([writing, same], optimizer_function=function)


def test_what_only_the_chip_had_is_noted_once(caplog):
    use(2)
    for _ in range(2):
        call(
            offload_activations=True,
            replicated_weight_sharding=True,
            weight_update_poplar_options=PipelineStageOptions(),
        )
    said = [record.message for record in caplog.records]
    for name in ("offload_activations", "replicated_weight_sharding", "weight_update_poplar"):
        assert sum(name in message for message in said) == 1


def test_the_same_module_under_both_names():
    assert pipelining_ops.pipeline is inner_module.pipeline
    assert ipu.ops.pipelining_ops.PipelineSchedule is PipelineSchedule
    value = pipelining_ops.recomputation_checkpoint({"a": jnp.ones(2)})
    np.testing.assert_array_equal(value["a"], np.ones(2))
    with pytest.raises(RuntimeError, match="only be used inside a pipeline"):
        pipelining_ops.get_current_iteration_counter()


def test_an_infeed_must_be_initialised():
    use(2)
    queue = infeed(3)
    queue.deleter()
    with pytest.raises(ipu.errors.FailedPreconditionError, match="Did you initialize"):
        call(inputs=[], infeed_queue=queue)
    assert np.ndim(ipu_compiler.compile(lambda: 1.0)()[0]) == 0
