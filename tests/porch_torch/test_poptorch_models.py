"""Programs written for PopTorch: models, anchors and names with the original's spelling."""

import gc
import re

import pytest
import torch
from small_modules import (
    Regression,
    SeedModel,
    cut,
    digits,
    line,
    program_of,
    seeded,
    train_plainly,
)
from torch import nn

from oracles import assert_bits_equal, assert_close
from tailrace.compat import poptorch
from tailrace.torch.calls.loader import Ahead


def wrapped(opts=None, lr=0.1, **options):
    module, reference = seeded(SeedModel)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=lr, **options)
    return poptorch.trainingModel(module, opts, optimizer), module, reference


def test_names():
    model, *_ = wrapped(momentum=0.9)
    with pytest.raises(
        AssertionError, match="Model must be compiled before calling getTensorNames"
    ):
        model.getTensorNames()
    model.compile(*digits(4))
    names = model.getTensorNames()
    assert names == sorted(names)
    for pattern in (r"\bfc1\b", r"\bfc2\b", "^input", "^loss", "^Gradient___", "^UpdatedVar__"):
        assert any(re.search(pattern, name) for name in names), pattern
    for start in ("scaledLearningRate", "weightDecayScaleFactor"):
        assert any(name.startswith(start) for name in names), start
    for name in ("fc1.weight", "input", "input/1", "Accl1___fc2.bias", "relu/Relu:0", "fc1/Add:0"):
        assert name in names, name
    assert "Accum___fc1.weight" not in names
    with pytest.raises(AssertionError, match="No tensor with name x found"):
        model.getAnchoredTensor("x")


def test_anchors_by_the_original_names():
    opts = poptorch.Options().deviceIterations(2)
    opts.Training.gradientAccumulation(2)
    all_of_them = poptorch.OutputMode.All
    wanted = {
        "new spelling": "Gradient___fc2.bias",
        "old spelling": "Gradient___model.fc2.bias",
        "updated": "UpdatedVar___model.fc2.weight",
        "after": "fc2.weight",
        "sum": "Accum___fc2.bias",
        "momentum": "Accl1___fc2.bias",
        "rate": "scaledLearningRate0___default___FLOAT",
        "rate of one": "scaledLearningRate0___specific___fc1.weight",
        "decay": "weightDecayScaleFactor0___default___FLOAT",
        "input": "input",
        "labels": "input/1",
        "hidden": "relu/Relu:0",
        "back": "Gradient___relu/Relu:0",
    }
    for short, long in wanted.items():
        opts.anchorTensor(short, long)
    opts.anchorTensor("all", "Gradient___fc2.bias", output_mode=all_of_them)
    opts.anchorTensor(
        "every",
        "Gradient___fc2.bias",
        anchor_mode=poptorch.OutputMode.EveryN,
        anchor_return_period=2,
    )
    opts.anchorTensor("summed", "Gradient___fc2.bias", poptorch.OutputMode.Sum)
    model, module, reference = wrapped(opts, momentum=0.9, weight_decay=0.01)
    batch = digits(16)
    model(*batch)
    found = {short: model.getAnchoredTensor(short) for short in (*wanted, "all", "every", "summed")}

    grads = []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for number, (x, y) in enumerate(cut(batch, 4)):
        before = {n: p.grad for n, p in reference.named_parameters()}
        for p in reference.parameters():
            p.grad = None
        reference(x, y)[1].backward()
        grads.append(reference.fc2.bias.grad.clone())
        if number % 2:
            for name, p in reference.named_parameters():
                p.grad = (p.grad + before[name]) / 2
            optimizer.step()
    stacked = torch.stack(grads)
    assert_close(found["all"].numpy(), stacked.reshape(-1).numpy())
    assert_close(found["every"].numpy(), stacked[[1, 3]].reshape(-1).numpy())
    assert_close(found["summed"].numpy(), stacked.sum(0).numpy())
    for name in ("new spelling", "old spelling"):
        assert_close(found[name].numpy(), stacked[-1].numpy())
    assert_close(found["sum"].numpy(), stacked[2:].mean(0).numpy())
    weight = module.fc2.weight.detach().numpy()
    assert_close(weight, reference.fc2.weight.detach().numpy())
    assert_bits_equal(found["updated"].numpy(), weight)
    assert_bits_equal(found["after"].numpy(), weight)
    state = optimizer.state[reference.fc2.bias]["momentum_buffer"]
    assert_close(found["momentum"].numpy(), state.numpy())
    assert found["rate"].item() == found["rate of one"].item() == pytest.approx(0.1)
    assert found["decay"].item() == pytest.approx(1 - 0.1 * 0.01)
    assert torch.equal(found["input"], batch[0][-4:])
    assert torch.equal(found["labels"], batch[1][-4:].int())
    assert found["hidden"].shape == found["back"].shape == (4, 8)


