"""Checkpoints: a fit that was stopped anywhere ends as if it had never stopped."""

import itertools
import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal, mlp, mlp_apply, regression
from tailrace.errors import CheckpointError, DataExhausted, OptionError, RunError
from tailrace.runs.storage import durable
from tailrace.runs.storage.held import HeldDirectory
from tailrace.trainer.checkpoints import device_copies
from tailrace.trainer.checkpoints.saving import Saving

X, Y = (np.concatenate(leaf) for leaf in zip(*regression(24), strict=True))
HELD_OUT = regression(3, seed=3)


def loss_fn(params, state, x, y):
    if tr.training():
        x = jnp.where(jax.random.bernoulli(tr.key(), 0.8, x.shape), x, 0)
    error = mlp_apply(params, x) - y
    after = {"seen": state["seen"] + 1, "mean": 0.9 * state["mean"] + 0.1 * x.mean(axis=0)}
    return (error**2).mean(), (after, {"worst": jnp.abs(error).max()})


STATE = {"seen": np.int32(0), "mean": np.zeros(3, np.float32)}


def trainer_of(**options):
    options.setdefault("steps_per_execution", 2)
    optimizer = optax.sgd(0.1, momentum=0.9)
    return tr.Trainer(loss_fn, optimizer, mlp(), model_state=STATE, **options)


def shuffled():
    return tr.batches((X, Y), 4, shuffle=True, seed=5)


def endless():
    return tr.batches((X, Y), 4, shuffle=True, seed=5, repeat=True)


def elements():
    return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, len(X), 4)]


def generator():
    return iter(elements())


def same(found, expected):
    """Trainers and histories of two scripts."""
    assert_bits_equal(found.state, expected.state)
    assert found.step == expected.step
    assert found.history.names == expected.history.names
    for name in expected.history.names:
        assert_bits_equal(np.asarray(found.history[name]), np.asarray(expected.history[name]))
    assert found.history.steps.tolist() == expected.history.steps.tolist()
    assert found.history.validated.tolist() == expected.history.validated.tolist()


def in_pieces(directory, make, fit, kills):
    """Run a script again and again, killed each time but the last."""
    for after in (*kills, None):
        trainer = make()
        try:
            extra = [] if after is None else [Kill(after)]
            fit(trainer, tr.Checkpoint(directory, every=3, keep=2), extra)
        except Killed:
            continue
        return trainer
    raise AssertionError


CASES = {
    "steps": (shuffled, {"steps": 20}, {}),
    "steps of an endless stream": (endless, {"steps": 60}, {}),
    "epochs": (shuffled, {"epochs": 3}, {}),
    "validation": (shuffled, {"epochs": 3, "validation_data": HELD_OUT}, {}),
    "by steps": (
        shuffled,
        {"epochs": 2, "validation_data": HELD_OUT, "validation_every": 5},
        {},
    ),
    "list": (elements, {"epochs": 3}, {}),
    "generator": (generator, {"steps": 20}, {}),
    "unknown length": (lambda: elements().__iter__, {"epochs": 2}, {}),
    "accumulation": (endless, {"steps": 14}, {"accumulation": 3}),
    "replicas": (endless, {"steps": 14}, {"replicas": 2, "accumulation": 2}),
    "own state": (endless, {"steps": 14}, {"replicas": 2, "replica_state": "each"}),
    "auto": (endless, {"steps": 30}, {"steps_per_execution": "auto"}),
    "shards": (endless, {"steps": 14}, {"replicas": 2, "shard_optimizer_state": True}),
}


