"""Automatic loss scaling: the scale follows the gradients, and changes no result but by rounding."""

import numpy as np
import pytest
import torch
from small_modules import Regression, line, seeded
from torch import nn

from tailrace.compat import poptorch


class TwoStages(nn.Module):
    """Two linear layers on two devices."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        with poptorch.Block("a", ipu_id=0):
            x = self.first(x)
        with poptorch.Block("b", ipu_id=1):
            out = self.second(x)
            return out, nn.functional.mse_loss(out, y)


OPTIMIZERS = {
    "sgd": lambda p, **o: poptorch.optim.SGD(p, lr=0.05, momentum=0.5, **o),
    "adam": lambda p, **o: poptorch.optim.Adam(p, lr=0.05, **o),
    "adamw": lambda p, **o: poptorch.optim.AdamW(p, lr=0.05, **o),
    "rmsprop": lambda p, **o: poptorch.optim.RMSprop(p, lr=0.05, **o),
    "lamb": lambda p, **o: poptorch.optim.LAMB(p, lr=0.05, **o),
}


def model_of(module, automatic, make=OPTIMIZERS["sgd"], loss_scaling=4.0, change=None, anchors=()):
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(automatic)
    for name in anchors:
        options.anchorTensor(name, name)
    if change is not None:
        change(options)
    optimizer = make(module.parameters(), loss_scaling=loss_scaling)
    return poptorch.trainingModel(module, options, optimizer)


WAYS = {
    "plain": lambda o: None,
    "accumulated": lambda o: o.Training.gradientAccumulation(2),
    "replicated": lambda o: o.replicationFactor(2),
    "several steps": lambda o: o.deviceIterations(2),
}


@pytest.mark.parametrize("way", WAYS)
def test_results_are_those_of_a_fixed_scale(way):
    fixed, automatic = seeded(Regression), seeded(Regression)
    fixed, automatic = fixed[0], automatic[0]
    plain = model_of(fixed, False, change=WAYS[way])
    scaled = model_of(automatic, True, change=WAYS[way])
    for seed in range(4):
        data = line(8, seed=seed)
        torch.testing.assert_close(plain(*data), scaled(*data))
    for a, b in zip(fixed.parameters(), automatic.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer(make):
    fixed, automatic = seeded(Regression)[0], seeded(Regression)[0]
    plain, scaled = model_of(fixed, False, make), model_of(automatic, True, make)
    for seed in range(3):
        data = line(8, seed=seed)
        torch.testing.assert_close(plain(*data), scaled(*data))


def test_the_scale_is_doubled_up_to_the_largest_power_of_two():
    scaled = model_of(seeded(Regression)[0], True, loss_scaling=10.0, anchors=["finalLossScale"])
    seen = []
    for seed in range(14):
        scaled(*line(4, seed=seed))
        seen.append(scaled.getAnchoredTensor("finalLossScale").item())
    assert seen == [min(10.0 * 2**n, 32768.0) for n in range(14)]


def test_large_gradients_halve_it():
    gradients = ["Gradient___linear.weight", "Gradient___linear.bias"]
    anchors = ["finalLossScale", "lossScaleUpdateFactor", *gradients]
    module = seeded(lambda: Regression(dtype=torch.float16))[0]
    scaled = model_of(
        module,
        True,
        lambda p, **o: poptorch.optim.SGD(p, lr=1e-3, **o),
        loss_scaling=2048.0,
        anchors=anchors,
    )
    factor, edge = 1.0, 0.0625 * float(np.finfo(np.float16).max)
    halved = 0
    for seed in range(8):
        x, y = line(4, seed=seed)
        scaled(x.half(), y.half() * 4)
        assert scaled.getAnchoredTensor("finalLossScale").item() == 2048 * factor
        found = [scaled.getAnchoredTensor(name).float().numpy() for name in gradients]
        large = sum(int((~(np.abs(each) <= edge)).sum()) for each in found)
        halved += bool(large)
        factor = factor / 2 if large else min(factor * 2, 16.0)
        assert scaled.getAnchoredTensor("lossScaleUpdateFactor").item() == factor
    assert 0 < halved < 8
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_pipeline():
    def change(options):
        options.deviceIterations(1).Training.gradientAccumulation(4)

    fixed, automatic = seeded(TwoStages)[0], seeded(TwoStages)[0]
    plain = model_of(fixed, False, change=change)
    scaled = model_of(automatic, True, change=change)
    for seed in range(3):
        data = line(8, seed=seed)
        torch.testing.assert_close(plain(*data), scaled(*data))


def test_the_scale_is_saved_and_survives_another_program(tmp_path):
    module = seeded(Regression)[0]
    scaled = model_of(module, True, anchors=["finalLossScale"])
    for seed in range(3):
        scaled(*line(4, seed=seed))
    scaled.save(tmp_path / "model.npz", export_model=False)
    scaled.destroy()
    scaled(*line(6, seed=3))  # another form: another program
    assert scaled.getAnchoredTensor("finalLossScale").item() == 32
    again = model_of(seeded(Regression, 1)[0], True, anchors=["finalLossScale"])
    again.load(tmp_path / "model.npz")
    again(*line(4, seed=3))
    assert again.getAnchoredTensor("finalLossScale").item() == 32


def test_weights_that_come_from_the_host_leave_it():
    module = seeded(Regression)[0]
    scaled = model_of(module, True, anchors=["finalLossScale"])
    scaled(*line(4))
    with torch.no_grad():
        module.linear.weight.zero_()
    scaled.copyWeightsToDevice()
    scaled(*line(4))
    assert scaled.getAnchoredTensor("finalLossScale").item() == 8
    assert "lossScaleUpdateFactor" not in module.state_dict()
    assert {"finalLossScale", "lossScaleUpdateFactor"} <= set(scaled.getTensorNames())