def test_anchored_gradients_are_those_of_the_scaled_loss():
    opts = poptorch.Options()
    opts.anchorTensor("g", "Gradient___fc2.bias")
    model, module, reference = wrapped(opts, loss_scaling=256.0)
    batch = digits(4)
    _, loss = model(*batch)
    expected = train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [batch])
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    gradient = reference.fc2.bias.grad * 256
    torch.testing.assert_close(model.getAnchoredTensor("g"), gradient, rtol=2e-5, atol=2e-4)
    assert_close(module.fc2.bias.detach().numpy(), reference.fc2.bias.detach().numpy())


def test_unknown_anchors():
    for long, message in (
        ("Gradient___fc9.bias", "Anchor tensor `Gradient___fc9.bias' not in Ir Tensors."),
        ("Gradient___input", "not all tensors have a gradient"),
    ):
        opts = poptorch.Options()
        opts.anchorTensor("a", long)
        model, *_ = wrapped(opts)
        with pytest.raises(poptorch.Error, match=re.escape(message)):
            model(*digits(4))
        model.destroy()


def test_anchors_in_inference():
    opts = poptorch.Options().deviceIterations(2)
    opts.anchorTensor("w", "fc1.weight", poptorch.OutputMode.Final)
    opts.anchorTensor("h", "fc1/Add:0")
    module, _ = seeded(SeedModel)
    model = poptorch.inferenceModel(module.eval(), opts)
    x = digits(8)[0]
    assert model(x).shape == (8, 4)
    assert_close(model.getAnchoredTensor("h").numpy(), module.fc1(x.flatten(1)).detach().numpy())
    assert torch.equal(model.getAnchoredTensor("w"), module.fc1.weight)


def test_learning_rates_change_with_set_optimizer_only():
    model, module, reference = wrapped(lr=0.5)
    optimizer = model.optimizer
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    batch = digits(4)
    model(*batch)
    optimizer.param_groups[0]["lr"] = 0.01
    model(*batch)
    model.setOptimizer(optimizer)
    model(*batch)
    train_plainly(reference, plain, [batch] * 2)
    plain.param_groups[0]["lr"] = 0.01
    train_plainly(reference, plain, [batch])
    assert_close(module.fc1.weight.detach().numpy(), reference.fc1.weight.detach().numpy())


def test_lifecycle():
    model, module, _ = wrapped()
    for call in (model.detachFromDevice, model.attachToDevice, model.copyWeightsToHost):
        with pytest.raises(
            poptorch.Error, match="Model has not been compiled or has been destroyed"
        ):
            call()
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    before, after = [], []
    handles = [
        poptorch.registerPreCompileHook(lambda: before.append(1)),
        poptorch.registerPostCompileHook(lambda: after.append(1)),
    ]
    model(*digits(4))
    for handle in handles:
        handle.remove()
    assert (before, after) == ([1], [1])
    assert model.isAttachedToDevice()
    assert model.compilationTime().total_seconds() > 0
    assert model.copyWeightsToHostIfNeeded()
    assert not model.copyWeightsToHostIfNeeded()
    model.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        model.detachFromDevice()
    model(*digits(4))
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        model.attachToDevice()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        model.cycleCount()
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(module)
    assert model.model is module
    model.destroy()
    with pytest.raises(AssertionError, match="must be compiled"):
        model.getTensorNames()
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


def test_random_state_and_files(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(3.0))  # not near zero after two steps of 0.5

        def forward(self, x):
            return poptorch.identity_loss(nn.functional.dropout(x) * self.w, reduction="none")

    model = poptorch.trainingModel(Noisy(), poptorch.Options().randomSeed(7))
    x = torch.ones(50)
    model(x)
    state = model.rng_state
    assert state == [7, 1]
    second = model(x)
    model.rng_state = state
    assert torch.equal(model(x) == 0, second == 0)
    model.save(tmp_path / "m.poptorch")
    again = poptorch.trainingModel(Noisy(), poptorch.Options().randomSeed(7))
    again.loadExecutable(tmp_path / "m.poptorch")
    assert torch.equal(again.w, model.w)
    with pytest.raises(poptorch.Error, match="the module's code is not in it"):
        poptorch.load(tmp_path / "m.poptorch")


