"""What is in a checkpoint, and what it is compared with: nothing else is taken for it."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError, DataError
from tailrace.trainer.checkpoints import freed_memory, orbax_files, saving, writer
from tailrace.trainer.checkpoints.snapshot import check_forms

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1)


def loss_fn(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def with_state(params, state, x, y):
    return loss_fn(params, x, y), (state, None)


def trainer_of(optimizer=None, **options):
    options = {"steps_per_execution": 2, **options}
    return tr.Trainer(
        loss_fn, optimizer or optax.sgd(0.1), {"w": np.zeros(3, np.float32)}, **options
    )


def holding(state):
    return tr.Trainer(with_state, optax.sgd(0.1), {"w": np.zeros(3, np.float32)}, model_state=state)


def data(**options):
    options = {"batch_size": 4, "shuffle": True, "seed": 5, **options}
    return tr.batches((X, Y), options.pop("batch_size"), **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contents") / "kept"
    trainer_of().fit(data(), steps=6, checkpoint=folder)
    return folder


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"seed": 6}, "seed=5, but these batches have seed=6"),
        ({"batch_size": 8}, "batch_size=4, but these batches have batch_size=8"),
        ({"shuffle": False}, "shuffle=True, but these batches have shuffle=False"),
        ({"repeat": True}, "repeat=False, but these batches have repeat=True"),
    ],
    ids=str,
)
def test_other_batches_are_refused(kept, other, text):
    with pytest.raises(DataError, match=text):
        trainer_of().fit(data(**other), steps=8, checkpoint=kept)


def test_rows_that_are_left_out_are_part_of_it(kept):
    with pytest.raises(DataError, match=r"num_examples=64, but these batches have num_examples=62"):
        trainer_of().fit(data().without([3, 9]), steps=8, checkpoint=kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note.update(step=7),
        lambda note: note.update(seed=1),
        lambda note: note["fit"]["progress"].update(steps=4),
        lambda note: note["fit"]["positions"][0].update(elements=16),
    ],
)
def test_a_note_that_was_changed_is_damaged(tmp_path, change):
    trainer_of().fit(data(), steps=2, checkpoint=tmp_path)
    (file,) = (tmp_path / "fit-0" / "step-2-end").glob("_CHECKPOINT_METADATA")
    said = json.loads(file.read_text())
    change(said["custom_metadata"]["note"])
    file.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="is damaged: its parts do not agree"):
        trainer_of().restore(tmp_path)
    found, expected = trainer_of(), trainer_of()
    found.fit(data(), steps=4, checkpoint=tmp_path)  # from the one before it
    expected.fit(data(), steps=4)
    assert_bits_equal(found.state, expected.state)


def test_leaves_of_the_same_name(tmp_path):
    params = {"a/b": np.zeros(3, np.float32), "a": {"b": np.ones(3, np.float32)}}

    def loss(p, x, y):
        return ((x @ (p["a/b"] * 2 + p["a"]["b"]) - y) ** 2).mean()

    trainer, other = (tr.Trainer(loss, optax.sgd(0.1), params) for _ in range(2))
    trainer.fit(data(), steps=3)
    trainer.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    assert_bits_equal(other.params, trainer.params)


def test_the_first_eight_differences_are_listed():
    here = {f"params/{n}": jnp.zeros(2) for n in range(10)}
    with pytest.raises(CheckpointError) as error:
        check_forms(here, {}, {}, {})
    last = "params/7: float32[2] here, missing in the checkpoint and 2 more. Make the trainer with"
    assert last in str(error.value)
    assert "; params/1: " in str(error.value)


def test_every_dtype_comes_back(tmp_path):
    names = "bool int8 uint8 int16 int32 uint32 bfloat16 float16 complex64 float8_e4m3fn int4"
    values = np.arange(6).reshape(2, 3) % 2
    state = {name: jnp.asarray(values).astype(name) for name in names.split()}
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4)}
    first = holding({**state, **keys, "empty": jnp.zeros((0, 3)), "scalar": jnp.float32(3)})
    first.save(tmp_path / "saved")
    blank = jax.tree.map(jnp.zeros_like, state)
    other = {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(2, impl="rbg"), 4)}
    second = holding({**blank, **other, "empty": jnp.zeros((0, 3)), "scalar": jnp.float32(0)})
    second.restore(tmp_path / "saved")
    for name, leaf in first.model_state.items():
        found = second.model_state[name]
        assert found.dtype == leaf.dtype, name
        if name in keys:
            found, leaf = jax.random.key_data(found), jax.random.key_data(leaf)
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes(), name


@pytest.mark.parametrize("there", [0, 1, 2])
@pytest.mark.parametrize("here", [0, 1, 2])
def test_random_keys_are_no_numbers(tmp_path, there, here):
    key = jax.random.key(0)
    kinds = [key, jax.random.key_data(key), jax.random.key(0, impl="rbg")]
    holding({"key": kinds[there]}).save(tmp_path / "saved")
    other = holding({"key": kinds[here]})
    if there == here:
        other.restore(tmp_path / "saved")
        return
    with pytest.raises(CheckpointError, match="model_state/key: .* here, .* in the checkpoint"):
        other.restore(tmp_path / "saved")


def test_the_best_state_may_have_random_keys(tmp_path):
    early = tr.callbacks.EarlyStopping(restore_best=True)
    trainer = holding({"key": jax.random.key(3)})
    held_out = [(X[:4], Y[:4] + 50)]
    for _ in range(2):
        trainer.fit(data(), epochs=3, validation_data=held_out, callbacks=[early])
        assert jnp.issubdtype(trainer.model_state["key"].dtype, jax.dtypes.prng_key)


def test_passes_over_repeated_data_are_counted(tmp_path):
    """So that the next fit shuffles as it would have without the restore."""
    trainer = trainer_of()
    trainer.fit(data(repeat=True), steps=40, checkpoint=tmp_path / "kept")
    other = trainer_of()
    other.restore(tmp_path / "kept")
    for one in (trainer, other):
        one.fit(data(), epochs=1)
    assert_bits_equal(other.history.loss, trainer.history.loss)


def test_another_optimizer_is_noted(kept, caplog):
    again = trainer_of()
    again.fit(data(), steps=6, checkpoint=kept)
    assert "trained with" not in caplog.text
    other = trainer_of(optax.sgd(0.2))
    other.fit(data(), steps=6, checkpoint=kept)
    text = "trained with optimizer: scale(step_size=-0.1), and this trainer has optimizer: scale("
    assert f"{text}step_size=-0.2)" in caplog.text
    assert "The finished fit is returned" in caplog.text


def test_the_end_with_an_earlier_state_is_the_end(tmp_path):
    """EarlyStopping put the best state back: the fit is finished, and all its steps can be replayed."""

    def fit():
        trainer = trainer_of(fingerprint=True)
        trainer.fit(
            data(),
            epochs=6,
            validation_data=[(X[:4], Y[:4] + 50)],
            validation_every=4,
            checkpoint=tr.Checkpoint(tmp_path, every=6),
            callbacks=[early := tr.callbacks.EarlyStopping(patience=3, restore_best=True)],
        )
        return trainer, early

    trainer, early = fit()
    assert trainer.step < len(trainer.history.loss)
    again, seen = fit()
    assert (again.step, again.executions) == (trainer.step, 0)
    assert (seen.best, seen.best_step) == (early.best, early.best_step)
    assert_bits_equal(again.state, trainer.state)
    for step in (trainer.step, trainer.step + 1, len(trainer.history.loss) - 1):
        assert trainer.replay(step, data(), checkpoint=tmp_path).proved is True
    with pytest.raises(CheckpointError, match="the last fit in .* ended with step"):
        trainer.replay(len(trainer.history.loss), data(), checkpoint=tmp_path)


def test_a_leaf_that_the_loop_of_a_pipeline_does_not_carry(tmp_path):
    """A stage reads it and returns it as it is, or does not even read it; a restore sets it."""

    def first(w, state, x, y):
        return (x * w * state["scale"], y), state

    def second(w, state, h, y):
        return ((h.sum(axis=1) * w - y) ** 2).mean(), state

    def make(factor):
        state = [{"scale": np.float32(factor), "idle": np.full(3, factor, np.float32)}, {}]
        pipeline = tr.Pipeline([first, second], accumulation=4)
        trainer = tr.Trainer(
            pipeline, optax.sgd(0.1), [np.ones(3, np.float32), np.float32(1)], model_state=state
        )
        trainer.fit(data(), steps=1)
        return trainer

    one, other = make(0.5), make(0.25)
    one.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    assert_bits_equal(other.state, one.state)
    for trainer in (one, other):
        trainer.fit(data(), steps=2)
    assert_bits_equal(other.state, one.state)
    assert_bits_equal(other.history.loss, one.history.loss)


def test_memory_is_given_back_after_each_checkpoint_and_its_snapshot_is_gone(tmp_path, monkeypatch):
    alive, given = [], []
    take = saving.Saving.snapshot

    def taken(self, ended):
        snapshot = take(self, ended)
        alive.append(weakref.ref(snapshot))
        return snapshot

    monkeypatch.setattr(saving.Saving, "snapshot", taken)
    monkeypatch.setattr(writer, "give_back", lambda: given.append([one() for one in alive]))
    trainer_of().fit(data(), steps=8, checkpoint=tr.Checkpoint(tmp_path, every=4), progress=False)
    assert len(given) == len(alive) >= 3
    assert all(one is None for found in given for one in found)
    freed_memory.give_back()  # here, or nothing where it cannot be asked for


def test_arrays_are_not_compressed(tmp_path):
    array = np.ones(100_000, np.float32)
    orbax_files.write(tmp_path / "kept", {"state/a": array}, {})
    files = [file for file in (tmp_path / "kept").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) > array.nbytes
    assert_bits_equal(orbax_files.read(tmp_path / "kept")[0]["state/a"], array)
