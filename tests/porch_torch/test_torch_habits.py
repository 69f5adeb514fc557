"""What users of plain PyTorch write by habit: backward(), step() and zero_grad() around a call."""

import copy
import io

import pytest
import torch
from small_modules import Regression, line, seeded

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal
from tailrace.compat import poptorch
from tailrace.messages import forget_notes

RULE = r"backward\(\) cannot be called explicitly on outputs of a model.*Remove backward\(\)"


@pytest.fixture(scope="module")
def trained():
    """(model, its optimizer, one loss, the loss of each of two steps)"""
    module, _ = seeded(Regression)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = tt.training_model(module, optimizer)
    two = tt.training_model(seeded(Regression)[0], device_iterations=2, output_mode="all")
    return model, optimizer, model(*line(4))[1], two(*line(4))[1]


LOSSES = {
    "as returned": lambda loss, all: loss,
    "a part of it": lambda loss, all: loss / 4,
    "of all steps": lambda loss, all: all.mean(),
    "with a penalty": lambda loss, all: 0.1 * loss + torch.ones(()) * 2,
    "detached": lambda loss, all: all.sum().detach(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_backward_says_what_to_remove(trained, name):
    with pytest.raises(tr.TailraceError, match=RULE):
        LOSSES[name](*trained[2:]).backward()


def test_backward_after_inference_and_in_the_words_of_the_original():
    model = poptorch.inferenceModel(seeded(Regression)[0])
    with pytest.raises(poptorch.Error, match="An inference model does not train"):
        model(*line(4))[1].backward()


def test_losses_are_tensors_like_others(trained):
    _, _, loss, steps = trained
    plain = torch.tensor(loss.item())
    assert repr(loss) == repr(plain)
    assert f"{loss:.3f}" == f"{plain:.3f}"
    assert str(steps) == str(torch.tensor(steps.tolist()))
    assert type(steps[None]) is type(steps.double()[None]) is torch.Tensor
    assert loss.numpy() == plain.numpy()
    assert float(loss) == plain
    assert not loss.requires_grad
    copied = copy.deepcopy(loss)
    assert copied == loss
    file = io.BytesIO()
    torch.save({"loss": loss, "steps": steps}, file)
    file.seek(0)
    loaded = torch.load(file)  # by default tensors and plain containers alone
    assert type(loaded["loss"]) is torch.Tensor
    assert torch.equal(loaded["steps"], steps)


def test_gradients_of_what_follows_are_pytorchs_own(trained):
    *_, loss, _ = trained
    weight = torch.ones((), requires_grad=True)
    (weight * loss).backward()
    assert weight.grad == loss
    leaf = loss.clone().requires_grad_()
    (leaf * 3).backward()
    assert leaf.grad == 3


def test_step_and_zero_grad_change_nothing_and_say_so_once(caplog):
    forget_notes()
    found = []
    for habit in (False, True):
        module, _ = seeded(Regression)
        optimizer = torch.optim.Adam(module.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model = tt.training_model(module, optimizer)
        for seed in range(3):
            if habit:
                optimizer.zero_grad()
            model(*line(4, seed=seed))
            if habit:
                optimizer.step()
            scheduler.step()
        found.append(module.state_dict())
    assert_bits_equal(*({name: v.numpy() for name, v in one.items()} for one in found))
    notes = [r.message for r in caplog.records if "optimizer.step() does nothing" in r.message]
    assert len(notes) == 1


def test_steps_of_the_host_are_left_alone(caplog):
    forget_notes()
    module, plain = seeded(Regression)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (module, plain)]
    model = tt.training_model(module, optimizers[0])
    for one, optimizer in zip((module, plain), optimizers, strict=True):
        one(*line(4))[1].backward()
        optimizer.step()
    assert not [r for r in caplog.records if "optimizer.step()" in r.message]
    model.copy_weights_to_host_if_needed()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


LOST = "the change is lost. Call model.copy_weights_to_device() after it."


def zero(module):
    with torch.no_grad():
        next(module.parameters()).zero_()


@pytest.mark.parametrize(
    "change",
    [zero, lambda module: module.load_state_dict(module.state_dict())],
    ids=["in place", "load_state_dict"],
)
def test_weights_changed_on_the_host_are_not_lost_silently(caplog, change):
    forget_notes()
    module, _ = seeded(Regression)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), 0.1))
    change(module)  # before the first call they are the weights that it begins with
    model(*line(4))
    module.state_dict()  # what a call has trained is copied to the host: no change of the user's
    model(*line(4))
    change(module)
    model.copy_weights_to_device()
    model(*line(4))
    assert LOST not in caplog.text
    change(module)
    model(*line(4))
    assert LOST in caplog.text


class Around(torch.nn.Module):
    """A module around another, whose weights it shares."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return self.inner(x, y)


def test_weights_that_others_write_are_no_change_on_the_host(tmp_path, caplog):
    forget_notes()
    module, _ = seeded(Regression)
    outer = Around(module)
    models = [
        tt.training_model(one, torch.optim.SGD(one.parameters(), 0.1)) for one in (module, outer)
    ]
    for model in (*models, *models):
        model(*line(4))
        module.state_dict()
    models[0].save(tmp_path / "saved")
    zero(module)
    models[0].load(tmp_path / "saved")  # replaces what was written
    models[0](*line(4))
    assert LOST not in caplog.text
