"""`tk.of(model).replay`: a past step of a fit is the step that happened, or says where it is not."""

import dataclasses
import re
import shutil

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("orbax.checkpoint")

import tailrace as tr  # noqa: E402
import tailrace.keras as tk  # noqa: E402
from oracles import assert_bits_equal  # noqa: E402
from tailrace.errors import CheckpointError, OptionError  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
FIT = {"batch_size": 4, "epochs": 2, "verbose": 0}  # 12 batches an epoch
TAPS = [tr.Tap("reduced/*", reduce="tensor"), tr.Tap("activation/hidden", reduce="tensor")]

RARE = [dataclasses.replace(tap, mode=tr.every(7)) for tap in TAPS]


def made(*, replicas=1, accumulation=1, stages=False, execution=4, **options):
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(5, activation="tanh", name="hidden"),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(1),
    ]
    with tk.Strategy(replicas=replicas).scope():
        inputs = out = keras.Input((3,))
        for number, layer in enumerate(layers):
            if stages:
                with tk.PipelineStage(number // 2):
                    out = layer(out)
            else:
                out = layer(out)
        model = keras.Model(inputs, out)
    if accumulation > 1:
        model.set_gradient_accumulation_options(accumulation)
    if stages:
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    options = {"fingerprint": True, **options}
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=execution, **options)
    return model


FORMS = {
    "plain": {},
    "replicas": {"replicas": 2, "accumulation": 2, "execution": 2},
    "pipeline": {"stages": True},
}


@pytest.fixture(scope="module", params=FORMS)
def trained(request, tmp_path_factory):
    """A fit with checkpoints, and the same with taps from the start: what a replay must see."""
    folder, form = tmp_path_factory.mktemp("replay"), FORMS[request.param]
    model = made(**form)
    model.fit(X, Y, checkpoint=tr.Checkpoint(folder, every=3, keep=9), **FIT)
    watched = made(**form, observe=TAPS)
    watched.fit(X, Y, **FIT)
    return model, watched, folder, form


def of_step(record, step):
    return record.values[record.steps == step]


def unnumbered(name):
    return re.sub(r"_\d+", "", name)


def test_taps_change_no_bit_of_a_pipeline(trained):
    """Dropout, BatchNormalization and Adam, with gradients that are summed over microbatches."""
    model, _, _, form = trained
    if not form.get("stages"):
        pytest.skip("of pipelines")
    everything = made(**form, observe=[tr.Tap("*")])
    everything.fit(X, Y, **FIT)
    for plain, tapped in zip(model.variables, everything.variables, strict=True):
        assert_bits_equal(np.asarray(tapped.value), np.asarray(plain.value))