def test_named_buffers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return x * self.scale

    module = Scaled()
    model = poptorch.inferenceModel(module, poptorch.Options().updatableNamedBuffers(["scale"]))
    x = torch.ones(3)
    model(x)
    module.scale.fill_(5.0)
    assert torch.equal(model(x), x)
    model.copyNamedBuffersToDevice()
    assert torch.equal(model(x), 5 * x)
    plain = poptorch.inferenceModel(Scaled())
    plain(x)
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        plain.copyNamedBuffersToDevice()


def test_operations():
    class Ops(nn.Module):
        def forward(self, x, flag, start):
            with poptorch.NameScope("mine"):
                x = poptorch.nop(x) + 1
            (x,) = poptorch.for_loop(3, lambda v: v * 2, [x])
            (x,) = poptorch.cond(flag, lambda v: v + 1, [x], lambda v: v - 1, [x])
            part = poptorch.dynamic_slice(x, 0, start, 2)
            return x, part, poptorch.dynamic_update(x, part * 0, 0, start, 2)

    given = (torch.arange(4.0), torch.tensor([True]), torch.tensor([1]))
    model = poptorch.inferenceModel(Ops())
    for found, expected in zip(model(*given), Ops()(*given), strict=True):
        assert torch.equal(found, expected)
    assert any(name.startswith("mine/") for name in model.getTensorNames())
    assert not poptorch.isRunningOnIpu()
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.for_loop(1, abs, torch.ones(1))
    with pytest.raises(ValueError, match="at index 0 is not torch.tensor"):
        poptorch.for_loop(1, abs, [1])


class Piped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            h = torch.tanh(self.a(x))
        with poptorch.Block(user_id="B", ipu_id=1):
            out = self.b(poptorch.recomputationCheckpoint(h))
            return out, poptorch.identity_loss(((out - y) ** 2), reduction="mean")


@pytest.mark.parametrize(
    ("strategy", "count"), [("PipelinedExecution", 3), ("ShardedExecution", 1)]
)
def test_pipelines(strategy, count):
    module, reference = seeded(Piped)
    opts = poptorch.Options().deviceIterations(2)
    opts.Training.gradientAccumulation(count)
    opts.setExecutionStrategy(getattr(poptorch, strategy)())
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.02)
    model = poptorch.trainingModel(module, opts, optimizer)
    batch = line(8 * count)
    model(*batch)
    plain = torch.optim.Adam(reference.parameters(), lr=0.02)
    train_plainly(reference, plain, cut(batch, 2 * count), count)
    assert_close(module.a.weight.detach().numpy(), reference.a.weight.detach().numpy())
    assert program_of(model).engine.pipeline is not None


def test_pipeline_constraints():
    module = Piped()
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(2)
    model = poptorch.trainingModel(module, opts)
    message = (
        "number of pipeline stages (3) when using pipelined execution. Please note that a model"
    )
    with pytest.raises(poptorch.Error, match=re.escape(message)):
        model(*line(8))
    inference = poptorch.inferenceModel(Piped())
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater than or equal"):
        inference(*line(4))


def test_optimizers():
    module = Regression()
    adam = poptorch.optim.Adam(module.parameters(), lr=0.1, weight_decay=None)
    assert not adam.variable_attrs.isConstant("lr")
    assert adam.variable_attrs.isConstant("betas")
    adam.variable_attrs.markAsVariable("betas")
    assert not adam.variable_attrs.isConstant("betas")
    with pytest.raises(AssertionError, match="Unknown attribute 'odd'"):
        adam.variable_attrs.isConstant("odd")
    with pytest.raises(ValueError, match="non-amsgrad"):
        poptorch.optim.AdamW(module.parameters(), amsgrad=True)
    poptorch.trainingModel(module, None, poptorch.optim.LAMB(module.parameters()))(*line(4))


def test_the_asynchronous_accessor():
    rows = [torch.full((2,), float(n)) for n in range(5)]
    accessor = poptorch.AsynchronousDataAccessor(rows)
    for _ in range(2):
        assert [int(t[0]) for t in accessor] == [0, 1, 2, 3, 4]
    assert len(accessor) == 5
    loader = poptorch.DataLoader(
        poptorch.Options().deviceIterations(2), rows, mode=poptorch.DataLoaderMode.Async
    )
    assert loader.combinedBatchSize == 2
    assert [tuple(t.shape) for t in loader] == [(2, 2), (2, 2)]
    accessor.terminate()


def test_the_asynchronous_accessor_keeps_no_epochs():
    accessor = poptorch.AsynchronousDataAccessor([1, 2])
    for _ in range(3):
        assert list(accessor) == [1, 2]
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Ahead]
    rest = iter(accessor)
    assert next(rest) == 1
    accessor.terminate()  # an epoch in the middle is stopped
    assert list(rest) in ([], [2])
