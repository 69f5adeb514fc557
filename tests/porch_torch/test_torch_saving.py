"""A saved model goes on as if it had never stopped; its file holds arrays only."""

import zipfile

import jax
import numpy as np
import pytest
import torch
from small_modules import Regression, digits, line, seeded, training
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal
from tailrace.base.messages import forget_notes


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x, y):
        out = self.head(self.body(x))
        return out, nn.functional.mse_loss(out, y)


def plain():
    module, _ = seeded(lambda: Regression(dtype=torch.bfloat16))
    sgd = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    return tt.training_model(module, sgd, device_iterations=2), module


def noisy():
    module, _ = seeded(Noisy)
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    return tt.training_model(module, adam, device_iterations=2, seed=5), module


@pytest.mark.parametrize(("dtype", "make"), [(torch.float32, noisy), (torch.bfloat16, plain)])
def test_training_goes_on_from_a_file(tmp_path, dtype, make):
    batches = [[t.to(dtype) for t in line(16, seed=n)] for n in range(4)]
    model, module = make()
    for batch in batches[:2]:
        model(*batch)
    model.save(tmp_path / "deep" / "model.npz")
    for batch in batches[2:]:
        model(*batch)

    other, again = make()
    other.load(tmp_path / "deep" / "model.npz")
    for batch in batches[2:]:
        other(*batch)
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert other.history.first_step == 6
    with zipfile.ZipFile(tmp_path / "deep" / "model.npz") as archive:
        assert any(name.endswith("weight.npy") for name in archive.namelist())


def test_loaded_weights_can_be_read_at_once(tmp_path):
    model, module, _ = training()
    model(*digits(4))
    model.save(tmp_path / "m.npz")
    other, again, _ = training()
    other.load(tmp_path / "m.npz")
    assert_bits_equal(again.fc1.weight.detach().numpy(), module.fc1.weight.detach().numpy())


def test_inference_models_too(tmp_path):
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    tt.inference_model(module).save(tmp_path / "m.npz")
    model = tt.inference_model(other)
    x = line(4)[0]
    model(x)
    model.load(tmp_path / "m.npz")
    assert_bits_equal(other.weight.detach().numpy(), module.weight.detach().numpy())
    assert torch.allclose(model(x), module(x))


def test_what_does_not_fit_is_refused(tmp_path):
    model, *_ = training()
    with pytest.raises(tr.TailraceError, match="Model has not been compiled"):
        model.save(tmp_path / "m.npz")
    model(*digits(4))
    model.save(tmp_path / "m.npz")
    other = tt.training_model(Regression())
    with pytest.raises(tr.TailraceError, match="fits a module with the same parameters. Missing"):
        other.load(tmp_path / "m.npz")
    np.savez(tmp_path / "odd.npz", a=np.zeros(3))
    with pytest.raises(tr.TailraceError, match="is not a model saved by model.save"):
        other.load(tmp_path / "odd.npz")
    with pytest.raises(tr.TailraceError, match="Received a directory"):
        model.save(tmp_path)
    with pytest.raises(tr.errors.RunError, match=r"cannot be written: .* is a file: give another"):
        model.save(tmp_path / "odd.npz" / "m.npz")
    with pytest.raises(
        tr.errors.RunError, match=r"none.npz' cannot be read: No such .* that exists"
    ):
        other.load(tmp_path / "none.npz")
    wrong, *_ = training(optimizer=lambda m: torch.optim.Adam(m.parameters()))
    with pytest.raises(tr.TailraceError, match="same optimizer \\(SGD saved\\)"):
        wrong.load(tmp_path / "m.npz")


def test_the_optimizer_s_state_dict_is_up_to_date():
    model, *_ = training(optimizer=lambda m: torch.optim.Adam(m.parameters()))
    for _ in range(3):
        model(*digits(4))
    state = model.optimizer.state_dict()["state"]
    assert state[0]["step"] == 3
    assert state[0]["exp_avg"].abs().sum() > 0


def test_a_state_dict_says_what_it_lacks(tmp_path, caplog):
    """With dropout, training does not go on as if it had not stopped: `save` and `load` do that."""
    model, _ = noisy()
    batch = line(16)
    model(*batch)
    kept, state = model.state_dict(), model.optimizer.state_dict()
    model.save(tmp_path / "m.npz")
    forget_notes()
    other, _ = noisy()
    other.load_state_dict(kept)
    assert "no step count and no seed: dropout ('body.2') draws other masks" in caplog.text
    caplog.clear()
    forget_notes()
    again, _ = seeded(Noisy)
    adam = torch.optim.Adam(again.parameters(), lr=0.01)
    adam.load_state_dict(state)
    tt.training_model(again, adam)
    assert "draws other masks" in caplog.text
    caplog.clear()
    forget_notes()
    noisy()[0].load(tmp_path / "m.npz")
    plain, _, _ = training()
    plain(*digits(4))
    plain.load_state_dict(plain.state_dict())
    assert "masks" not in caplog.text, "nothing is lacking, or nothing is random"


def test_replicas_and_accumulation_go_on_from_a_file(tmp_path):
    def make():
        module, _ = seeded(Noisy)
        adam = tt.optim.AdamW(module.parameters(), lr=0.01, loss_scaling=8.0)
        options = {"device_iterations": 2, "accumulation": 2, "replicas": 2}
        return tt.training_model(module, adam, seed=5, **options), module

    batches = [line(64, seed=n) for n in range(3)]
    model, module = make()
    model(*batches[0])
    model.save(tmp_path / "m.npz")
    found, again = make()
    found.load(tmp_path / "m.npz")
    for batch in batches[1:]:
        model(*batch)
        found(*batch)
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    ours, theirs = found.optimizer.state_dict()["state"], model.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[n]["exp_avg"], theirs[n]["exp_avg"]) for n in theirs)


def test_inside_of_a_mesh_of_jax(tmp_path):
    """Another part of the program may have called `jax.set_mesh`; the model is where it was."""
    batches = [line(16, seed=n) for n in range(4)]
    model, module = noisy()
    for batch in batches:
        model(*batch)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        first, _ = noisy()
        for batch in batches[:2]:
            first(*batch)
        first.save(tmp_path / "m.npz")
        other, again = noisy()
        other.load(tmp_path / "m.npz")
        other.copy_weights_to_host()
        other.copy_weights_to_device()
        other(*batches[2])
        other.train(False)
        other.train(True)
        other(*batches[3])
        for name, value in module.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
        tt.inference_model(again)(*batches[0])
        assert jax.sharding.get_mesh() == mesh


def test_a_file_without_a_schedule_says_so(tmp_path, caplog):
    model, _ = noisy()
    model(*line(16))
    model.save(tmp_path / "m.npz")
    module, _ = seeded(Noisy)
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(adam, 2)
    forget_notes()
    tt.training_model(module, adam, scheduler=rates, device_iterations=2, seed=5).load(
        tmp_path / "m.npz"
    )
    assert "go on from where they are, and not from step 2" in caplog.text
    assert rates.last_epoch == 0
