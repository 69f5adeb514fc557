"""Names of PopTorch: each works, is noted, or is refused by a sentence; options files are parsed."""

import pytest
import torch
from small_modules import Regression, line
from torch import nn

from tailrace.compat import poptorch


@pytest.mark.parametrize(
    "hostile",
    [
        "deviceIterations(__import__('os').getpid())",
        "deviceIterations(3) or print(1)",
        "deviceIterations(len('abc'))",
        "deviceIterations([x for x in (1,)][0])",
        "__class__.__init__.__globals__['os'].system('true')",
        "Training.__init__()",
        "_values.clear()",
        "loadFromFile('other')",
        "from_json('{}')",
        "set(**{'device_iterations': 3})",
        "outputMode(poptorch.options.os)",
        "outputMode(poptorch.trainingModel(1))",
        "setExecutionStrategy(poptorch.Stage('A').__class__('B'))",
        "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings()._put(onChip=0))",
        "deviceIterations",
        "(lambda: 3)()",
    ],
)
def test_files_of_options_are_not_executed(tmp_path, hostile):
    path = tmp_path / "options"
    path.write_text(f"deviceIterations(2)\n{hostile}\n")
    opts = poptorch.Options()
    with pytest.raises(poptorch.options.ConfigFileError, match="one call of a setter .* line 2 of"):
        opts.loadFromFile(path)
    assert opts.device_iterations == 2


def test_files_of_options_have_literals_enumerations_and_descriptions(tmp_path):
    path = tmp_path / "options"
    path.write_text(
        "deviceIterations(2).replicationFactor(replication_factor=1)\n"
        "setAvailableMemoryProportion({'IPU0': 0.5})\n"
        "updatableNamedBuffers(['a', 'b'])\n"
        "Precision.setPartialsType(torch.half)\n"
        "setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage('A').ipu(0), 'B'))\n"
        "TensorLocations.setOptimizerLocation("
        "poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
    )
    opts = poptorch.Options().loadFromFile(path)
    assert opts.updatable_named_buffers == ["a", "b"]
    assert opts.Precision.partials_type is torch.half
    assert opts.execution_strategy.stage("A").ipu_id == 0
    assert opts.native().offload_optimizer_state
    with pytest.raises(poptorch.options.ConfigFileError, match="Received: native.__call__"):
        opts.from_json('{"native.__call__": []}')


def test_names_that_are_refused_say_so():
    with pytest.raises(poptorch.Error, match="runs a function on the host in the middle"):
        poptorch.CPU(nn.ReLU(), "id")
    with pytest.raises(
        AttributeError, match="no attribute 'trainingMode'. Did you mean trainingModel"
    ):
        _ = poptorch.trainingMode
    module = Regression()
    model = poptorch.trainingModel(module)
    weight = next(iter(module.parameters()))
    weight.replicaGrouping(
        poptorch.CommGroupType.All, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    with pytest.raises(poptorch.Error, match="All replicas hold the same parameters"):
        weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 2, None)
    model.destroy()
    several = poptorch.Options()
    several.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="A training model runs in one process"):
        poptorch.trainingModel(Regression(), several)


def test_names_that_work_or_are_noted(caplog):
    opts = poptorch.Options().enableSyntheticData(True)
    opts.Jit.traceModel(False)
    assert "enableSyntheticData has no effect" in caplog.text
    assert "Jit.traceModel" in caplog.text
    assert issubclass(poptorch.optim.AdamW, poptorch.optim.Optimizer)
    assert poptorch.MultiConvPlanType.Serial.value == "serial"


def test_parsers_by_the_original_names():
    class Box:
        def __init__(self, t):
            self.t = t

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct.t

        def reconstruct(self, original_structure, tensor_iterator):
            return Box(next(tensor_iterator))

    class Double(nn.Module):
        def forward(self, box):
            return Box(box.t * 2)

    poptorch.registerCustomArgParser(Box, Parser())
    try:
        out = poptorch.inferenceModel(Double())(Box(torch.ones(2)))
        assert torch.equal(out.t, torch.full((2,), 2.0))
    finally:
        poptorch.registerCustomArgParser(Box, None)
    with pytest.raises(poptorch.Error, match="derived from poptorch.ICustomArgParser"):
        poptorch.registerCustomArgParser(Box, 3)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "LAMB", "RMSprop", "SGD"])
def test_moments_of_half_parameters_are_in_float32(kind):
    module = Regression().half()
    extra = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(poptorch.optim, kind)(
        module.parameters(), lr=1e-3, accum_type=torch.float16, loss_scaling=1024, **extra
    )
    model = poptorch.trainingModel(module, None, optimizer)
    x, y = line(4)
    for _ in range(12):
        model(x.half(), y.half())
    assert all(p.isfinite().all() for p in module.parameters())
    moments = [
        value
        for state in optimizer.state_dict()["state"].values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]
    assert moments
    assert {value.dtype for value in moments} == {torch.float32}


def test_floating_point_exceptions_in_inference():
    opts = poptorch.Options()
    opts.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(nn.Linear(2, 2), opts)
    model(torch.ones(1, 2))
    with pytest.raises(poptorch.Error, match="Output 0 has NaN or Inf"):
        model(torch.full((1, 2), float("inf")))


def test_what_an_inference_model_cannot_do_is_said():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += x.sum()
            return x + self.seen

    model = poptorch.inferenceModel(Counting(), poptorch.Options().replicationFactor(2))
    with pytest.raises(poptorch.Error, match="broadcasting buffers.*2 replicas.*Use one replica"):
        model(torch.arange(4.0))
    with pytest.raises(poptorch.Error, match="setOptimizer is for models made by poptorch.train"):
        model.setOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))
