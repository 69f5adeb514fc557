"""`checkpoint=` of a training model: a loop that is stopped and begun again ends with the same bits."""

import gc
import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_modules import Regression, line, seeded
from torch import nn
from torch.optim import lr_scheduler as schedules

import tailrace as tr
import tailrace.torch as tt
from tailrace.base.messages import forget_notes
from tailrace.torch.errors import UsageError

EPOCHS, ROWS = 2, 16


class Killed(Exception):
    """Stands for the end of a process."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x, y):
        x = nn.functional.dropout(self.norm(self.first(x)), 0.2)
        return nn.functional.mse_loss(self.last(x), y)


class Rows(torch.utils.data.Dataset):
    """Elements with random numbers in them."""

    def __init__(self, draw=lambda: np.random.normal()):
        self.x = torch.linspace(-1, 1, 3 * ROWS).reshape(ROWS, 3)
        self.draw = draw

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        x = self.x[number]
        return x + 0.1 * float(self.draw()), x.sum(dim=0, keepdim=True)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(ROWS):
            x = torch.full((3,), number / ROWS) + 0.1 * torch.randn(3)
            yield x, x.sum(dim=0, keepdim=True)


def of_tailrace(model, **options):
    return tt.DataLoader(model, Rows(), batch_size=2, shuffle=True, **options)


def of_torch(model, **options):
    return torch.utils.data.DataLoader(Rows(), 4, shuffle=True, **options)


LOADERS = {
    "plain": of_tailrace,
    "own generator": lambda m: of_tailrace(m, generator=torch.Generator().manual_seed(3)),
    "ahead": lambda m: tt.DataLoader(
        m, Rows(random.random), batch_size=2, shuffle=True, mode="async"
    ),
    "stream": lambda m: tt.DataLoader(m, Stream(), batch_size=2),
    "batch sampler": lambda m: tt.DataLoader(
        m,
        Rows(random.random),
        batch_sampler=torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(range(ROWS)), 2, True
        ),
    ),
    "of PyTorch": of_torch,
    "a list": lambda m: [line(4, seed=n) for n in range(4)],
}
WORKERS = {
    "workers": lambda m: of_tailrace(m, num_workers=2, persistent_workers=False),
    "workers that stay": lambda m: tt.DataLoader(
        m, Rows(lambda: 0), batch_size=2, shuffle=True, num_workers=1
    ),
}


def in_step(optimizer, model):
    return [schedules.StepLR(optimizer, 3, 0.5)], True


def in_epoch(optimizer, model):
    return [schedules.CosineAnnealingLR(optimizer, 5)], False


def by_metric(optimizer, model):
    return [schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)], False


def train(
    directory,
    make="plain",
    killed_after=None,
    host=None,
    epochs=EPOCHS,
    given=None,
    every=3,
    length=2,
    **options,
):
    """A script: its weights, rates and random numbers at the end; `Killed` after some calls."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    stepped, each_step = host(optimizer, None) if host else ([], False)
    checkpoint = None if directory is None else tr.Checkpoint(directory, every=every)
    model = tt.training_model(
        module,
        optimizer,
        scheduler=given(optimizer) if given else None,
        device_iterations=length,
        checkpoint=checkpoint,
        **options,
    )
    loader, calls = {**LOADERS, **WORKERS}[make](model), 0
    start = model.resume() if directory else None
    drawn = 0.0
    try:
        for _ in range(start.epoch if start else 0, epochs):
            for x, y in model.batches(loader):
                x = x + 0.01 * torch.randn_like(x)
                loss = model(x, y)
                calls += 1
                if calls == killed_after:
                    raise Killed
                drawn = np.random.normal()  # after the call, too
                for one in stepped if each_step else ():
                    one.step()
            for one in () if each_step else stepped:
                one.step(*([float(loss)] if isinstance(one, schedules.ReduceLROnPlateau) else []))
    finally:
        model.destroy()
    assert all(value.isfinite().all() for value in module.state_dict().values())
    state = {name: value.numpy().tobytes() for name, value in module.state_dict().items()}
    momentum = [v["momentum_buffer"].numpy().tobytes() for v in optimizer.state.values()]
    rates = [group["lr"] for group in optimizer.param_groups]
    return state, momentum, rates, drawn, float(torch.rand(())), np.random.normal(), random.random()


