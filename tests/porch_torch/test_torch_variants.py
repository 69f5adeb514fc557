"""Options of layers and functions that people use: forward and gradient equal PyTorch's own."""

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from small_modules import seeded, train_plainly
from test_torch_coverage import on_device, plainly
from torch import nn

import tailrace.torch as tt
from oracles import assert_close
from tailrace.torch.calls.containers import flatten


class Each(nn.Module):
    """Several functions or modules of the same arguments."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        for name, one in functions.items():
            if isinstance(one, nn.Module):
                self.add_module(name.replace(".", "_"), one)

    def forward(self, *given):
        return {name: one(*given) for name, one in self.functions.items()}


def partial(function, **options):
    return functools.partial(function, **options)


REDUCTIONS = ("mean", "sum", "none")
CLASSES = torch.tensor([1, 0, 3])
WEIGHT = torch.tensor([0.3, 1.0, 0.7, 2.0])


def averages():
    sizes = itertools.product((2, 3), (2, 3), (0, 1), (False, True), (False, True))
    return {
        f"{k} {s} {p} {ceil} {counted}": nn.AvgPool2d(k, s, p, ceil, counted)
        for k, s, p, ceil, counted in sizes
    } | {"divisor": nn.AvgPool2d(3, 2, 1, divisor_override=5), "unequal": nn.AvgPool2d((2, 3), 1)}


def maxima():
    return {
        "dilated": nn.MaxPool2d(2, 1, dilation=2),
        "indices": nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True, return_indices=True),
        "one dim": nn.MaxPool2d(2, dilation=(1, 2)),
        "plain": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    }


def resized():
    found = {
        f"{mode} {given}": partial(F.interpolate, mode=mode, antialias=True, **given)
        for mode in ("bilinear", "bicubic")
        for given in (
            {"size": (4, 3)},
            {"size": 9},
            {"scale_factor": (0.6, 1.7)},
            {"size": 4, "align_corners": True},
        )
    }
    return found | {
        "bicubic": partial(F.interpolate, mode="bicubic", size=5),
        "bicubic, corners": partial(F.interpolate, mode="bicubic", size=9, align_corners=True),
        "exact": partial(F.interpolate, mode="nearest-exact", scale_factor=1.7),
        "area": partial(F.interpolate, mode="area", size=4),
    }


def classified():
    makers = {
        "weights": partial(nn.CrossEntropyLoss, weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
        "smoothed": partial(nn.CrossEntropyLoss, label_smoothing=0.2, ignore_index=0),
        "margin": partial(nn.MultiMarginLoss, p=2, margin=0.7, weight=WEIGHT),
    }
    return {
        f"{name} {how}": lambda x, make=make, how=how: make(reduction=how)(x, CLASSES)
        for name, make in makers.items()
        for how in REDUCTIONS
    }


def compared():
    makers = {
        "bce": partial(nn.BCEWithLogitsLoss, weight=WEIGHT, pos_weight=WEIGHT * 3),
        "kl": partial(nn.KLDivLoss, log_target=True),
        "huber": partial(nn.HuberLoss, delta=0.3),
        "smooth": partial(nn.SmoothL1Loss, beta=0.3),
        "margin": partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHT),
        "poisson": partial(nn.PoissonNLLLoss, full=True),
    }
    target = torch.sigmoid(torch.linspace(-2, 2, 12).reshape(3, 4))
    return {
        f"{name} {how}": lambda x, make=make, how=how: make(reduction=how)(x, target)
        for name, make in makers.items()
        for how in REDUCTIONS
    }


def at_zero():
    zeros = torch.zeros(())
    return {
        "x ** 0": lambda x: x**0,
        "x ** tensor": lambda x: x ** torch.tensor([0.0, 2.0, 1.0, 0.0]),
        "tensor ** x": lambda x: torch.zeros(4) ** x.abs(),
        "atan2": lambda x: torch.atan2(x, x * 0),
        "xlogy": lambda x: torch.xlogy(x, zeros + x.detach()),
        "logit": lambda x: torch.logit(x, 0.0001),
        "abs": torch.abs,
        "norm": lambda x: x.norm(dim=0),
        "hardtanh": partial(F.hardtanh, min_val=0.0),
    }


def sampled():
    grid = torch.linspace(-4, 4, 36).reshape(1, 6, 3, 2).expand(2, 6, 3, 2)
    return {
        f"{mode} {padding} {corners}": lambda x, given=(mode, padding, corners): F.grid_sample(
            x, grid, *given
        )
        for mode in ("bilinear", "nearest")
        for padding in ("reflection", "border")
        for corners in (False, True)
    }


def normalised():
    cumulative = [nn.BatchNorm2d(3, momentum=None) for _ in range(2)]
    return {
        "cumulative": cumulative[0],
        "cumulative, eval": cumulative[1].eval(),
        "unaffine": nn.BatchNorm2d(3, momentum=None, affine=False),
        "untracked": nn.BatchNorm2d(3, momentum=None, track_running_stats=False),
        "instances": nn.InstanceNorm2d(3, momentum=None, track_running_stats=True),
    }


IMAGE = (2, 3, 7, 6)

GROUPS = {
    "average pooling": (averages, (2, 3, 7, 7)),
    "max pooling": (maxima, (1, 2, 9, 8)),
    "resizing": (resized, IMAGE),
    "losses of classes": (classified, (3, 4)),
    "losses of numbers": (compared, (3, 4)),
    "sampling": (sampled, (2, 3, 4, 5)),
    "norms": (normalised, IMAGE),
}


def check(functions, x):
    module = Each(functions)
    expected, expected_grads = plainly("", copy.deepcopy(module), [x])
    found, grads = on_device(module, [x])
    names = [name for name, _ in flatten(module(x))]
    for name, one, other in zip(names, found, expected, strict=True):
        try:
            assert_close(one, other)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    for name, value in expected_grads.items():
        assert_close(grads[name], value)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.filterwarnings("ignore:reduction")
def test_each_of_a_group(name):
    make, shape = GROUPS[name]
    torch.manual_seed(0)
    check(make(), torch.randn(shape))


@pytest.mark.parametrize("name", at_zero())
def test_gradients_are_finite_where_those_of_pytorch_are(name):
    check({name: at_zero()[name]}, torch.tensor([0.0, 0.5, 0.0, 0.0001]))


def test_a_path_that_cannot_be_has_an_infinite_loss():
    probs = torch.randn(6, 2, 5).log_softmax(2)
    targets, lengths = torch.tensor([[1, 2, 2], [3, 3, 3]]), torch.tensor([6, 4])
    given = {"targets": targets, "input_lengths": lengths, "target_lengths": torch.tensor([3, 3])}

    def losses(probs):
        loss = partial(F.ctc_loss, reduction="none", **given)
        return loss(probs), loss(probs, zero_infinity=True)

    class Paths(nn.Module):
        def forward(self, probs):
            return losses(probs)

    found, expected = tt.inference_model(Paths())(probs), losses(probs)
    assert math.isinf(expected[0][1])
    for one, other in zip(found, expected, strict=True):
        assert_close(one.numpy(), other.numpy())


class Cumulative(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1)
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, F.mse_loss(out, y)


def test_a_cumulative_norm_trains_and_resumes(tmp_path):
    module, plain = seeded(Cumulative)
    x, y = torch.randn(24, 3), torch.randn(24, 1)
    model = tt.training_model(
        module, torch.optim.SGD(module.parameters(), 0.1), device_iterations=3
    )
    model(x[:12], y[:12])
    model.save(tmp_path / "state")
    model(x[12:], y[12:])
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    train_plainly(plain, optimizer, list(zip(x.split(4), y.split(4), strict=True)))
    for name, value in plain.state_dict().items():
        assert_close(module.state_dict()[name].numpy(), value.numpy())
    assert module.state_dict()["layers.1.num_batches_tracked"] == 6
    other = Cumulative()
    resumed = tt.training_model(
        other, torch.optim.SGD(other.parameters(), 0.1), device_iterations=3
    )
    resumed.load(tmp_path / "state")
    resumed(x[12:], y[12:])
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    evaluated = tt.inference_model(other.eval())(x[:4], y[:4])[0]
    assert_close(evaluated.numpy(), plain.eval()(x[:4], y[:4])[0].detach().numpy())
