"""A module cut into blocks on several devices computes what plain PyTorch computes."""

import copy
import pickle
import re

import pytest
import torch
from small_modules import cut, line, seeded, train_plainly
from torch import nn
from torch.nn import functional

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close


class Stages(nn.Module):
    """Three layers; a test puts blocks on them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        out = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out, functional.mse_loss(out, y)


class With(Stages):
    def forward(self, x, y):
        with tt.Block("A", 0):
            h = torch.tanh(self.a(x))
        with tt.Block("B", 1):
            h = torch.tanh(self.b(h))
        with tt.Block("C", 2):
            out = self.c(h)
            return out, functional.mse_loss(out, y)


class Started(Stages):
    def forward(self, x, y):
        h = torch.tanh(self.a(x))
        tt.Block.start("B", 1)
        h = torch.tanh(self.b(h))
        tt.Block.start("C", 2)
        out = self.c(h)
        return out, functional.mse_loss(out, y)


class Functions(Stages):
    @tt.BlockFunction("A", 0)
    def first(self, x):
        return torch.tanh(self.a(x))

    @tt.BlockFunction("BC", 1)
    def second(self, h, y):
        out = self.c(torch.tanh(self.b(h)))
        return out, functional.mse_loss(out, y)

    def forward(self, x, y):
        return self.second(self.first(x), y)


def begun():
    module = Stages()
    tt.BeginBlock(module.b, "B", 1)
    tt.BeginBlock(module.c, device=2)
    return module


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.02)


def weights(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def check(make, count, microbatches=6, replicas=1, iterations=2, **options):
    module, reference = seeded(make)
    model = tt.training_model(
        module,
        adam(module),
        accumulation=microbatches,
        replicas=replicas,
        device_iterations=iterations,
        output_mode="all",
        **options,
    )
    pieces = iterations * microbatches * replicas
    batch = line(4 * pieces)
    out, loss = model(*batch)
    expected = train_plainly(reference, adam(reference), cut(batch, pieces), microbatches, replicas)
    assert_close(loss.numpy(), torch.tensor(expected).numpy())
    assert_close(weights(module), weights(reference))
    assert out.shape == (4 * pieces, 1)
    trainer = model._program.engine
    assert (trainer.pipeline is None) == (count == 1)
    if count > 1:
        assert trainer.placement.mesh.shape == {"replica": replicas, "stage": count}
    return model


@pytest.mark.parametrize(("make", "stages"), [(With, 3), (Started, 3), (begun, 3), (Functions, 2)])
def test_ways_to_make_blocks(make, stages):
    check(make, stages)


def test_without_blocks_there_is_one_device():
    check(Stages, 1, microbatches=2)


@pytest.mark.parametrize(
    ("microbatches", "options"),
    [
        (5, {}),
        pytest.param(6, {"schedule": "interleaved"}, marks=pytest.mark.exhaustive),
        (6, {"recompute": True}),
        (2, {"execution": "sharded"}),
        (6, {"replicas": 2}),
    ],
)
def test_ways_to_run(microbatches, options):
    check(With, 3, microbatches, **options)


def test_stages_by_name_or_one_after_the_other():
    class Named(Stages):
        def forward(self, x, y):
            tt.Block.start("A")
            h = torch.tanh(self.a(x))
            tt.Block.start("B")
            h = torch.tanh(self.b(h))
            tt.Block.start("C")
            out = self.c(h)
            return out, functional.mse_loss(out, y)

    check(Named, 3, stages="increment", iterations=1)
    check(Named, 2, stages=[["A", "B"], "C"], iterations=1)
    with pytest.raises(AssertionError, match="Block 'A' is associated with more than one stage"):
        tt.ModelOptions(stages=[["A"], ["A"]])
    with pytest.raises(AssertionError, match="Unknown Block 'C' list of expected Blocks"):
        tt.training_model(Named(), None, accumulation=3, stages=[["A"], ["B"]])(*line(12))
    with pytest.raises(AssertionError, match="Block 'A' has no device"):
        tt.training_model(Named(), None)(*line(4))


class Rich(nn.Module):
    """Buffers, random numbers and a weight of two stages."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x, y):
        with tt.Block(device=0):
            h = self.norm(self.a(x))
        with tt.Block(device=1):
            out = self.head(torch.tanh(self.a(h)))
            return out, functional.mse_loss(out, y)


def test_buffers_and_weights_of_several_stages():
    check(Rich, 2, iterations=3)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with tt.Block(device=0):
            h = functional.dropout(x * self.w, 0.5)
        with tt.Block(device=1):
            out = functional.dropout(h, 0.5)
            return out, tt.identity_loss(out, reduction="mean")


