"""Audit and bisect: which elements were consumed, and where two runs part."""

import contextlib

import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import mlp, mlp_loss, regression
from tailrace.cli.command_line import main
from tailrace.errors import OptionError, RunError
from tailrace.feeds.reader import Reader
from tailrace.runs.audit import audit
from tailrace.runs.bisect import bisect

X, Y = (np.concatenate(leaf) for leaf in zip(*regression(24), strict=True))


class Stop(tr.Callback):
    """Ends a process: nothing is saved."""

    def __init__(self, at):
        self.at = at

    def on_execution_end(self, trainer, execution):
        if trainer.step >= self.at:
            raise OSError("the machine goes away")


def data(x=X):
    return tr.batches((x, Y), 4, shuffle=True, seed=3)


def train(folder, kills=(), dataset=None, steps=None, **options):
    """A script that is killed now and then, and started again."""
    kept = tr.Checkpoint(folder / "kept", every=4)
    options = {"steps_per_execution": 2, "fingerprint": True, **options}
    for at in (*kills, None):
        trainer = tr.Trainer(
            lambda p, x, y: mlp_loss(p, x * 1.0, y)[0],
            optax.sgd(0.05, momentum=0.5),
            mlp(),
            run_dir=folder / "run",
            **options,
        )
        given = data() if dataset is None else dataset()
        callbacks = [] if at is None else [Stop(at)]
        try:
            epochs = 3 if steps is None else None
            trainer.fit(given, steps, epochs, checkpoint=kept, callbacks=callbacks)
        except OSError:
            continue
    return tr.open_run(folder / "run")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    return train(folder, kills=(5, 14, 30, 31, 66)), folder


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_in_one_order_are_noted(tmp_path, shuffle):
    """A loader that forgets to shuffle: nothing is lost, but every epoch is the same."""

    def loader():
        for epoch in (1, 1, 1) if not shuffle else (1, 2, 3):
            yield [
                (X[rows], Y[rows])
                for rows in np.random.default_rng(epoch).permutation(96).reshape(-1, 4)
            ]

    passes = loader()
    run = train(tmp_path, dataset=lambda: lambda: next(passes))
    found = audit(run)
    assert found.is_clean
    assert (
        "every epoch of the fit of step 0 consumed the same elements in the same order"
        in str(found)
    ) == (not shuffle)


def test_kills_leave_it_clean(killed):
    run, _ = killed
    found = audit(run, data())
    assert found.is_clean, str(found)
    assert (found.elements, found.compared, found.resumes) == (
        72,
        72,
        4,
    )  # two went on from one checkpoint
    assert found.passes == [(0, 0, 0, 24), (0, 1, 0, 24), (0, 2, 0, 24)]
    assert str(found).endswith("every element was consumed once, in order")
    alone = str(audit(run))
    assert "every element that the dataset delivered was consumed once, in order" in alone
    assert "not compared with the dataset: elements are those that it delivered" in alone
    assert "whether it skipped or changed some itself is not seen" in alone


def test_a_resume_with_another_split_of_a_step(tmp_path):
    # Two replicas, then two microbatches: rows of the run keep the split that it began with.
    for number, options in enumerate(({"replicas": 2}, {"accumulation": 2})):
        trainer = tr.Trainer(
            lambda p, x, y: mlp_loss(p, x, y)[0],
            optax.sgd(0.05),
            mlp(),
            steps_per_execution=2,
            fingerprint=True,
            run_dir=tmp_path / "run",
            **options,
        )
        kept = tr.Checkpoint(tmp_path / "kept", every=2)
        with contextlib.suppress(OSError):
            trainer.fit(data(), 6, checkpoint=kept, callbacks=[] if number else [Stop(4)])
    run = tr.open_run(tmp_path / "run")
    assert run.history.each("loss").shape == (6, 1, 2)
    losses = trainer.history.each("loss")
    np.testing.assert_array_equal(run.history.each("loss").reshape(losses.shape), losses)
    found = audit(run, data())
    assert (found.is_clean, found.resumes, found.compared) == (True, 1, 12), str(found)


def test_the_command_says_it_with_its_exit_code(killed, capsys):
    _, folder = killed
    assert main(["audit", str(folder / "run")]) == 0
    assert "72 elements in 3 passes over the data; 4 resumes" in capsys.readouterr().out