@pytest.mark.parametrize("kills", [(0,), (3, 2), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_killed_and_started_again(tmp_path, case, kills):
    data, call, options = CASES[case]

    def fit(trainer, checkpoint, extra):
        trainer.fit(data(), **call, checkpoint=checkpoint, callbacks=extra, progress=False)

    expected = trainer_of(**options)
    expected.fit(data(), **call, progress=False)
    found = in_pieces(tmp_path / "kept", lambda: trainer_of(**options), fit, kills)
    same(found, expected)


def test_several_fits_in_one_script(tmp_path):
    def script(trainer, checkpoint, extra):
        trainer.fit(shuffled(), epochs=1, checkpoint=checkpoint, callbacks=extra)
        first = (jax.tree.map(np.asarray, trainer.params), trainer.history.loss)
        trainer.fit(shuffled(), steps=9, checkpoint=checkpoint, callbacks=extra)
        return first

    expected = trainer_of()
    expected.fit(shuffled(), epochs=1)
    middle = (expected.params, expected.history.loss)
    expected.fit(shuffled(), steps=9)
    directory = tmp_path / "kept"
    found = in_pieces(directory, trainer_of, script, (4, 13, 14))
    same(found, expected)
    again = trainer_of()
    assert_bits_equal(script(again, tr.Checkpoint(directory), []), middle)
    same(again, expected)
    assert again.executions == 0, "what is finished is not computed again"


@pytest.mark.parametrize("kills", [("between",), (1, "between", 5), (6,)], ids=str)
def test_fits_that_share_an_iterator(tmp_path, kills):
    """What a finished fit has read is not there for the next one, wherever the script was killed."""

    def script(trainer, kept, kill):
        stream, extra = generator(), [Kill(kill)] if isinstance(kill, int) else []
        trainer.fit(stream, steps=8, checkpoint=kept, callbacks=extra)
        if kill == "between":
            raise Killed
        trainer.fit(stream, steps=12, checkpoint=kept, callbacks=extra)
        return trainer

    expected = script(trainer_of(), None, None)
    for kill in kills:
        with pytest.raises(Killed):
            script(trainer_of(), tr.Checkpoint(tmp_path, every=3), kill)
    same(script(trainer_of(), tr.Checkpoint(tmp_path, every=3), None), expected)


STAGES = {"hidden": 2, "out": 1}


def staged(params, x, y):
    h = tr.stage_boundary(jnp.tanh(x @ params["first"]))
    h = tr.stage_boundary(jnp.tanh(h @ params["second"]))
    return ((h @ params["third"] - y) ** 2).mean()


def test_a_checkpoint_does_not_depend_on_the_plan(tmp_path):
    """Two replicas of three stages, then one device, then another schedule."""
    rng = np.random.default_rng(0)
    shapes = {"first": (3, 5), "second": (5, 4), "third": (4,)}
    params = {name: rng.normal(size=s).astype(np.float32) * 0.3 for name, s in shapes.items()}

    def make(kind):
        optimizer = optax.sgd(0.1, momentum=0.9)
        if kind == "plain":
            return tr.Trainer(staged, optimizer, params, accumulation=12)
        schedule, replicas = kind
        pipeline = tr.Pipeline(staged, accumulation=12 // replicas, schedule=schedule)
        return tr.Trainer(pipeline, optimizer, params, replicas=replicas)

    kinds = [("grouped", 2), "plain", ("sequential", 1)]
    for number, kind in enumerate(kinds, start=1):
        trainer = make(kind)
        trainer.fit(endless(), steps=2 * number, checkpoint=tmp_path / "kept")
    assert trainer.step == 6
    expected = make("plain")
    expected.fit(endless(), steps=6)
    for found, wanted in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(expected.state), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)
    assert len(trainer.history.loss) == 6
    np.testing.assert_allclose(trainer.history.loss, expected.history.loss, rtol=1e-5)


# -- how long -----------------------------------------------------------------------------------


def test_more_steps_go_on_and_fewer_return(tmp_path, caplog):
    expected = trainer_of()
    expected.fit(endless(), steps=11)
    for steps in (5, 11):
        trainer = trainer_of()
        trainer.fit(endless(), steps=steps, checkpoint=tmp_path / "kept")
    same(trainer, expected)
    fewer = trainer_of()
    history = fewer.fit(endless(), steps=7, checkpoint=tmp_path / "kept")
    assert len(history.loss) == 11
    assert "holds a fit that went further (11 steps" in caplog.text


def test_a_fit_that_was_stopped_stays_stopped(tmp_path):
    class Enough(tr.Callback):
        def on_execution_end(self, trainer, execution):
            if trainer.step >= 6:
                trainer.stop()

    first = trainer_of()
    first.fit(endless(), steps=20, checkpoint=tmp_path / "kept", callbacks=[Enough()])
    again = trainer_of()
    again.fit(endless(), steps=20, checkpoint=tmp_path / "kept", callbacks=[Enough()])
    same(again, first)
    assert (again.step, again.executions) == (6, 0)


@pytest.mark.parametrize("kill", [1, 5, 9, 14])
def test_early_stopping_is_part_of_it(tmp_path, kill):
    def fit(trainer, checkpoint, extra, stopping):
        trainer.fit(
            shuffled(),
            epochs=12,
            validation_data=HELD_OUT,
            checkpoint=checkpoint,
            callbacks=[stopping, *extra],
        )

    def stopping():
        return tr.callbacks.EarlyStopping(patience=2, restore_best=True)

    expected, wanted = trainer_of(), stopping()
    fit(expected, None, [], wanted)
    used = []
    found = in_pieces(
        tmp_path / "kept",
        trainer_of,
        lambda trainer, checkpoint, extra: fit(
            trainer, checkpoint, extra, used.append(stopping()) or used[-1]
        ),
        (kill,),
    )
    same(found, expected)
    if found.executions:
        assert (used[-1].best, used[-1].best_step) == (wanted.best, wanted.best_step)


def test_a_csv_file_goes_on(tmp_path):
    def fit(path):
        def run(trainer, checkpoint, extra):
            logger = tr.callbacks.CSVLogger(path)
            trainer.fit(shuffled(), epochs=2, checkpoint=checkpoint, callbacks=[logger, *extra])

        return run

    fit(tmp_path / "expected.csv")(trainer_of(), None, [])
    in_pieces(tmp_path / "kept", trainer_of, fit(tmp_path / "found.csv"), (4, 5))
    assert (tmp_path / "found.csv").read_text() == (tmp_path / "expected.csv").read_text()


TAPS = [
    tr.Tap("grad/*", reduce="stats"),
    tr.Tap("loss", reduce="tensor"),
    tr.Tap("grad/hidden/kernel", mode=tr.every(3), reduce="norm"),
]


@pytest.mark.parametrize("kills", [(0,), (3, 2), (5, 9)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_run_directory_goes_on(tmp_path, kills, replicas):
    """No gap and no repeat, whatever was written before the kill; two fits in one directory."""

    def script(directory):
        def run(trainer, checkpoint, extra):
            trainer.fit(endless(), steps=9, checkpoint=checkpoint, callbacks=extra)
            trainer.fit(endless(), steps=8, checkpoint=checkpoint, callbacks=extra)

        return lambda: trainer_of(observe=TAPS, run_dir=directory, replicas=replicas), run

    make, run = script(tmp_path / "expected")
    expected = make()
    run(expected, None, [])
    make, run = script(tmp_path / "found")
    found = in_pieces(tmp_path / "kept", make, run, kills)
    same(found, expected)
    runs = [tr.open_run(tmp_path / name) for name in ("found", "expected")]
    for name in runs[1].history.names:
        assert_bits_equal(runs[0].history[name], runs[1].history[name])
    assert runs[0].history.steps.tolist() == list(range(17))
    for one, other in ((runs[0].records, runs[1].records), (found.records, expected.records)):
        assert list(one) == list(other)
        for name, kind in other:
            a, b = one[name, kind], other[name, kind]
            assert_bits_equal(np.asarray(a.values), np.asarray(b.values))
            assert a.steps.tolist() == b.steps.tolist()
            assert a.replicas.tolist() == b.replicas.tolist()


@pytest.mark.parametrize("files", [0, 1, 3, 5, 99])
def test_killed_while_the_run_directory_is_created(tmp_path, monkeypatch, files):
    """After some of its files are in place, or all; then started again unchanged."""
    left, plain = [files], durable.rename_file

    def rename(*args):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        plain(*args)

    def run():
        trainer = tr.Trainer(
            lambda w, x: ((x - w) ** 2).mean(),
            optax.sgd(0.1),
            np.float32(0),
            run_dir=tmp_path / "run",
        )
        trainer.fit(
            tr.batches(np.ones((8, 2), np.float32), 2), epochs=1, checkpoint=tmp_path / "kept"
        )

    def died(*args, **options):
        raise Killed

    monkeypatch.setattr(durable, "rename_file", rename)
    monkeypatch.setattr(HeldDirectory, "unlink", lambda *args: None)  # the process is gone
    if files == 99:
        monkeypatch.setattr(Saving, "begin", died)
    with pytest.raises((Killed, RunError)):
        run()
    monkeypatch.undo()
    run()
    assert len(tr.open_run(tmp_path / "run").history.loss) == 4


@pytest.mark.parametrize("kills", [(2,), (4, 3)], ids=str)
def test_the_run_directory_of_a_trainer_that_went_back(tmp_path, kills):
    """Steps are made again after `restore`: their rows replace those that were undone."""

    def run(trainer, checkpoint, extra):
        start = tmp_path / f"start{len(list(tmp_path.glob('start*')))}"
        trainer.save(start)
        trainer.fit(endless(), steps=6, checkpoint=checkpoint, callbacks=extra)
        trainer.restore(start)
        trainer.fit(endless(), steps=8, checkpoint=checkpoint, callbacks=extra)

    expected = trainer_of(observe=TAPS, run_dir=tmp_path / "expected")
    run(expected, None, [])
    make = lambda: trainer_of(observe=TAPS, run_dir=tmp_path / "found")  # noqa: E731
    found = in_pieces(tmp_path / "kept", make, run, kills)
    same(found, expected)
    runs = [tr.open_run(tmp_path / name) for name in ("found", "expected")]
    assert runs[0].history.steps.tolist() == [*range(8)]
    said = [{"kind": "restore", "step": 0, "from": 6, "reason": "the state was restored"}]
    assert runs[0].interventions == runs[1].interventions == said
    assert_bits_equal(runs[0].history.loss, runs[1].history.loss)
    for name, kind in runs[1].records:
        a, b = runs[0].records[name, kind], runs[1].records[name, kind]
        assert a.steps.tolist() == b.steps.tolist()
        assert_bits_equal(np.asarray(a.values), np.asarray(b.values))


def test_a_run_directory_is_not_taken_up_without_a_fit_that_is(tmp_path):
    trainer_of(run_dir=tmp_path / "run").fit(endless(), steps=4)
    with pytest.raises(tr.errors.RunError, match="holds one already"):
        trainer_of(run_dir=tmp_path / "run").fit(endless(), steps=4, checkpoint=tmp_path / "kept")


# -- what is kept -------------------------------------------------------------------------------


def steps_in(directory):
    return sorted(path.name for path in directory.glob("fit-0/*"))


def test_the_last_the_first_and_the_end_stay(tmp_path):
    trainer_of().fit(endless(), steps=20, checkpoint=tr.Checkpoint(tmp_path / "kept", 3, keep=2))
    assert steps_in(tmp_path / "kept") == ["step-0", "step-16", "step-20", "step-20-end"]


def test_the_best_stays(tmp_path):
    trainer = trainer_of()
    history = trainer.fit(
        shuffled(),
        epochs=6,
        validation_data=HELD_OUT,
        checkpoint=tr.Checkpoint(tmp_path / "kept", "1000s", keep=1, best="val_loss"),
    )
    best = int(history.validated[np.argmin(history["val_loss"])])
    kept = [path for path in (tmp_path / "kept" / "fit-0").iterdir() if path.name.endswith("-best")]
    assert [path.name for path in kept] == [f"step-{best}-best"]
    trainer.restore(kept[0])
    assert trainer.step == best
    assert trainer.evaluate(HELD_OUT)["loss"] == history["val_loss"].min()


def test_the_best_of_a_value_that_there_is_not(tmp_path):
    """At once if the fit does not validate, else as soon as the values are known."""
    best = tr.Checkpoint(tmp_path / "kept", best="val_loss")
    text = r"no value 'val_loss' to watch: .* Received: .*best='val_loss'\) without validation_data"
    with pytest.raises(OptionError, match=text):
        trainer_of().fit(shuffled(), epochs=1, checkpoint=best)
    assert not (tmp_path / "kept").exists()
    for name, data in (("worstt", None), ("val_worstt", HELD_OUT)):
        best = tr.Checkpoint(tmp_path / name, best=name, mode="min")
        with pytest.raises(OptionError, match=f"There is no value '{name}' to watch. Logged are: "):
            trainer_of().fit(shuffled(), epochs=1, checkpoint=best, validation_data=data)


def test_a_checkpoint_directory_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "inside"):
        with pytest.raises(
            CheckpointError, match=r"checkpoint= is a directory, and '.*file' is a f"
        ):
            trainer_of().fit(shuffled(), steps=1, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"save writes a directory, and '.*file' is a file"):
        trainer_of().save(file / "inside")


def test_restoring_what_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    for path, text in ((tmp_path / "file", "is a file"), (tmp_path, "is a directory without a ch")):
        with pytest.raises(CheckpointError, match=text):
            trainer_of().restore(path)
    trainer = trainer_of(run_dir=tmp_path / "run")
    trainer.fit(shuffled(), steps=1, checkpoint=tmp_path / "kept")
    text = r"run' is a run directory: records, not .* This run's checkpoints are in '.*kept'\.$"
    with pytest.raises(CheckpointError, match=text):
        trainer.restore(tmp_path / "run")


def test_seconds(tmp_path, monkeypatch):
    from tailrace.trainer.checkpoints import writer

    clock = itertools.count(0, 10)
    monkeypatch.setattr(writer, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    trainer_of().fit(endless(), steps=8, checkpoint=tr.Checkpoint(tmp_path / "kept", "15s", keep=9))
    assert len(steps_in(tmp_path / "kept")) >= 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 0}, "every must be a whole number >= 1 .steps., or a text such as '60s', which"),
        ({"every": "60"}, "Received: every='60'"),
        ({"every": "0s"}, "which is more than 0 seconds. Received: every='0s'"),
        ({"every": True}, "Received: every=True"),
        ({"every": 2.5}, "Received: every=2.5"),
        ({"keep": 0}, "keep must be a whole number >= 1"),
        ({"keep": 1.5}, "keep must be a whole number >= 1. Received: keep=1.5"),
        ({"best": ""}, "monitor is the name of a logged value"),
    ],
)
def test_what_a_checkpoint_is(given, text):
    with pytest.raises(OptionError, match=text):
        tr.Checkpoint("somewhere", **given)
    with pytest.raises(OptionError, match="checkpoint= is a directory or a tr.Checkpoint"):
        trainer_of().fit(endless(), steps=1, checkpoint=3)


