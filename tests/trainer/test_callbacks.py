"""What callbacks see, validation, epochs, and the callbacks that are ready made."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import (
    assert_bits_equal,
    assert_close,
    mlp,
    mlp_apply,
    mlp_loss,
    plain_training,
    regression,
)
from tailrace.errors import DataError, OptionError, ProgramError, RunError
from waits import wait_until

ELEMENTS = regression(12)
HELD_OUT = regression(5, seed=3)


def trainer_of(**options):
    options.setdefault("steps_per_execution", 4)
    return tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), **options)


class Diary(tr.Callback):
    """Takes down every call."""

    def __init__(self):
        self.calls = []

    def on_fit_begin(self, trainer):
        self.calls.append(("begin", trainer.step))

    def on_execution_end(self, trainer, execution):
        self.calls.append(("execution", trainer.step, execution.first_step + execution.steps))

    def on_validation_end(self, trainer, logs):
        self.calls.append(("validation", trainer.step, dict(logs)))

    def on_epoch_end(self, trainer, epoch, logs):
        self.calls.append(("epoch", trainer.step, epoch, dict(logs)))

    def on_fit_end(self, trainer, history):
        self.calls.append(("end", trainer.step))


class Looking(tr.Callback):
    """Compares the parameters with those of a plain training, execution by execution."""

    def on_execution_end(self, trainer, execution):
        steps = execution.first_step + execution.steps
        assert trainer.step == steps
        params, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:steps])
        assert_bits_equal(trainer.params, params)
        assert_bits_equal(execution.values["loss"], losses[execution.first_step :])


def test_state_and_values_belong_to_the_same_step():
    trainer_of().fit(ELEMENTS, callbacks=[Looking()])


def test_order_of_calls_and_means_of_epochs():
    diary = Diary()
    history = trainer_of().fit(ELEMENTS, epochs=2, validation_data=HELD_OUT, callbacks=[diary])
    kinds = [call[0] for call in diary.calls]
    epoch = ["execution"] * 3 + ["validation", "epoch"]
    assert kinds == ["begin", *epoch, *epoch, "end"]
    epochs = [call for call in diary.calls if call[0] == "epoch"]
    assert [(step, number) for _, step, number, _ in epochs] == [(12, 0), (24, 1)]
    for number, (_, _, _, logs) in enumerate(epochs):
        assert logs.keys() == {"loss", "mae", "val_loss", "val_mae"}
        own = history.loss[number * 12 : number * 12 + 12]
        assert_close(np.float32(logs["loss"]), np.float32(own.mean()))
        assert logs["val_loss"] == history["val_loss"][number]


def test_epochs_are_numbered_over_all_fits():
    diary, trainer = Diary(), trainer_of()
    for _ in range(2):
        trainer.fit(ELEMENTS, epochs=2, callbacks=[diary])
    assert [call[2] for call in diary.calls if call[0] == "epoch"] == [0, 1, 2, 3]


# -- validation ---------------------------------------------------------------------------------


def test_validation_every_few_steps():
    """Executions of four steps are cut where a validation is due."""
    trainer = trainer_of()
    history = trainer.fit(ELEMENTS, validation_data=HELD_OUT, validation_every=5)
    assert history.validated.tolist() == [5, 10]
    for number, steps in enumerate((5, 10)):
        params, _ = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:steps])
        expected = np.mean([mlp_loss(params, *e)[0] for e in HELD_OUT])
        assert_close(np.float32(history["val_loss"][number]), np.float32(expected))
    params, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS)
    assert_bits_equal(history.loss, losses)
    assert_bits_equal(trainer.params, params)


def test_a_fit_by_steps_is_one_epoch():
    history = trainer_of().fit(ELEMENTS, steps=6, validation_data=HELD_OUT)
    assert history.validated.tolist() == [6]
    assert history.last()["val_loss"] == history["val_loss"][-1]


@pytest.mark.parametrize("every", [0, "step", True, 2.5])
def test_what_validation_every_is(every):
    with pytest.raises(
        OptionError, match="validation_every must be a whole number >= 1 .steps., or 'epoch'"
    ):
        trainer_of().fit(ELEMENTS, validation_data=HELD_OUT, validation_every=every)


# -- epochs -------------------------------------------------------------------------------------


def test_validation_every_needs_data():
    text = (
        r"needs fit\(validation_data=...\)\. Received: validation_every=1 without validation_data"
    )
    with pytest.raises(OptionError, match=text):
        trainer_of().fit(ELEMENTS, validation_every=1)


def rows_of(data):
    """The elements that fits of a trainer see, by their first value."""

    def loss_fn(w, x):
        return (w * x).mean(), {"row": x[0]}

    return tr.Trainer(loss_fn, optax.sgd(0.0), jnp.float32(1), steps_per_execution=3)


@pytest.mark.parametrize("repeat", [False, True])
def test_a_shuffled_dataset_has_another_order_in_each_fit(repeat):
    data = tr.batches(np.arange(12, dtype=np.float32), 1, shuffle=True, repeat=repeat)
    trainer = rows_of(data)
    orders = [trainer.fit(data, steps=12)["row"].tolist() for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(12)) for order in orders)
    expected = [data.order(epoch).tolist() for epoch in range(3)]
    assert orders == expected
    at_once = rows_of(data).fit(data, steps=36)["row"] if repeat else None
    if repeat:
        assert at_once.tolist() == np.concatenate(expected).tolist()


def test_epochs_of_one_fit_and_of_several_are_the_same():
    data = tr.batches(np.arange(12, dtype=np.float32), 1, shuffle=True)
    together = rows_of(data).fit(data, epochs=3)["row"]
    trainer = rows_of(data)
    apart = np.concatenate([trainer.fit(data, epochs=1)["row"] for _ in range(3)])
    assert together.tolist() == apart.tolist()
    assert data.rows(4, 2, epoch=1)[:, 0].tolist() == together[12 + 4 : 12 + 6].tolist()


# -- ready made ---------------------------------------------------------------------------------


class Course(tr.Callback):
    """Makes the parameters something else after some epochs, so that validation gets worse."""

    def __init__(self, worse_from):
        self.worse_from = worse_from

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch + 1 >= self.worse_from:
            state = trainer.state
            bad = jax.tree.map(lambda value: value * 3, state.params)
            trainer.engine.state = state._replace(params=bad)


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping(restore):
    stopping = tr.callbacks.EarlyStopping("val_loss", patience=2, restore_best=restore)
    trainer = trainer_of()
    history = trainer.fit(
        ELEMENTS, epochs=20, validation_data=HELD_OUT, callbacks=[Course(3), stopping]
    )
    best = int(np.argmin(history["val_loss"]))
    assert len(history["val_loss"]) == best + 3, "two looks without a better value"
    assert stopping.best == history["val_loss"].min()
    assert stopping.best_step == (best + 1) * 12
    if restore:
        assert trainer.step == stopping.best_step
        assert trainer.evaluate(HELD_OUT)["loss"] == stopping.best
    else:
        assert trainer.step == len(history.loss)


@pytest.mark.parametrize(("patience", "checks"), [(0, 3), (1, 3), (2, 6), (3, 10)])
def test_early_stopping_waits_as_long_as_keras(patience, checks):
    """Keras' own `EarlyStopping` stops after as many epochs."""
    values = [3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]

    class Trainer:
        step, stopped = 0, False

        def stop(self):
            self.stopped = True

    ours, trainer = tr.callbacks.EarlyStopping("val_loss", patience=patience), Trainer()
    for value in values:
        ours.on_validation_end(trainer, {"val_loss": value})
        trainer.step += 1
        if trainer.stopped:
            break
    assert trainer.step == checks