@pytest.mark.parametrize(("shift", "word"), [(1, "were not consumed"), (-1, "consumed again")])
def test_a_planted_off_by_one_is_found(tmp_path, monkeypatch, capsys, shift, word):
    go_to = Reader.go_to
    planted = lambda self, state: go_to(self, {**state, "elements": state["elements"] + shift})  # noqa: E731
    monkeypatch.setattr(Reader, "go_to", planted)
    run = train(tmp_path, kills=(7,), steps=12)
    found = audit(run)
    assert not found.is_clean
    assert word in str(found)
    assert "where a process resumed" in str(found)
    assert main(["audit", str(tmp_path / "run")]) == 1
    assert word in capsys.readouterr().out


class Shifted:
    """A dataset whose own position is wrong by one after it went on: only contents show it."""

    def __init__(self, shift):
        self.elements, self.at, self.shift = regression(24), 0, shift

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at >= len(self.elements):
            raise StopIteration
        self.at += 1
        return self.elements[self.at - 1]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"] + self.shift


def test_a_dataset_that_goes_on_elsewhere_is_found_by_contents(tmp_path):
    clean = audit(train(tmp_path / "clean", kills=(7,), steps=12, dataset=lambda: Shifted(0)))
    assert clean.is_clean
    assert clean.resumes == 1
    back = audit(train(tmp_path / "back", kills=(7,), steps=12, dataset=lambda: Shifted(-1)))
    assert "consumed the content that step 3 had consumed" in str(back)
    run = train(tmp_path / "on", kills=(7,), steps=12, dataset=lambda: Shifted(1))
    assert audit(run).is_clean, "a gap in contents shows only beside the dataset"
    found = audit(run, Shifted(0))
    # One finding, not one for each element; what is read beyond the dataset's last is another.
    assert found.findings[0] == (
        "epoch 0, steps 4 to 10: elements 4 to 10 have other contents than in the dataset; they are "
        "those of elements 5 to 11"
    )
    assert found.findings[1:] == [
        "epoch 0, step 11: element 11 has another content than in the dataset; the dataset has no "
        "such element"
    ]


