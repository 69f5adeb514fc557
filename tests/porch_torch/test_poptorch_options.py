"""`poptorch.Options`: chainable, typed, frozen once used, and translated for the native front end."""

import copy

import pytest
import torch
from small_modules import Regression, line

from tailrace.compat import poptorch


def test_setters_can_be_chained_and_read():
    opts = poptorch.Options().deviceIterations(4).replicationFactor(2)
    assert opts.Training.gradientAccumulation(3) is opts.Training
    assert opts.device_iterations == 4
    assert opts("replication_factor") == 2
    opts.device_iterations = 5
    assert opts.device_iterations == 5
    assert repr(opts).startswith("Options(")
    assert "replication_factor=2" in repr(opts)
    assert "gradient_accumulation=3" in repr(opts)
    with pytest.raises(AssertionError, match="Unexpected type str"):
        opts.deviceIterations("4")
    with pytest.raises(AssertionError, match="Invalid option odd"):
        opts.odd = 3
    with pytest.raises(AttributeError, match="Invalid attribute odd"):
        _ = opts.odd
    native = opts.native()
    assert (native.device_iterations, native.microbatches, native.replicas) == (5, 3, 2)
    assert native.pieces == 30


def test_options_are_frozen_by_use_and_copies_are_not():
    opts = poptorch.Options()
    training = poptorch.trainingModel(Regression(), opts)
    inference = poptorch.inferenceModel(Regression(), opts)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        opts.Training.gradientAccumulation(2)
    assert opts.defaultOutputMode()
    assert training.options.output_mode is poptorch.OutputMode.Final
    assert inference.options.output_mode is poptorch.OutputMode.All
    assert opts.anchorTensor("a", "b") is None
    for other in (opts.clone(), copy.deepcopy(opts)):
        other.deviceIterations(3)
        assert opts.device_iterations == 1
    loader_opts = poptorch.Options()
    poptorch.DataLoader(loader_opts, [1, 2, 3])
    with pytest.raises(AttributeError, match="frozen"):
        loader_opts.replicationFactor(2)


def test_what_is_checked():
    opts = poptorch.Options()
    with pytest.raises(AssertionError, match="EveryN anchor must have output_return_period"):
        opts.outputMode(poptorch.OutputMode.EveryN)
    with pytest.raises(AssertionError, match="Expected a poptorch.OutputMode"):
        opts.outputMode("all")
    with pytest.raises(ValueError, match="must be set to poptorch.ReductionType.Mean"):
        opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)
    mode = poptorch.OutputMode.All
    with pytest.raises(TypeError, match="output_mode and anchor_mode"):
        opts.anchorTensor("a", "b", output_mode=mode, anchor_mode=mode)
    with pytest.raises(
        AssertionError, match="numIOTiles must be an even number between 32 and 192"
    ):
        opts.TensorLocations.numIOTiles(31)
    with pytest.raises(AssertionError, match="A location is a poptorch.TensorLocationSettings"):
        opts.TensorLocations.setOptimizerLocation(3)
    with pytest.raises(AssertionError, match="'IPU0'"):
        opts.setAvailableMemoryProportion({"0": 0.5})
    with pytest.raises(ValueError, match="The size of a group divides the replicas"):
        opts.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    with pytest.raises(poptorch.Error, match="'options' is of type dict"):
        poptorch.trainingModel(Regression(), {})
    accumulating = poptorch.Options()
    accumulating.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match="You must set poptorch.Options\\(\\).Training"):
        poptorch.inferenceModel(Regression(), accumulating)


def test_what_only_that_chip_had_is_noted_once(caplog):
    opts = poptorch.Options()
    for _ in range(2):
        opts.useIpuModel(True).enableExecutableCaching("x").syncPattern(poptorch.SyncPattern.Full)
        opts.Precision.enableStochasticRounding(True)
        opts._Popart.set("key", 1)
    noted = [r.message for r in caplog.records if "about a chip that is not here" in r.message]
    assert len(noted) == 5


def test_offloading_and_running_means_are_translated():
    opts = poptorch.Options()
    location = poptorch.TensorLocationSettings().useOnChipStorage(False)
    opts.TensorLocations.setOptimizerLocation(location)
    assert opts.TensorLocations.location_optimizer == {"onChip": 0}
    assert opts.native().offload_optimizer_state
    assert not opts.native().shard_optimizer_state
    location.useReplicatedTensorSharding()
    opts.TensorLocations.setOptimizerLocation(location)
    assert opts.native().shard_optimizer_state
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    assert str(opts.native().accumulation.reduction) == "running_mean"
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    assert str(opts.native().accumulation.reduction) == "sum"
    module = Regression()
    half = poptorch.optim.SGD(module.parameters(), lr=0.1, accum_type=torch.float16)
    model = poptorch.trainingModel(module, None, half)
    strategy = model.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy is poptorch.MeanReductionStrategy.Running


def test_files_and_json(tmp_path, monkeypatch):
    path = tmp_path / "options"
    path.write_text(
        "# a comment\n\n  deviceIterations(3)\n"
        "outputMode(poptorch.OutputMode.Sum)  # inline\nTraining.gradientAccumulation(2)\n"
    )
    opts = poptorch.Options().loadFromFile(path)
    assert opts.device_iterations == 3
    assert opts.output_mode is poptorch.OutputMode.Sum
    assert opts.Training.gradient_accumulation == 2
    path.write_text("deviceIterations(3)\n# x\ndeviceIterations(\n")
    with pytest.raises(poptorch.options.ConfigFileError, match="SyntaxError at line 3 of"):
        opts.loadFromFile(path)
    path.write_text("# a comment\n\ndeviceIterations(3)\n\ndeviceIterations(len('a'))\n")
    with pytest.raises(poptorch.options.ConfigFileError, match="Received at line 5 of"):
        opts.loadFromFile(path)
    opts.from_json('{"outputMode": ["OutputMode.EveryN", 5], "Training.gradientAccumulation": 7}')
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 5)
    assert opts.toDict()["output_return_period"] == 5
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 9}')
    assert poptorch.Options().device_iterations == 9
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        poptorch.Options().toDict()


def test_floating_point_exceptions_stop():
    opts = poptorch.Options()
    opts.Precision.enableFloatingPointExceptions(True)
    model = poptorch.trainingModel(Regression(), opts)
    x, y = line(4)
    x[0] = float("inf")
    with pytest.raises(poptorch.Error, match="step 0"):
        model(x, y)


def test_strategies():
    with pytest.raises(AssertionError, match="associated with more than one stage"):
        poptorch.PipelinedExecution(poptorch.Stage("A"), poptorch.Stage("A"))
    with pytest.raises(AssertionError, match="At least one phase is required"):
        poptorch.SerialPhasedExecution()
    with pytest.raises(AssertionError, match="Unknown strategy"):
        poptorch.Options().setExecutionStrategy(3)
    strategy = poptorch.PipelinedExecution("A", ["B", "C"], poptorch.Stage("D").ipu(0))
    assert strategy.stage("C").blocks == ["B", "C"]
    with pytest.raises(AssertionError, match="Unknown Block 'X'"):
        strategy.stage("X")
    opts = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    assert str(opts.native().execution) == "sharded"
    staging = strategy.staging()
    assert staging.place("B", None, []) == (1, 1)
    assert staging.place("D", None, []) == (2, 0)
