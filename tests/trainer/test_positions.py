"""Datasets with a position continue from it: what was used before is not read again."""

import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal
from tailrace.errors import DataError

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


class Counted:
    """Examples that count how many of them were read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        self.reads += 1
        return X[row]


class StatefulLoader:
    """A loader like torchdata's: its state is its position, and the next iterator begins there."""

    def __init__(self, examples):
        self.examples, self.epoch, self.row, self.loaded = examples, 0, 0, False

    def state_dict(self):
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state):
        self.epoch, self.row, self.loaded = state["epoch"], state["row"], True

    def __iter__(self):
        if not self.loaded:
            self.row = 0
        self.loaded = False
        return self.batches()

    def batches(self):
        order = np.random.default_rng(self.epoch).permutation(64)
        while self.row < 64:
            self.row += 4
            yield np.stack([self.examples[row] for row in order[self.row - 4 : self.row]])
        self.epoch, self.row = self.epoch + 1, 0


def with_state(examples):
    return StatefulLoader(examples)


def from_grain(examples):
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(examples).shuffle(seed=3).batch(4)
    # Its threads would read all of so small a dataset ahead.
    return data.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


class Reshuffled:
    """Another order in each iteration, as a PyTorch DataLoader with shuffle=True has."""

    def __init__(self, examples):
        self.examples, self.rng = examples, np.random.default_rng(3)

    def __iter__(self):
        order = self.rng.permutation(64)
        for first in range(0, 64, 4):
            yield np.stack([self.examples[row] for row in order[first : first + 4]])


class ReshuffledOfLength(Reshuffled):
    def __len__(self):
        return 16


def make_trainer():
    return tr.Trainer(
        lambda w, x: ((x @ w - 1) ** 2).mean(),
        optax.sgd(0.01),
        np.zeros(3, np.float32),
        steps_per_execution=2,
    )


def trained(make, directory, kill=None, epochs=3):
    examples = Counted()
    trainer = make_trainer()
    kept = tr.Checkpoint(directory, every=4)
    callbacks = [] if kill is None else [Kill(kill)]
    trainer.fit(make(examples), epochs=epochs, checkpoint=kept, callbacks=callbacks, progress=False)
    return trainer, examples.reads


@pytest.mark.parametrize("make", [with_state, from_grain])
def test_what_was_used_is_not_read_again(tmp_path, make):
    """Killed in the second epoch of sixteen steps; the rest is twenty steps."""
    expected, whole = trained(make, tmp_path / "never")
    with pytest.raises(Killed):
        trained(make, tmp_path / "kept", kill=14)
    found, reads = trained(make, tmp_path / "kept")
    assert_bits_equal(found.params, expected.params)
    assert_bits_equal(found.history.loss, expected.history.loss)
    assert whole >= 3 * 64
    # The first element is read once more to learn its form, and two steps are read ahead.
    assert reads <= 20 * 4 + 4 * 4, "in constant time, whatever was used before"


@pytest.mark.parametrize("make", [with_state, from_grain, Reshuffled, ReshuffledOfLength])
def test_fits_that_share_a_dataset(tmp_path, make):
    """Killed in the second fit: the first is finished, and the dataset continues as after it."""

    def script(directory, kill=None):
        data = make(Counted())
        trainer = make_trainer()
        kept = tr.Checkpoint(directory, every=4)
        for fit in ({"epochs": 2}, {"steps": 6}, {"epochs": 1}):
            callbacks = [] if kill is None or trainer.step < 32 else [Kill(kill)]
            trainer.fit(data, checkpoint=kept, callbacks=callbacks, progress=False, **fit)
        return trainer

    expected = script(tmp_path / "never")
    for kill in (0, 1, 4):
        with pytest.raises(Killed):
            script(tmp_path / "kept", kill)
    found = script(tmp_path / "kept")
    assert_bits_equal(found.params, expected.params)
    assert_bits_equal(found.history.loss, expected.history.loss)


def test_a_state_that_cannot_be_kept_is_a_sentence(tmp_path):
    class Odd(StatefulLoader):
        def state_dict(self):
            return {"generator": np.random.default_rng()}

    with pytest.raises(DataError, match="kept in a checkpoint as JSON or bytes. Received: a dict"):
        trained(lambda examples: Odd(examples), tmp_path / "kept")


def test_which_rows_an_execution_used(tmp_path):
    """Executions of two steps of three microbatches: six batches each."""
    seen = []
    data = tr.batches(np.arange(48, dtype=np.float32), 2, shuffle=True, seed=5)

    class Rows(tr.Callback):
        def on_execution_end(self, trainer, execution):
            first = execution.first_step * 3
            seen.append(data.rows(first, execution.steps * 3))

    trainer = tr.Trainer(
        lambda w, x: ((w * x).sum(), {"first": x[0]}),
        optax.sgd(0.0),
        np.float32(1),
        accumulation=3,
        steps_per_execution=2,
    )
    trainer.fit(data, steps=8, callbacks=[Rows()], progress=False)
    rows = np.concatenate(seen)
    assert sorted(rows.reshape(-1).tolist()) == list(range(48))
    assert trainer.history.each("first").reshape(-1).tolist() == rows[:, 0].tolist()


class OneState:
    """An iterator that returns the state that it goes on changing."""

    def __init__(self):
        self.state = {"row": [0]}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["row"][0] == 16:
            raise StopIteration
        self.state["row"][0] += 1
        return X[4 * self.state["row"][0] - 4 : 4 * self.state["row"][0]]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_a_state_that_is_changed_afterwards(tmp_path):
    def trained(directory, data, callbacks=()):
        trainer = make_trainer()
        kept = tr.Checkpoint(directory, every=4)
        trainer.fit(data, steps=16, checkpoint=kept, callbacks=callbacks, progress=False)
        return trainer

    expected = trained(tmp_path / "whole", OneState())
    with pytest.raises(Killed):
        trained(tmp_path / "killed", OneState(), [Kill(5)])
    found = trained(tmp_path / "killed", OneState())
    assert_bits_equal(found.params, expected.params)
    assert_bits_equal(found.history.loss, expected.history.loss)


def test_a_state_that_is_refused(tmp_path, caplog):
    """As a Grain DataLoader does, which compares what Python shows of its data source."""

    class Source:
        pass

    class Compared(OneState):
        def __init__(self):
            super().__init__()
            self.source = Source()

        def get_state(self):
            return {**self.state, "source": repr(self.source)}

        def set_state(self, state):
            if state["source"] != repr(self.source):
                raise ValueError("another source.")
            self.state = state

    def fit(*callbacks):
        trainer = make_trainer()
        kept = tr.Checkpoint(tmp_path, every=4)
        trainer.fit(data, steps=16, checkpoint=kept, callbacks=callbacks, progress=False)

    data = Compared()
    with pytest.raises(Killed):
        fit(Kill(5))
    assert "has an address in memory: <" in caplog.text
    data, before = Compared(), data  # alive, or the next one could have its address
    with pytest.raises(DataError, match=r"refuses the state .*: ValueError: another source\. Give"):
        fit()
    assert before is not data