def test_random_numbers_do_not_depend_on_the_schedule():
    def run(**options):
        model = tt.training_model(
            Dropping(), None, accumulation=4, seed=3, output_mode="all", **options
        )
        return model(torch.ones(80, 4))[0].numpy()

    plain = run(stages=[["0", "1"]])
    assert_bits_equal(run(), plain)
    assert_bits_equal(run(recompute=True), plain)


def test_anchors_in_a_pipeline():
    module, reference = seeded(With)
    model = tt.training_model(module, adam(module), accumulation=6, device_iterations=2)
    model.anchor_tensor("grads", "grad/a.weight", "all")
    model.anchor_tensor("hidden", "activation/b", "all")
    model.anchor_tensor("after", "updated/c.weight", "final")
    batch = line(48)
    model(*batch)
    hidden = reference.b(torch.tanh(reference.a(batch[0]))).detach().numpy()
    assert_close(model.anchored_tensor("hidden").numpy()[:24], hidden[:24])
    assert model.anchored_tensor("grads").shape == (12 * 5, 3)
    assert_bits_equal(model.anchored_tensor("after").numpy(), module.c.weight.detach().numpy())


def test_inference_with_blocks():
    module, reference = seeded(With)
    model = tt.inference_model(module.eval(), device_iterations=4)
    batch = line(16)
    assert_close(model(*batch)[0].numpy(), reference(*batch)[0].detach().numpy())


def test_constraints():
    module = With()
    for count in (3, 4):
        model = tt.training_model(module, adam(module), accumulation=count)
        message = "must be greater than or equal to the number of pipeline stages (5) when"
        with pytest.raises(tr.TailraceError, match=re.escape(message)):
            model(*line(4 * count))
        model.destroy()

    class Outside(Stages):
        def forward(self, x, y):
            with tt.Block(device=0):
                h = self.b(self.a(x))
            out = self.c(h)
            return out, functional.mse_loss(out, y)

    with pytest.raises(
        tr.TailraceError, match="No active Block, all the ops must belong to a Block"
    ):
        tt.training_model(Outside(), None)(*line(4))


def test_blocks_on_modules():
    module = begun()
    assert list(module.state_dict()) == list(Stages().state_dict())
    assert "(b): Linear(in_features=5, out_features=4, bias=True)  [block 'B' on device 1]" in (
        tt.module_repr(module)
    )
    with pytest.raises(tr.TailraceError, match="module has already been assigned to a block"):
        tt.BeginBlock(module.b)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        model = tt.training_model(same, adam(same), accumulation=5)
        model(*line(20))
        assert len(model._forward.devices) == 3
    tt.remove_blocks(module)
    model = tt.training_model(module, adam(module))
    model(*line(4))
    assert not model._forward.devices
    x, y = line(4)
    assert module(x, y)[0].shape == (4, 1), "blocks do nothing in plain PyTorch"
    assert tt.BeginBlock(torch.tanh)(x).shape == x.shape


def test_recomputation_checkpoints():
    class Kept(With):
        def forward(self, x, y):
            with tt.Block(device=0):
                h = tt.recomputation_checkpoint(torch.tanh(self.a(x)))
                h, _ = tt.recomputation_checkpoint(torch.tanh(self.b(h)), h)
            with tt.Block(device=1):
                out = self.c(h)
                return out, functional.mse_loss(out, y)

    check(Kept, 2, recompute="interleaved")
    with pytest.raises(tr.TailraceError, match="recomputation_checkpoint keeps tensors"):
        tt.recomputation_checkpoint(3)


class Pooled(nn.Module):
    """Max pooling of what comes from elsewhere, flat: the compiler of CPUs has read it wrongly."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 16, 3), nn.Linear(400, 1)

    def forward(self, x, y):
        with tt.Block(device=0):
            h = self.conv(x.reshape(-1, 1, 13, 13))
        with tt.Block(device=1):
            out = self.head(functional.max_pool2d(h, 2).flatten(1))
            return out, functional.mse_loss(out, y)


def test_max_pooling_behind_a_boundary_and_in_a_loop():
    x, y = torch.randn(4 * 32, 169), torch.randn(4 * 32, 1)
    for options in ({"accumulation": 4}, {"device_iterations": 4, "stages": [["0", "1"]]}):
        module, reference = seeded(Pooled)
        model = tt.training_model(module, None, output_mode="all", **options)
        model.set_optimizer(torch.optim.SGD(module.parameters(), lr=0.0))
        assert_close(model(x, y)[0].numpy(), reference(x, y)[0].detach().numpy())