# -- what does not fit --------------------------------------------------------------------------


def test_another_training_is_refused(tmp_path):
    def fit(trainer, **call):
        trainer.fit(endless(), checkpoint=tmp_path / "kept", **{"steps": 4, **call})

    fit(trainer_of())
    with pytest.raises(CheckpointError, match="seed: 0 there, 7 here"):
        fit(trainer_of(seed=7))
    with pytest.raises(CheckpointError, match=r"elements of a step .*: 1 there, 2 here"):
        fit(trainer_of(accumulation=2))
    with pytest.raises(CheckpointError, match="what fit counts: 'steps' there, 'epochs' here"):
        trainer_of().fit(shuffled(), epochs=1, checkpoint=tmp_path / "kept")
    later = trainer_of()
    later.fit(endless(), steps=1)
    with pytest.raises(CheckpointError, match="step when the fit begins: 0 there, 1 here"):
        fit(later)


def test_forms_are_compared_leaf_by_leaf(tmp_path):
    trainer_of().save(tmp_path / "saved")
    wider = mlp() | {"extra": np.zeros(2, np.float32)} if isinstance(mlp(), dict) else None
    assert wider is not None
    name = next(iter(mlp()))
    leaf = jax.tree.leaves(mlp()[name])[0]
    wider[name] = jax.tree.map(lambda x: np.zeros((*x.shape, 2), np.float16), mlp()[name])
    other = tr.Trainer(
        lambda p, s, x: (x.sum(), (s, None)), optax.sgd(0.1), wider, model_state=STATE
    )
    with pytest.raises(CheckpointError) as raised:
        other.restore(tmp_path / "saved")
    text = str(raised.value)
    assert f"float16{[*leaf.shape, 2]} here, float32{list(leaf.shape)} in the checkpoint" in text
    assert "params/extra: float32[2] here, missing in the checkpoint" in text
    assert "missing here" in text  # the momentum