def test_fits_with_different_datasets(tmp_path, capsys, monkeypatch):
    trainer = tr.Trainer(
        mlp_loss, optax.sgd(0.05), mlp(), run_dir=tmp_path / "run", fingerprint=True
    )
    trainer.fit(data(), steps=3)
    trainer.fit(data(X + 1), steps=4)
    run = tr.open_run(tmp_path / "run")
    found = audit(run, data())
    assert found.findings == [
        "epoch 1, steps 3 to 6: elements 0 to 3 have other contents than in the dataset; the dataset "
        "has no such elements"
    ]
    for fit, dataset, count in ((0, data(), 3), (3, data(X + 1), 4)):
        found = audit(run, dataset, fit)
        assert found.is_clean, str(found)
        assert found.compared == count
    with pytest.raises(OptionError, match=r"one of \[0, 3\]. Received: fit=1"):
        audit(run, data(), 1)
    (tmp_path / "audit_fits.py").write_text(
        "import test_audit as t\ndef make():\n    return t.remade(), t.data()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "run", "audit_fits.py:make"]) == 1
    assert main(["audit", "run", "audit_fits.py:make", "--fit", "0"]) == 0
    assert main(["audit", "run", "--fit", "0"]) == 2
    assert "says which fit a dataset is compared with" in capsys.readouterr().err


def test_a_run_without_an_execution_is_clean(tmp_path, capsys):
    class Die(tr.Callback):
        def on_fit_begin(self, trainer):
            raise OSError("the machine goes away")

    trainer = tr.Trainer(mlp_loss, optax.sgd(0.05), mlp(), run_dir=tmp_path / "run")
    with pytest.raises(OSError, match="goes away"):
        trainer.fit(data(), steps=2, callbacks=[Die()])
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "0 elements" in capsys.readouterr().out


def test_several_fits(tmp_path):
    trainer = tr.Trainer(
        mlp_loss, optax.sgd(0.05), mlp(), run_dir=tmp_path / "run", steps_per_execution=5
    )
    trainer.fit(data(), steps=7)
    trainer.fit(iter(regression(9)), steps=6)
    trainer.fit(data(), epochs=2)
    found = audit(tr.open_run(tmp_path / "run"))
    assert found.is_clean, str(found)
    assert len(found.passes) == 4
    with pytest.raises(RunError, match="the run needs digests of elements"):
        audit(tr.open_run(tmp_path / "run"), data())


def test_bisect_of_equal_runs(killed, tmp_path):
    run, folder = killed
    other = train(tmp_path)
    found = bisect(run, other)
    assert not found, str(found)
    assert "no difference in 36 executions and 72 steps" in str(found)
    assert main(["bisect", str(folder / "run"), str(tmp_path / "run")]) == 0


def short(folder, params=None, fingerprint=True, steps_per_execution=2):
    trainer = tr.Trainer(
        mlp_loss,
        optax.sgd(0.05),
        params or mlp(),
        run_dir=folder,
        fingerprint=fingerprint,
        steps_per_execution=steps_per_execution,
    )
    trainer.fit(data(), steps=4)
    return tr.open_run(folder)


def test_bisect_claims_no_more_than_was_compared(tmp_path):
    run, bare = short(tmp_path / "run"), short(tmp_path / "bare", fingerprint=False)
    assert str(bisect(run, bare)) == (
        "no difference in the losses of 4 steps that both have\n"
        "states were not compared: only one of the runs has fingerprints "
        "(tr.Trainer(..., fingerprint=True))"
    )
    assert "neither run has fingerprints" in str(bisect(bare, bare))
    # Other parameters from the start: nothing says that the states before step 0 are equal.
    params = mlp()
    params["out"] = params["out"] + np.float32(1e-3)
    found = str(bisect(run, short(tmp_path / "other", params)))
    assert "; no earlier states were compared" in found
    assert "equal before" not in found


def test_bisect_replays_both_runs_or_none(capsys):
    for options in (["--first", "train.py:make"], ["--second-checkpoint", "kept"]):
        assert main(["bisect", "one", "other", *options]) == 2
        assert "Give --first and --second, or neither" in capsys.readouterr().err


def test_bisect_names_step_and_tensor(killed, tmp_path, capsys, monkeypatch):
    _, folder = killed
    changed = np.array(X)
    row = data().rows(9, 1)[0, 2]
    changed[row, 1] += 0.01
    train(tmp_path, dataset=lambda: data(changed))
    (tmp_path / "bisect_first.py").write_text(
        "import test_audit as t\ndef make():\n    return t.remade(), t.data()\n"
        "def other():\n    import numpy as np\n    x = np.array(t.X)\n"
        f"    x[{row}, 1] += 0.01\n    return t.remade(), t.data(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    script = str(tmp_path / "bisect_first.py")
    targets = ["--first", f"{script}:make", "--second", f"{script}:other"]
    code = main(["bisect", str(folder / "run"), str(tmp_path / "run"), *targets])
    said = capsys.readouterr().out
    assert code == 1
    assert "the first execution that differs ends with step 9: elements, loss, gradients" in said
    assert "states are equal before step 8" in said
    assert "the first step with other elements is 9" in said
    assert "the first tensor that differs: 'input/0' in step 9" in said
    assert "NOT PROVED" not in said
    # The wrong function for a run: what is replayed is not what ran, and is not reported as if it were.
    wrong = ["--first", f"{script}:make", "--second", f"{script}:make"]
    assert main(["bisect", str(folder / "run"), str(tmp_path / "run"), *wrong]) == 1
    said = capsys.readouterr().out
    assert "no tensor that both have differs" in said
    assert "the replay of the second run is NOT PROVED: step 9: loss" in said
    assert "the first run is NOT PROVED" not in said
    assert "give the functions that made these runs" in said
    # A run of another machine: its checkpoints are elsewhere here.
    (tmp_path / "kept").rename(tmp_path / "moved")
    command = ["bisect", str(folder / "run"), str(tmp_path / "run"), *targets]
    assert main(command) == 2
    assert "is not a directory here. Give --second-checkpoint DIR" in capsys.readouterr().err
    assert main([*command, "--second-checkpoint", str(tmp_path / "moved")]) == 1
    assert "the first tensor that differs: 'input/0' in step 9" in capsys.readouterr().out


def remade():
    return tr.Trainer(
        lambda p, x, y: mlp_loss(p, x * 1.0, y)[0],
        optax.sgd(0.05, momentum=0.5),
        mlp(),
        fingerprint=True,
    )


def test_replay_from_a_shell(killed, capsys, tmp_path):
    _, folder = killed
    script = tmp_path / "replayed_script.py"
    script.write_text(
        "import test_audit as t\ndef make():\n    return t.remade(), t.data()\n"
        "def wrong():\n    return t.remade()\n"
        "def other():\n    return t.remade(), t.data(t.X + 1)\n"
    )
    command = ["replay", str(folder / "run"), "--step", "50", "--observe", "grad/*"]
    assert main([*command, f"{script}:make"]) == 0
    said = capsys.readouterr().out
    assert "proved: equal to what was recorded" in said
    assert "grad/out: mean=" in said
    assert main([*command, f"{script}:other"]) == 1
    assert "NOT PROVED" in capsys.readouterr().out
    assert main([*command, f"{script}:wrong"]) == 2
    assert "must return (trainer, dataset)" in capsys.readouterr().err