def test_early_stopping_counts_validations_by_steps():
    stopping = tr.callbacks.EarlyStopping("val_mae", patience=0, mode="max")
    history = trainer_of().fit(
        ELEMENTS, validation_data=HELD_OUT, validation_every=2, callbacks=[stopping]
    )
    falls = np.diff(history["val_mae"]) <= 0
    assert len(history["val_mae"]) == np.argmax(falls) + 2


def test_what_early_stopping_watches():
    """Refused before it trains if the fit does not validate, else as soon as the values are known."""
    trainer = trainer_of()
    text = r"no value 'val_loss' to watch: .* Received: EarlyStopping\(monitor='val_loss'\) without"
    with pytest.raises(OptionError, match=text):
        trainer.fit(ELEMENTS, callbacks=[tr.callbacks.EarlyStopping()])
    assert trainer.executions == 0
    with pytest.raises(OptionError, match=r"no value 'maee' to watch. Logged are: 'loss', 'mae'"):
        trainer.fit(ELEMENTS, callbacks=[tr.callbacks.EarlyStopping("maee", mode="min")])
    assert trainer.step < len(ELEMENTS)
    stopping = tr.callbacks.EarlyStopping("val_maee", mode="min")
    with pytest.raises(OptionError, match=r"no value 'val_maee' to watch. Logged are: 'val_loss'"):
        trainer.fit(ELEMENTS, validation_data=HELD_OUT, callbacks=[stopping])
    with pytest.raises(OptionError, match="mode is 'auto', 'min' or 'max'"):
        tr.callbacks.EarlyStopping(mode="best")
    with pytest.raises(OptionError, match="patience must be a whole number >= 0"):
        tr.callbacks.EarlyStopping(patience=-1)


