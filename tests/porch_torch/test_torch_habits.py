"""What users of plain PyTorch write by habit around a call: it works, or a text says what to do."""

import copy
import io

import pytest
import torch
from small_modules import Regression, line, seeded
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal
from tailrace.base.messages import forget_notes
from tailrace.compat import poptorch

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


# -- gradients on the host ------------------------------------------------------------------------


CLIPPING = {
    "norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "norm of a list": lambda module: nn.utils.clip_grad_norm_(list(module.parameters()), 1.0),
    "norm of one": lambda module: nn.utils.clip_grad_norm_(module.linear.weight, 1.0),
    "values": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_after_a_call_says_where_it_is_done(trained, name):
    with pytest.raises(tr.TailraceError, match=r"would clip nothing.*max_grad_norm= of the model"):
        CLIPPING[name](trained[0].module)


def test_clipping_before_the_first_call_and_of_other_modules_is_pytorchs(trained):
    module, plain = seeded(Regression)
    tt.training_model(module)
    for one in (module, plain):
        assert nn.utils.clip_grad_norm_(one.parameters(), 1.0) == 0


def test_clipping_of_a_backward_pass_of_the_host():
    module, plain = seeded(Regression)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), 0.1))
    model(*line(4))
    plain.load_state_dict(module.state_dict())
    norms = []
    for one in (module, plain):
        one.linear.bias.requires_grad_(False)  # has none, as in PyTorch
        one(*line(4))[1].backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.01))
    assert norms[0] == norms[1] > 0.01
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)
    module.zero_grad()
    assert module.linear.weight.grad is None


def test_reading_gradients_of_another_net_asks_no_model(trained, monkeypatch):
    other, _ = seeded(Regression)

    def asked():
        raise AssertionError

    monkeypatch.setattr("tailrace.torch.models.host_gradients.living_models", asked)
    assert [p.grad for p in other.parameters()] == [None, None]
    with pytest.raises(AssertionError):
        _ = trained[0].module.linear.weight.grad


def test_a_destroyed_model_has_pytorchs_gradients_again():
    module, _ = seeded(Regression)
    model = tt.training_model(module)
    model(*line(4))
    model.destroy()
    assert nn.utils.clip_grad_norm_(module.parameters(), 1.0) == 0


def test_reading_a_gradient_says_where_it_is(trained, caplog):
    forget_notes()
    module = trained[0].module
    assert [p.grad for p in module.parameters()] == [None, None]
    (note,) = [r.message for r in caplog.records if ".grad of its parameters" in r.message]
    assert "anchor_tensor(name, 'grad/...')" in note


def test_a_scaler_says_what_to_use(trained):
    _, optimizer, loss, _ = trained
    for use in (lambda s: s.unscale_(optimizer), lambda s: s.step(optimizer)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss)
        with pytest.raises(tr.TailraceError, match="loss_scaling= of an optimizer of tt.optim"):
            use(scaler)


def _step_on_the_host(module, optimizer):
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _load(module, optimizer):
    module.load_state_dict({n: v * 2 for n, v in module.state_dict().items()})


@pytest.mark.parametrize("change", [_step_on_the_host, _load])
@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_the_host_has_changed_are_trained(caplog, change, copied):
    forget_notes()
    module, plain = seeded(Regression)
    optimizer, other = (torch.optim.SGD(one.parameters(), 0.1) for one in (module, plain))
    model = tt.training_model(module, optimizer)
    for number in range(3):
        model(*line(4))
        plain(*line(4))[1].backward()
        other.step()
        if number == 1:
            change(module, optimizer)
            change(plain, other)
            if copied:
                model.copy_weights_to_device()
        other.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
    assert "Weights were changed on the host" not in caplog.text


def test_weights_loaded_between_two_programs_are_trained():
    module, plain = seeded(Regression)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), 0.0))
    model(*line(4))
    model.anchor_tensor("g", "grad/linear.weight")  # the program is dropped
    wanted = {n: v * 2 for n, v in plain.state_dict().items()}
    model.load_state_dict(wanted)
    model(*line(4))
    assert torch.equal(module.linear.weight, wanted["linear.weight"])


# -- modes and hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_training_call_without_gradients_is_refused(trained, mode):
    before = trained[0].module.linear.weight.clone()
    with (
        mode(),
        pytest.raises(tr.TailraceError, match=r"nothing does.*tt.inference_model\(module\)"),
    ):
        trained[0](*line(4))
    assert torch.equal(trained[0].module.linear.weight, before)


def test_forward_hooks_registered_and_removed_between_calls():
    module, _ = seeded(Regression)
    model = tt.inference_model(module)
    plain = model(*line(4))[0]
    handle = module.linear.register_forward_hook(lambda module, given, out: out * 2)
    assert torch.equal(model(*line(4))[0], plain * 2)
    handle.remove()
    assert torch.equal(model(*line(4))[0], plain)


HOOKS = {
    "register_hook": lambda module: module.linear.weight.register_hook(lambda g: g * 0),
    "register_full_backward_hook": (
        lambda module: module.linear.register_full_backward_hook(lambda *given: None)
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_backward_hooks_registered_after_a_call_are_refused(name):
    module, plain = seeded(Regression)
    models = [tt.training_model(one) for one in (module, plain)]
    for model in models:
        model(*line(4))
    handle = HOOKS[name](module)
    with pytest.raises(tr.TailraceError, match=f"hook of {name}, which would never run"):
        models[0](*line(4))
    handle.remove()
    for model in models:
        model(*line(4))
    assert torch.equal(module.linear.weight, plain.linear.weight)


def test_retain_grad_in_forward_says_what_to_anchor():
    class Retaining(Regression):
        def forward(self, x, y):
            out = self.linear(x)
            out.retain_grad()
            return out, nn.functional.mse_loss(out, y)

    with pytest.raises(tr.TailraceError, match="retain_grad.*anchor it.*cotangent"):
        tt.training_model(Retaining())(*line(4))


LOST = "the change is lost. Read the parameter from the module before you write to it."


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
    kept = module.linear.weight
    model(*line(4))
    with torch.no_grad():
        kept.zero_()  # without asking the module, whose weights are newer on the device
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