# -- by hand ------------------------------------------------------------------------------------


def test_save_and_restore(tmp_path):
    trainer = trainer_of()
    trainer.fit(shuffled(), steps=5)
    trainer.save(tmp_path / "saved")
    other = trainer_of(seed=4)
    other.restore(tmp_path / "saved")
    assert_bits_equal(other.state, trainer.state)
    assert (other.step, other.seed) == (5, 0)
    for one in (trainer, other):
        one.fit(shuffled(), epochs=1)
    same(other, trainer)
    with pytest.raises(CheckpointError, match="save writes a new directory"):
        trainer.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="restore reads what trainer.save or fit"):
        trainer.restore(tmp_path / "nothing")


def test_copies_are_those_of_the_moment_and_whole(monkeypatch):
    """Large arrays travel in pieces; what overwrites the original afterwards is not seen."""
    monkeypatch.setattr(device_copies, "PIECE", 40)
    mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("r"))
    alike = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    values = {
        "large": jnp.arange(35, dtype=jnp.float32).reshape(5, 7),
        "narrow": jnp.arange(100, dtype=jnp.bfloat16),
        "small": jnp.float32(3),
        "empty": jnp.zeros((0, 3)),
        "elsewhere": jax.device_put(np.arange(50), jax.devices()[1]),
        "spread": jax.device_put(np.arange(64).reshape(8, 8), spread),
        "alike": jax.device_put(np.arange(64).reshape(8, 8), alike),
    }
    expected = {name: np.array(value) for name, value in values.items()}
    copies = device_copies.copied(values)
    assert len(copies["large"].pieces) == 4
    for value in values.values():
        value.delete()
    found = {name: copy.on_host() for name, copy in copies.items()}
    assert list(found) == list(expected)
    assert_bits_equal(found, expected)