def test_an_epoch_may_be_shorter_than_the_time_between_validations():
    stopping = tr.callbacks.EarlyStopping("val_loss", patience=9)
    history = trainer_of().fit(
        ELEMENTS, epochs=2, validation_data=HELD_OUT, validation_every=20, callbacks=[stopping]
    )
    assert (stopping.best, stopping.best_step) == (history["val_loss"][0], 20)


def test_a_logger_whose_file_cannot_be(tmp_path):
    """At once if that is known, else with the first row."""
    (tmp_path / "file").write_text("")
    for logger in (tr.callbacks.CSVLogger, tr.callbacks.TensorBoard):
        with pytest.raises(OptionError, match=r"writes into a directory, and '.*file' is a file"):
            logger(tmp_path / "file" / "inside")
    with pytest.raises(OptionError, match="CSVLogger writes a file, and path=.* is a directory"):
        tr.callbacks.CSVLogger(tmp_path)
    late = tr.callbacks.CSVLogger(tmp_path / "later" / "rows.csv")
    (tmp_path / "later").write_text("")
    with pytest.raises(RunError, match=r"CSVLogger cannot write '.*rows.csv': (File|Not)"):
        trainer_of().fit(ELEMENTS, callbacks=[late])


def test_a_queue_is_not_a_dataset():
    queue = tr.InfeedQueue(ELEMENTS)
    trainer = trainer_of()
    for call in (trainer.fit, trainer.evaluate, lambda data: trainer.predict(data, mlp_apply)):
        with pytest.raises(
            DataError, match=r"Give the dataset itself, which the queue has as \.data"
        ):
            call(queue)


