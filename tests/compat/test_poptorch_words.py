"""Words of PopTorch programs beyond the originals' own list, against plain PyTorch."""

import json

import pytest

torch = pytest.importorskip("torch")

import tailrace as tr  # noqa: E402
from tailrace.compat import poptorch  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, mask):
        # As libraries write it: look at values only where nothing is compiled.
        if not torch.compiler.is_compiling() and torch.all(mask == 1):
            return self.linear(x)
        return self.linear(x * mask)


class Training(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, mask):
        return poptorch.identity_loss(self.net(x, mask), reduction="mean")


def test_what_is_compiled_says_so():
    model, x = Net(), torch.randn(2, 3)
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    found = poptorch.inferenceModel(model)(x, mask)
    assert torch.allclose(found, model.linear(x * mask), atol=1e-6)
    assert not torch.compiler.is_compiling()


def test_the_module_has_the_methods_of_its_wrapper():
    """`model.destroy()` is what the error about a second wrapper says."""
    model, x = Training(), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    before = model.net.linear.weight.clone()
    training(x, x)
    assert model.copyWeightsToHostIfNeeded() is True
    assert model.copyWeightsToHostIfNeeded() is False
    with pytest.raises(AttributeError, match="destroy"):
        model.net.destroy()  # a part of it is not wrapped
    assert not hasattr(model, "setOptimizer")
    model.destroy()
    assert torch.allclose(model.net.linear.weight, before - 0.5)
    assert not hasattr(model, "destroy")
    poptorch.trainingModel(model, optimizer=optimizer)


def test_numbers_of_popart_set_options_without_effect():
    """As in the original's program that trains BERT; PopART's own graphs are refused."""
    from tailrace.compat import popart

    chosen = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
    copied = popart.SubgraphCopyingStrategy.JustInTime
    for name, number in (("accumulateOuterFragmentSettings.schedule", chosen), ("copying", copied)):
        poptorch.Options().from_json(json.dumps({"_Popart.set": [name, int(number)]}))
    assert int(chosen) == 3
    with pytest.raises(tr.TailraceError, match="Received: set"):
        poptorch.Options().from_json('{"set": ["device_iterations", 2]}')
    with pytest.raises(AttributeError, match="popart.Builder is not available"):
        popart.Builder()