def test_restore_takes_the_newest_of_a_directory(tmp_path):
    trainer = trainer_of()
    for _ in range(2):
        trainer.fit(endless(), steps=4, checkpoint=tmp_path / "kept")
    other = trainer_of()
    other.restore(tmp_path / "kept")
    assert_bits_equal(other.state, trainer.state)
    assert other.step == 8


# -- faults -------------------------------------------------------------------------------------


def test_one_trainer_at_a_time(tmp_path):
    class Second(tr.Callback):
        def on_execution_end(self, trainer, execution):
            trainer_of().fit(endless(), steps=2, checkpoint=tmp_path / "kept")

    with pytest.raises(CheckpointError, match="belongs to one trainer at a time"):
        trainer_of().fit(endless(), steps=4, checkpoint=tmp_path / "kept", callbacks=[Second()])


def damaged(directory, how):
    """Spoil the newest checkpoint of a directory."""
    path = max((directory / "fit-0").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    files = [f for f in path.rglob("*") if f.is_file()]
    large = max(files, key=lambda f: f.stat().st_size)
    if how == "truncated":
        os.truncate(large, large.stat().st_size // 2)
    elif how == "removed":
        for file in files:
            file.unlink()
    elif how == "flipped":
        content = bytearray(large.read_bytes())
        content[len(content) // 2] ^= 0xFF
        large.write_bytes(content)
    elif how == "form":
        (meta,) = [f for f in files if f.name == "_CHECKPOINT_METADATA"]
        said = json.loads(meta.read_text())
        said["custom_metadata"]["format"] = 99
        meta.write_text(json.dumps(said))
    elif how == "huge":
        (meta,) = [f for f in files if f.name == "_CHECKPOINT_METADATA"]
        said = json.loads(meta.read_text())
        said["custom_metadata"]["arrays"] = {"state/params": [[1 << 40, 1 << 20], "float32", 0]}
        meta.write_text(json.dumps(said))
    else:
        (meta,) = [f for f in files if f.name == "_CHECKPOINT_METADATA"]
        meta.write_text(how)


@pytest.mark.parametrize(
    "how", ["truncated", "flipped", "removed", "form", "huge", "{}", "[1]", "nonsense"]
)
def test_damage_is_a_sentence(tmp_path, how):
    trainer_of().fit(endless(), steps=4, checkpoint=tmp_path / "kept")
    damaged(tmp_path / "kept", how)
    before = trainer_of()
    with pytest.raises(CheckpointError, match="checkpoint"):
        before.restore(tmp_path / "kept")
    assert_bits_equal(before.params, mlp())


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch, caplog):
    from tailrace.trainer.checkpoints import orbax_files

    write, failed = orbax_files.write, []

    def full(path, arrays, note, **options):
        if len(failed) < 2 and "step-0" not in path.name:
            failed.append(path)
            with orbax_files.sentence(path, "cannot be written"):
                raise OSError(28, "No space left on device")
        write(path, arrays, note, **options)

    monkeypatch.setattr(orbax_files, "write", full)
    trainer = trainer_of()
    trainer.fit(endless(), steps=12, checkpoint=tr.Checkpoint(tmp_path / "kept", every=2))
    assert len(failed) == 2
    assert "No space left on device" in caplog.text
    again = trainer_of()
    again.restore(tmp_path / "kept")
    assert_bits_equal(again.state, trainer.state)


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    kept = tmp_path / "kept"
    trainer_of().fit(endless(), steps=4, checkpoint=kept)
    (kept / "fit-0" / "step-9.unfinished").mkdir()
    (kept / "fit-0" / "step-7").symlink_to(tmp_path)
    trainer = trainer_of()
    trainer.fit(endless(), steps=6, checkpoint=kept)
    assert trainer.step == 6
    assert not (kept / "fit-0" / "step-9.unfinished").exists()


def test_a_dataset_that_has_become_shorter(tmp_path):
    trainer_of().fit(generator(), steps=20, checkpoint=tmp_path / "kept")
    with pytest.raises(DataExhausted, match="Asked for"):
        trainer_of().fit(iter(elements()[:10]), steps=22, checkpoint=tmp_path / "kept")


def test_without_orbax(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("orbax"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    import importlib

    monkeypatch.setattr(importlib, "import_module", lambda name: without(name))
    with pytest.raises(tr.TailraceError, match=r"pip install 'tailrace\[checkpoint\]'"):
        trainer_of().fit(endless(), steps=1, checkpoint=tmp_path / "kept")