class Halving(tr.Callback):
    """Lowers the rate after each epoch, as a user of Keras would."""

    def on_epoch_end(self, trainer, epoch, logs):
        state = trainer.state
        state.optimizer_state.hyperparams["learning_rate"] *= 0.5
        trainer.state = state


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_a_callback_sets_the_state(shard):
    options = {"replicas": 2, "shard_optimizer_state": True} if shard else {}
    boundaries = {12 // (1 + shard) * epoch: 0.5 for epoch in (1, 2)}
    rates = (0.01, optax.piecewise_constant_schedule(0.01, boundaries))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        found, expected = (
            tr.Trainer(
                mlp_loss,
                optax.inject_hyperparams(optax.adam)(learning_rate=rate),
                mlp(hidden=400),  # small leaves are not sharded
                log="learning_rate",
                **options,
            )
            for rate in rates
        )
        history = found.fit(ELEMENTS, epochs=3, callbacks=[Halving()])
        wanted = expected.fit(ELEMENTS, epochs=3)
    assert_close(history["learning_rate"], wanted["learning_rate"])
    assert_close(found.params, expected.params)


def test_states_of_another_form_are_refused():
    trainer = trainer_of()
    state = trainer.state
    with pytest.raises(ProgramError, match="has the structure of trainer.state"):
        trainer.state = state.params
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    with pytest.raises(ProgramError, match=r"'params/.*' is float32.* Received: float64"):
        trainer.state = state._replace(params=wide)
    trainer.state = state._replace(params=jax.tree.map(jnp.zeros_like, state.params))
    assert not any(leaf.any() for leaf in jax.tree.leaves(trainer.params))


def test_metrics_have_the_form_that_others_log():
    """`wandb.log(data, step=...)` and `mlflow.log_metrics(metrics, step=...)`."""
    seen = []

    def log(data, step=None):
        seen.append((step, data))

    history = trainer_of().fit(
        ELEMENTS, validation_data=HELD_OUT, callbacks=[tr.callbacks.Metrics(log)]
    )
    assert [step for step, _ in seen] == [*range(12), 11]
    assert_bits_equal(np.float32([d["loss"] for _, d in seen[:-1]]), history.loss)
    assert seen[-1][1] == {name: history[name][0] for name in ("val_loss", "val_mae")}
    with pytest.raises(OptionError, match="Metrics hands values to a function"):
        tr.callbacks.Metrics("loss")


def test_rows_of_a_csv_file(tmp_path):
    path = tmp_path / "new" / "log.csv"
    logger = tr.callbacks.CSVLogger(path)
    trainer = trainer_of()
    losses = [trainer.fit(ELEMENTS, callbacks=[logger]).loss]
    history = trainer.fit(ELEMENTS, epochs=2, validation_data=HELD_OUT, callbacks=[logger])
    rows = table(path)
    assert [int(row["step"]) for row in rows] == list(range(36)), "fits in a row are one table"
    found = np.float32([float(row["loss"]) for row in rows])
    assert_bits_equal(found, np.concatenate([*losses, history.loss]))
    validated = {int(row["step"]): row["val_loss"] for row in rows if row["val_loss"]}
    assert validated == {23: str(history["val_loss"][0]), 35: str(history["val_loss"][1])}


def test_when_a_csv_file_begins_anew(tmp_path):
    path, trainer = tmp_path / "log.csv", trainer_of()
    logger = tr.callbacks.CSVLogger(path)
    trainer.fit(ELEMENTS, steps=6, callbacks=[logger])
    trainer.save(tmp_path / "six")
    trainer.fit(ELEMENTS, steps=8, callbacks=[logger])
    trainer.restore(tmp_path / "six")
    history = trainer.fit(ELEMENTS[6:], steps=3, validation_data=HELD_OUT, callbacks=[logger])
    assert [row["step"] for row in table(path)] == [str(step) for step in range(9)]
    assert table(path)[-1]["val_loss"] == str(history["val_loss"][0])
    trainer.fit(ELEMENTS, steps=2, callbacks=[tr.callbacks.CSVLogger(path)])
    assert [row["step"] for row in table(path)] == ["9", "10"], "another object"
    trainer_of().fit(ELEMENTS, steps=2, callbacks=[logger])
    assert [row["step"] for row in table(path)] == ["0", "1"], "another trainer"


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_events_for_tensorboard_while_it_runs(tmp_path):
    pytest.importorskip("tensorboardX")

    class Reading(tr.Callback):
        """Waits, during the fit, until the file holds a loss for each step so far."""

        executions = 0

        def on_execution_end(self, trainer, execution):
            (file,) = tmp_path.glob("events*")
            steps = execution.first_step + execution.steps
            wait_until(
                lambda: file.read_bytes().count(b"loss") >= steps,
                "the values of an execution did not arrive",
            )
            self.executions += 1

    board, reading = tr.callbacks.TensorBoard(tmp_path), Reading()
    trainer_of().fit(ELEMENTS, validation_data=HELD_OUT, callbacks=[board, reading])
    assert reading.executions == 3
    (file,) = tmp_path.glob("events*")
    assert b"val_loss" in file.read_bytes()


# -- one at a time ------------------------------------------------------------------------------


def test_a_trainer_entered_twice():
    class Again(tr.Callback):
        def on_execution_end(self, trainer, execution):
            trainer.evaluate(HELD_OUT)  # is fine
            trainer.fit(ELEMENTS)

    trainer = trainer_of()
    with pytest.raises(ProgramError, match="runs one fit at a time, and one is running"):
        trainer.fit(ELEMENTS, callbacks=[Again()])
    assert len(trainer.fit(ELEMENTS).loss) == 12
    assert mlp_apply(trainer.params, ELEMENTS[0][0]).shape == (4,)
