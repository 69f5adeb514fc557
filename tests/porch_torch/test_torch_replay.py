"""`model.replay`: a past step of a PyTorch model is the step that happened, or says where it is not."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from small_modules import seeded
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError, DataExhausted, OptionError, RunError

TAPS = [tr.Tap("reduced/*", reduce="tensor"), tr.Tap("loss", reduce="tensor")]

RARE = [dataclasses.replace(tap, mode=tr.every(7)) for tap in TAPS]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x, y):
        out = self.head(self.body(x))
        return out, nn.functional.mse_loss(out, y)


def made(**options):
    module, _ = seeded(Noisy)
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    options = {"device_iterations": 3, "seed": 5, "fingerprint": True, **options}
    return tt.training_model(module, adam, **options)


def calls(rows, count=6):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = torch.tensor(rng.normal(size=(rows, 3)).astype(np.float32))
        yield x, x.sum(dim=1, keepdim=True)


def train(model, folder, rows):
    """Train with a schedule; files after two and four calls."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.7)
    losses, records = [], []
    for number, call in enumerate(calls(rows)):
        if folder is not None and number in (2, 4):
            model.save(folder / f"{number}.npz")
        model(*call)
        losses.append(model.history.loss)
        records.append({key: np.array(r.values) for key, r in model.records.items()})
        schedule.step()
    return np.concatenate(losses), records


FORMS = {
    "plain": ({}, 12),
    "single": ({"device_iterations": 1}, 4),
    "replicas": ({"accumulation": 2, "replicas": 2}, 48),
}


@pytest.fixture(scope="module", params=FORMS)
def trained(request, tmp_path_factory):
    """A training with files, and the same with taps from the start: what a replay must see."""
    options, rows = FORMS[request.param]
    folder = tmp_path_factory.mktemp("replay")
    model, watched = made(**options), made(**options, observe=TAPS)
    losses, _ = train(model, folder, rows)
    _, records = train(watched, None, rows)
    (folder / "notes.txt").write_text("another file")
    return model, losses, records, folder, rows


def test_taps_see_what_they_would_have_seen(trained):
    model, losses, records, folder, rows = trained
    each = model.options.device_iterations
    before = [p.detach().clone() for p in model.module.parameters()]
    for step, taps in ((3 * each + each // 2, TAPS), (5 * each, RARE)):
        found = model.replay(step, calls(rows), observe=taps, checkpoint=folder)
        assert found.proved is True, str(found)
        for what in ("loss", "parameters", "optimizer", "gradients", "elements", "model_state"):
            assert what in found.evidence
        assert found.started_at == (2 if step < 4 * each else 4) * each
        assert found.loss == losses[step]
        seen = {key: v for key, v in records[step // each].items() if key[1] == "tensor"}
        assert set(found) == set(seen)
        for key, values in seen.items():
            share = len(values) // each  # a loss has a value for each microbatch
            inside = step % each
            assert set(found[key].steps) == {step}
            assert_bits_equal(found[key].values, values[inside * share : (inside + 1) * share])
    assert_bits_equal([p.detach() for p in model.module.parameters()], before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    train(made(), folder, 12)
    return folder


def test_another_process_finds_the_record_in_later_files(plain):
    model = made()
    model.compile(*next(calls(12)))
    found = model.replay(7, calls(12), checkpoint=plain)
    assert found.proved is True, str(found)
    model.load(plain / "4.npz")
    found = model.replay(7, calls(12), checkpoint=plain / "2.npz")
    assert found.proved is True, "a model that was loaded knows the past of the file"
    assert model.replay(13, calls(12), checkpoint=plain).proved is None


@pytest.mark.parametrize("cut", [100, -100])
def test_a_damaged_file_is_passed_over(plain, tmp_path, caplog, cut):
    """Cut in its note or in its arrays; the file before has all that is needed."""
    folder = shutil.copytree(plain, tmp_path / "kept")
    whole = (folder / "4.npz").read_bytes()
    (folder / "3.npz").write_bytes(whole[:cut])
    found = made().replay(7, calls(12), checkpoint=folder)
    assert found.proved is True, str(found)
    assert "3.npz" in caplog.text
    (folder / "4.npz").write_bytes(b"garbage")
    assert made().replay(13, calls(12), checkpoint=folder).started_at == 6
    assert "4.npz" in caplog.text


def test_recorded_fingerprints_are_compared_by_any_model(plain):
    found = made(fingerprint=False).replay(7, calls(12), checkpoint=plain)
    assert found.proved is True, str(found)
    assert "fingerprint of parameters" in found.evidence


def test_what_differs_is_not_taken_for_the_same(plain):
    other = [(x, y * 1.001) for x, y in calls(12)]
    found = made().replay(7, other, checkpoint=plain)
    assert found.proved is False
    assert (found.differences[0].step, found.differences[0].what) == (6, "loss")
    assert "NOT PROVED" in str(found)


def test_what_cannot_be_replayed(plain):
    model = made()
    for count, steps in ((3, 9), (5, 15)):
        with pytest.raises(DataExhausted, match=f"end before step 17: they make {steps} steps"):
            model.replay(17, calls(12, count=count), checkpoint=plain)
    with pytest.raises(CheckpointError, match="' starts with step 6. Save"):
        model.replay(5, calls(12), checkpoint=plain)
    with pytest.raises(CheckpointError, match="makes 4 steps, and .* was saved after 6"):
        made(device_iterations=4).replay(7, calls(12), checkpoint=plain)
    with pytest.raises(OptionError, match="calls is an iterable .* Received: function"):
        model.replay(7, calls, checkpoint=plain)
    module, _ = seeded(Noisy)
    other = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="saved with Adam, and this model has SGD"):
        other.replay(7, calls(12), checkpoint=plain)


def test_what_is_given_is_checked(tmp_path):
    model = made()
    with pytest.raises(CheckpointError, match="' contains no such file. Save"):
        model.replay(5, calls(12), checkpoint=tmp_path)
    with pytest.raises(OptionError, match=r"a file that model\.save\(path\) wrote"):
        model.replay(5, calls(12), checkpoint=None)
    with pytest.raises(OptionError, match="the number of a step that was trained"):
        model.replay(-1, calls(12), checkpoint=tmp_path)
    (tmp_path / "wrong").write_text("nothing")
    with pytest.raises(RunError, match="is not a model saved"):
        model.replay(5, calls(12), checkpoint=tmp_path / "wrong")
    with pytest.raises(OptionError, match="fingerprint is True or False"):
        made(fingerprint=1)