def check(directory, **options):
    """Killed twice and begun again, it ends as one that was never killed."""
    plain = train(None, **options)
    assert np.isfinite(plain[3])
    for calls in (4, 4):
        with pytest.raises(Killed):
            train(directory, killed_after=calls, **options)
    assert train(directory, **options) == plain


@pytest.mark.parametrize("make", list(LOADERS))
def test_a_loop_goes_on_in_its_data(make, tmp_path):
    check(tmp_path / "ck", make=make)


@pytest.mark.filterwarnings("ignore:os.fork", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", list(WORKERS))
def test_a_loop_goes_on_with_workers(make, tmp_path):
    check(tmp_path / "ck", make=make)


@pytest.mark.parametrize("host", [in_step, in_epoch, by_metric], ids=lambda f: f.__name__)
def test_schedulers_of_the_loop_go_on(host, tmp_path):
    check(tmp_path / "ck", host=host, epochs=3)


def test_a_schedule_of_the_model_goes_on(tmp_path):
    check(tmp_path / "ck", given=lambda o: schedules.OneCycleLR(o, 0.02, total_steps=60))


def test_periods(tmp_path):
    check(tmp_path / "ck", every="0.000001s")


def test_an_epoch_of_one_call(tmp_path):
    """Saved when the next epoch has begun."""
    LOADERS["whole"] = lambda m: tt.DataLoader(m, Rows(), batch_size=ROWS // 2, shuffle=True)
    check(tmp_path / "ck", make="whole", epochs=6, host=by_metric)


def test_a_finished_loop_and_a_longer_one(tmp_path):
    """A finished script trains what came after its newest checkpoint again; more epochs go on."""
    first = train(tmp_path / "ck", every=6, epochs=2, host=in_epoch)
    names = sorted(path.name for path in (tmp_path / "ck" / "fit-0").iterdir())
    assert names == ["step-0", "step-12", "step-6"]
    assert train(tmp_path / "ck", every=6, epochs=2, host=in_epoch) == first
    longer = train(tmp_path / "ck", every=6, epochs=3, host=in_epoch)
    assert longer == train(None, epochs=3, host=in_epoch)


def made(directory, seed=0, kind=torch.optim.SGD, hidden=3, **options):
    module = seeded(lambda: Regression(hidden), seed)[0]
    optimizer = kind(module.parameters(), lr=0.1)
    checkpoint = tr.Checkpoint(directory, every=1)
    return tt.training_model(module, optimizer, checkpoint=checkpoint, **options), module, optimizer


def test_a_loop_by_steps(tmp_path):
    """Without a loader, steps say where the loop goes on."""

    def steps(directory, stop=None):
        model, module, optimizer = made(directory)
        scheduler = schedules.StepLR(optimizer, 2, 0.5)
        start = model.resume()
        for step in range(start.step, 9):
            x, y = line(4, seed=step)
            model(x + torch.randn_like(x), y)
            scheduler.step()
            if step == stop:
                model.destroy()
                raise Killed
        model.destroy()
        return module.linear.weight.detach().numpy().tobytes(), scheduler.get_last_lr()

    plain = steps(tmp_path / "plain")
    for stop in (3, 6):
        with pytest.raises(Killed):
            steps(tmp_path / "ck", stop)
    assert steps(tmp_path / "ck") == plain
    model, _, optimizer = made(tmp_path / "ck")
    kept = schedules.StepLR(optimizer, 2, 0.5)
    start = model.resume()
    assert (start.step, start.restored, kept.last_epoch) == (8, True, 8)
    with pytest.raises(
        tr.errors.CheckpointError, match="has no epoch: the model followed no loader"
    ):
        _ = start.epoch
    model.destroy()


def test_objects_of_the_loop(tmp_path):
    """Whatever has a state is saved, if it is given."""

    class Counter:
        def __init__(self):
            self.seen = {"calls": 0, 3: torch.zeros(100, dtype=torch.bfloat16), "last": None}

        def state_dict(self):
            return self.seen

        def load_state_dict(self, state):
            self.seen = dict(state)

    model, counter = made(tmp_path / "ck")[0], Counter()
    model.resume(counter)
    for batch in model.batches([line(4)] * 3):
        model(*batch)
        counter.seen["calls"] += 1
        counter.seen[3] = counter.seen[3] + 1.5
        counter.seen["last"] = (1, "two")
    model.destroy()
    model, counter = made(tmp_path / "ck")[0], Counter()
    assert model.resume(counter).step == 2
    assert counter.seen["calls"] == 2
    assert counter.seen["last"] == (1, "two")
    assert torch.equal(counter.seen[3], torch.full((100,), 3.0, dtype=torch.bfloat16))
    model.destroy()
    with pytest.raises(tr.errors.CheckpointError, match=r"objects: \['Counter'\] there, \[\] here"):
        made(tmp_path / "ck")[0].resume()


def trained(directory, **options):
    model = made(directory, **options)[0]
    model.resume()
    for batch in model.batches([line(4, seed=n) for n in range(3)]):
        model(*batch)
    model.destroy()


def test_a_directory_of_another_training_is_refused(tmp_path):
    trained(tmp_path / "ck")
    error = tr.errors.CheckpointError
    with pytest.raises(error, match="belongs to another training: seed: 0 there, 7 here"):
        made(tmp_path / "ck", seed=7)[0].resume()
    with pytest.raises(error, match="optimizer: 'SGD' there, 'Adam' here"):
        made(tmp_path / "ck", kind=torch.optim.Adam)[0].resume()
    with pytest.raises(error, match=r"another training: .*'linear.weight' is \[1, 5\] here"):
        made(tmp_path / "ck", hidden=5)[0].resume()
    with pytest.raises(error, match="microbatches of a step: 1 there, 2 here"):
        made(tmp_path / "ck", accumulation=2)[0].resume()
    with pytest.raises(error, match="max_grad_norm=: None there, 1.0 here"):
        made(tmp_path / "ck", max_grad_norm=1.0)[0].resume()
    model, _, optimizer = made(tmp_path / "ck")
    with pytest.raises(error, match=r"call model.resume\(\) before the first call"):
        model(*line(4))
    model.destroy()
    schedule = schedules.StepLR(optimizer, 2)
    model = tt.training_model(
        model.module, optimizer, scheduler=schedule, checkpoint=tmp_path / "ck"
    )
    with pytest.raises(error, match=r"scheduler=: \[\] there, \['StepLR'\] here"):
        model.resume()
    other = made(tmp_path / "ck")[0]
    assert other.resume().step == 2
    first = next(other.batches([line(4, seed=n) for n in range(5)]))
    with pytest.raises(error, match="comes from another one"):
        other(*first)
    with pytest.raises(error, match="is in use"):
        made(tmp_path / "ck")[0].resume()
    other.destroy()


def test_a_directory_of_a_fit_is_refused(tmp_path):
    optax = pytest.importorskip("optax")
    trainer = tr.Trainer(lambda p, x: (p * x).sum(), optax.sgd(0.1), np.float32(1))
    data = [np.float32(1)] * 2
    trainer.fit(data, epochs=1, checkpoint=tmp_path / "ck", progress=False)
    with pytest.raises(tr.errors.CheckpointError, match="was not saved by a PyTorch model"):
        made(tmp_path / "ck")[0].resume()
    trained(tmp_path / "other")
    trainer = tr.Trainer(lambda p, x: (p * x).sum(), optax.sgd(0.1), np.float32(1))
    with pytest.raises(tr.errors.CheckpointError, match="was saved by a PyTorch model"):
        trainer.fit(data, epochs=1, checkpoint=tmp_path / "other", progress=False)


def test_only_proved_damage_sets_a_checkpoint_aside(tmp_path, caplog):
    trained(tmp_path / "ck")
    newest = tmp_path / "ck" / "fit-0" / "step-2"
    large = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    large.write_bytes(large.read_bytes()[:-3])
    model = made(tmp_path / "ck")[0]
    assert model.resume().step == 1
    assert any("was renamed" in line for line in caplog.messages)
    assert [p.name for p in newest.parent.glob("*.damaged")] == ["step-2.damaged"]
    model.destroy()


def test_other_numbers_of_the_optimizer_are_said(tmp_path, caplog):
    trained(tmp_path / "ck")
    forget_notes()
    model, _, optimizer = made(tmp_path / "ck", kind=lambda p, lr: torch.optim.SGD(p, lr=0.7))
    model.resume()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert any("was trained with lr=0.1" in line and "lr=0.7" in line for line in caplog.messages)
    model.destroy()


def test_a_run_directory_is_cut_back(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path / "ck", killed_after=6, every=4, run_dir=tmp_path / "run")
    assert len(tr.open_run(tmp_path / "run").history.loss) == 12
    train(tmp_path / "ck", every=4, run_dir=tmp_path / "run")
    found = tr.open_run(tmp_path / "run")
    assert list(found.history.steps) == list(range(2 * 4 * EPOCHS))
    assert found.info["checkpoint"] == str(tmp_path / "ck")
    train(None, run_dir=tmp_path / "plain")
    assert np.array_equal(found.history.loss, tr.open_run(tmp_path / "plain").history.loss)


def test_how_a_loop_is_refused(tmp_path):
    with pytest.raises(UsageError, match="this model keeps none"):
        tt.training_model(Regression()).resume()
    with pytest.raises(tr.errors.OptionError, match="best= of tr.Checkpoint is for fits"):
        tt.training_model(Regression(), checkpoint=tr.Checkpoint(tmp_path, best="loss"))
    model = made(tmp_path / "ck")[0]
    with pytest.raises(tr.errors.OptionError, match="Received: a float"):
        model.resume(0.1)
    pairs = zip(model.batches([line(4)] * 3), model.batches([line(8)] * 3), strict=True)
    first = next(pairs)[0]
    with pytest.raises(tr.errors.CheckpointError, match="batches of 2 at once"):
        model(*first)
    model.destroy()
    model = made(tmp_path / "other")[0]
    first, *_ = model.batches([line(4)] * 3)
    with pytest.raises(tr.errors.CheckpointError, match="a call after 3 batches"):
        model(*first)
    model.destroy()
    model = made(tmp_path / "third")[0]
    model(*line(4))
    with pytest.raises(UsageError, match="before the first call of a model"):
        model.resume()
    model.destroy()


def test_another_loader_in_between(tmp_path):
    """A validation, with a loader of the same kind, is no pass of the training."""

    def loop(directory, stop=None):
        model, module, _ = made(directory)
        data = [line(4, seed=n) for n in range(3)]
        start, calls = model.resume(), 0
        for _ in range(start.epoch, 3):
            for batch in model.batches(data):
                model(*batch)
                calls += 1
                for _ in model.batches(data[:2]):
                    pass
                if calls == stop:
                    model.destroy()
                    raise Killed
        model.destroy()
        return module.linear.weight.detach().numpy().tobytes()

    plain = loop(tmp_path / "plain")
    with pytest.raises(Killed):
        loop(tmp_path / "ck", 4)
    assert loop(tmp_path / "ck") == plain


def test_a_saved_file_has_the_schedule(tmp_path):
    def model_of():
        module = seeded(Regression)[0]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = schedules.OneCycleLR(optimizer, 0.2, total_steps=40)
        model = tt.training_model(module, optimizer, scheduler=schedule, device_iterations=4)
        return model, module, schedule

    model, module, schedule = model_of()
    batches = [line(16, seed=n) for n in range(4)]
    for batch in batches[:2]:
        model(*batch)
    model.save(tmp_path / "model.npz")
    other, again, scheduled = model_of()
    other.load(tmp_path / "model.npz")
    assert scheduled.last_epoch == 8
    for batch in batches[2:]:
        model(*batch)
        other(*batch)
    assert torch.equal(module.linear.weight, again.linear.weight)
    assert schedule.state_dict() == scheduled.state_dict()


def test_a_replay_has_the_rates_of_the_schedule(tmp_path):
    module = seeded(Regression)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = schedules.OneCycleLR(optimizer, 0.2, total_steps=40)
    model = tt.training_model(
        module, optimizer, scheduler=schedule, device_iterations=4, fingerprint=True
    )
    batches = [line(16, seed=n) for n in range(4)]
    for number, batch in enumerate(batches):
        if number == 1:
            model.save(tmp_path / "model.npz")
        model(*batch)
    assert model.replay(10, batches, checkpoint=tmp_path / "model.npz").proved


def test_a_replay_starts_from_a_checkpoint(tmp_path):
    """Also one after a resume: the checkpoint has what was recorded of all calls."""
    batches, found = [line(4, seed=n) for n in range(6)], []
    for _ in range(2):
        module = seeded(Regression)[0]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model = tt.training_model(
            module,
            optimizer,
            scheduler=schedules.ExponentialLR(optimizer, 0.8),
            checkpoint=tr.Checkpoint(tmp_path / "ck", every=2, keep=9),
            fingerprint=True,
        )
        found.append(model.resume().step)
        for batch in model.batches(batches):
            model(*batch)
        assert model.replay(3, batches, checkpoint=tmp_path / "ck").proved
        model.destroy()
    assert found == [0, 4]


def test_a_model_that_is_garbage_gives_its_directory_back(tmp_path):
    def begun():
        model, _, optimizer = made(tmp_path / "ck")
        scheduler = schedules.ExponentialLR(optimizer, 0.9)
        rows = torch.utils.data.TensorDataset(*line(8))
        start = model.resume()
        for batch in tt.DataLoader(model, rows, batch_size=4):
            model(*batch)
            scheduler.step()
        return start.step

    assert begun() == 0
    gc.collect()
    assert begun() == 1


SCRIPT = str(pathlib.Path(__file__).with_name("resumed_script.py"))
CALLS = 60


def script(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started(process):
    """Where the script goes on, once it says so."""
    line = process.stdout.readline().split()
    assert line[:1] == ["start"], process.communicate()[1]
    return int(line[1]), int(line[2])


def finished(*arguments):
    """Run the script to its end; where it went on, and what it has then."""
    process = script(*arguments)
    start = started(process)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    with np.load(arguments[1]) as file:
        return start, dict(file)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_and_started_again(kills, tmp_path):
    _, plain = finished("", tmp_path / "plain.npz")
    moments = random.Random(kills)
    directory, run = tmp_path / "checkpoints", tmp_path / "run"
    begun = []
    for _ in range(kills):
        process = script(directory, tmp_path / "out.npz", run)
        begun.append(started(process))
        left = CALLS - begun[-1][1] // 2
        # Few calls, so that it does not end; zero is a moment, too.
        for _ in range(moments.randrange(min(left, 2 * CALLS // kills + 3))):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    start, resumed = finished(directory, tmp_path / "out.npz", run)
    assert start[1] > 0, begun
    resumed.pop("loss"), plain.pop("loss")
    assert resumed.keys() == plain.keys()
    for name, value in plain.items():
        assert value.tobytes() == resumed[name].tobytes(), name
    found = tr.open_run(run)
    assert found.state == "ended"
    assert list(found.history.steps) == list(range(2 * CALLS))
    # Started once more, it trains the steps since its newest checkpoint again.
    start, again = finished(directory, tmp_path / "out.npz", run)
    assert start[0] == 3
    assert 2 * CALLS - 4 <= start[1] < 2 * CALLS
    again.pop("loss")
    assert all(again[name].tobytes() == value.tobytes() for name, value in plain.items())