def test_taps_see_what_they_would_have_seen(trained):
    model, watched, folder, _ = trained
    steps = tk.of(model).programs["train"].steps
    for step, taps in ((steps // 2 + 1, TAPS), (steps - 1, RARE)):
        found = tk.of(model).replay(step, X, Y, observe=taps, checkpoint=folder, **FIT)
        assert found.proved is True, str(found)
        for what in ("loss", "parameters", "optimizer", "gradients", "elements", "model_state"):
            assert what in found.evidence
        assert found.step == step
        pairs = list(zip(found, watched.records, strict=True))
        assert len(pairs) == 7
        for mine, theirs in pairs:
            assert unnumbered(mine[0]) == unnumbered(theirs[0])  # two models in one process
            assert set(found[mine].steps) == {step}
            assert_bits_equal(found[mine].values, of_step(watched.records[theirs], step))
        history = tk.of(watched).programs["train"].journal.history
        assert found.loss == history.loss[step]


def test_the_model_is_as_before(tmp_path):
    model, again = made(), made()
    keras.utils.set_random_seed(4)
    model.fit(X, Y, checkpoint=tmp_path, **FIT)
    keras.utils.set_random_seed(4)
    again.fit(X, Y, **FIT)  # without checkpoints and replays
    assert_bits_equal(model.get_weights(), again.get_weights())
    drawn = np.random.get_state()[1].copy()
    model.replay(2, X, Y, checkpoint=tmp_path, **FIT)
    assert model.stop_training is False
    assert_bits_equal(np.random.get_state()[1], drawn)
    for one in (model, again):
        keras.utils.set_random_seed(9)
        one.fit(X, Y, **{**FIT, "epochs": 1})
    assert_bits_equal(model.get_weights(), again.get_weights())
    values = [[v.value for v in one.optimizer.variables] for one in (model, again)]
    assert_bits_equal(*values)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model = made()
    fit = {**FIT, "validation_split": 0.25}  # 9 batches an epoch: an execution of one batch each
    model.fit(X, Y, checkpoint=tr.Checkpoint(folder, every=3, keep=9), **fit)
    return folder, fit


def test_a_model_of_another_process_finds_the_record_in_later_checkpoints(plain):
    folder, fit = plain
    found = made().replay(10, X, Y, checkpoint=folder, **fit)
    assert found.proved is True, str(found)
    last = made().replay(17, X, Y, checkpoint=folder, **fit)
    assert last.proved is True


def test_recorded_fingerprints_are_compared_by_any_model(plain):
    folder, fit = plain
    model = made(fingerprint=False)
    found = model.replay(10, X, Y, checkpoint=folder, **fit)
    assert found.proved is True, str(found)
    assert "fingerprint of parameters" in found.evidence
    assert not tk.of(model).settings.fingerprint, "as before"


def test_a_damaged_later_checkpoint_is_passed_over(plain, tmp_path):
    """Earlier ones know the step too, and prove it."""
    folder, fit = plain
    copy = shutil.copytree(folder, tmp_path / "copy")
    (last,) = copy.glob("fit-0/step-*-end")
    (last / "files.json").write_text("damaged")
    found = made().replay(10, X, Y, checkpoint=copy, **fit)
    assert found.proved is True, str(found)


def test_other_data_and_other_programs_are_not_taken_for_the_same(plain):
    folder, fit = plain
    found = made().replay(8, X * 1.001, Y, checkpoint=folder, **fit)
    assert found.proved is False
    assert "NOT PROVED" in str(found)
    assert found.differences[0].step <= 8
    changed = made()
    changed.compile(keras.optimizers.Adam(0.011), "mse", steps_per_execution=4, fingerprint=True)
    # The learning rate is part of the state that a checkpoint keeps; another loss is not.
    assert changed.replay(8, X, Y, checkpoint=folder, **fit).proved is True
    changed.compile(keras.optimizers.Adam(0.01), "mae", steps_per_execution=4, fingerprint=True)
    assert changed.replay(8, X, Y, checkpoint=folder, **fit).proved is False


def test_schedules_are_given_again(tmp_path):
    def rate(epoch, rate):
        return 0.01 / (1 + epoch)

    schedule = lambda: [keras.callbacks.LearningRateScheduler(rate)]  # noqa: E731
    model = made()
    model.fit(X, Y, checkpoint=tr.Checkpoint(tmp_path, every=99), callbacks=schedule(), **FIT)
    found = model.replay(20, X, Y, checkpoint=tmp_path, callbacks=schedule(), **FIT)
    assert found.proved is True, str(found)
    without = model.replay(20, X, Y, checkpoint=tmp_path, **FIT)
    assert without.proved is False


def test_a_fit_that_was_continued(tmp_path):
    """By another model, whose layers have other names, and from weights that a callback restored."""
    best = keras.callbacks.EarlyStopping
    for epochs in (1, 2):
        stop = best("loss", mode="max", patience=9, restore_best_weights=True)
        fit = {**FIT, "epochs": epochs, "callbacks": [stop]}
        made().fit(X, Y, checkpoint=tr.Checkpoint(tmp_path, every=99), **fit)
    for step in (11, 13):
        found = made().replay(step, X, Y, checkpoint=tmp_path, **FIT)
        assert found.proved is True, str(found)
        assert found.started_at == (0 if step < 12 else 12)


def seeded():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    own = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(data, 4, shuffle=True, generator=own)


class Rows(keras.utils.PyDataset):
    """Rows in another order in each epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(48)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        np.random.shuffle(self.order)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def from_tensorflow():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48, seed=5).batch(4)


@pytest.mark.parametrize("data", [seeded, Rows, from_tensorflow])
def test_data_with_another_order_in_each_epoch(tmp_path, data):
    """The model is built when its past is looked at: Keras reads no batch to build it from."""
    fit = {"epochs": 2, "verbose": 0, "shuffle": False}
    model = made()
    model.fit(data(), checkpoint=tr.Checkpoint(tmp_path, every=8, keep=9), **fit)
    for step in (3, 12, 22):
        found = tk.of(model).replay(step, data(), checkpoint=tmp_path, **fit)
        assert found.proved is True, str(found)


def test_without_fingerprints_nothing_is_recorded(tmp_path):
    model = made(fingerprint=False)
    model.fit(X, Y, checkpoint=tmp_path, **FIT)
    found = model.replay(4, X, Y, checkpoint=tmp_path, **FIT)
    assert found.proved is None
    assert "nothing was recorded" in str(found)


def test_what_cannot_be_replayed(plain, tmp_path):
    folder, fit = plain
    with pytest.raises(CheckpointError, match="ended with step 17. Received: step=99"):
        made().replay(99, X, Y, checkpoint=folder, **fit)
    with pytest.raises(CheckpointError, match="' contains none. Give the directory"):
        made().replay(3, X, Y, checkpoint=tmp_path, **fit)
    with pytest.raises(CheckpointError, match=r"took 1 element .*, and here it takes 3"):
        made(accumulation=3, execution=3).replay(3, X, Y, checkpoint=folder, **fit)
    with pytest.raises(CheckpointError, match="belongs to another training: batches of an epoch"):
        made().replay(3, X[:40], Y[:40], checkpoint=folder, **fit)


def test_what_is_given_is_checked(tmp_path):
    model = tk.adopt(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    with pytest.raises(OptionError, match="the training program of a model again"):
        model.replay(3, X, Y, checkpoint=tmp_path)
    with pytest.raises(OptionError, match="fingerprint is True or False"):
        model.compile("sgd", "mse", fingerprint=1)
    model.compile("sgd", "mse", fingerprint=True)
    with pytest.raises(OptionError, match="of the fit that trained the step. Received: .*'foo'"):
        model.replay(3, X, Y, checkpoint=tmp_path, foo=1)
    with pytest.raises(OptionError, match="the number of a step that was trained"):
        model.replay(-1, X, Y, checkpoint=tmp_path)
