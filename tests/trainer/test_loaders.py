"""Datasets are iterated as a `for` loop would, whatever their kind, and also after a resume."""

import contextlib
import random
import sys

import numpy as np
import optax
import pytest
from loader_kinds import ELEMENTS, KINDS, REFUSED, element, plain_loop

import tailrace as tr
from killed_fits import Kill, Killed

EPOCHS = 3
HELD = [name for name in KINDS if name not in REFUSED]


class BeforeEpochs(tr.Callback):
    """What the script does before each epoch but the first, which it begins itself."""

    def __init__(self, before_epoch):
        self.before_epoch = before_epoch

    def on_epoch_end(self, trainer, epoch, logs):
        self.before_epoch(epoch + 1)


def made(name):
    loader = KINDS[name]()
    loader, before_epoch = loader if isinstance(loader, tuple) else (loader, None)
    if before_epoch is not None:
        before_epoch(0)
    return loader, [] if before_epoch is None else [BeforeEpochs(before_epoch)]


def make_trainer():
    return tr.Trainer(
        lambda w, x, y=0.0: x.mean() + 0 * (w.sum() + y),
        optax.sgd(0.1),
        np.zeros(2, np.float32),
        steps_per_execution=2,
    )


def expected_of(name):
    """The numbers of the elements in three epochs, of a loop that nothing interrupts."""
    if name == "arrays_of_a_file":  # the epoch decides the order of tr.batches
        data = KINDS[name]()
        return [float(b["x"].mean()) for epoch in range(EPOCHS) for b in data.iterate(epoch)]
    loader = KINDS[name]()
    return plain_loop(getattr(loader, "plain", loader), EPOCHS)


def seed(number):
    """The generators of the process, as they are when it starts."""
    np.random.seed(number)
    random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


@pytest.mark.filterwarnings("ignore:os.fork")  # the workers of loaders do not touch JAX
@pytest.mark.parametrize("name", HELD)
def test_every_epoch_is_that_of_a_for_loop(name):
    seed(11)
    expected = expected_of(name)
    seed(11)
    loader, callbacks = made(name)
    found = make_trainer().fit(loader, epochs=EPOCHS, callbacks=callbacks, progress=False).loss
    if name == "class_with_an_unseeded_generator":  # the loop had another
        expected, found = sorted(expected), np.sort(found)
    assert found.tolist() == expected


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize("name", HELD)
def test_a_resumed_fit_goes_on_as_the_loop(name, tmp_path):
    """Killed after an epoch, in the next, and in the last; each process has other seeds."""
    seed(11)
    expected, found = expected_of(name), None
    for number, kill in enumerate((4, 2, 4, None)):
        seed(11 + number)
        loader, callbacks = made(name)
        kept = tr.Checkpoint(tmp_path, every=4)
        callbacks += [] if kill is None else [Kill(kill)]
        with contextlib.nullcontext() if kill is None else pytest.raises(Killed):
            found = make_trainer().fit(
                loader, epochs=EPOCHS, callbacks=callbacks, checkpoint=kept, progress=False
            )
    assert found is not None
    assert len(found.loss) == len(expected)
    if name == "class_with_an_unseeded_generator":
        for epoch in found.loss.reshape(EPOCHS, ELEMENTS):
            assert sorted(epoch) == list(range(ELEMENTS))
        return
    assert found.loss.tolist() == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_a_sentence(name):
    loader, callbacks = made(name)
    with pytest.raises(tr.TailraceError, match=REFUSED[name]):
        make_trainer().fit(loader, epochs=EPOCHS, callbacks=callbacks, progress=False)


class Watched:
    """Says what a loop does with it."""

    def __init__(self, length=None):
        self.log, self.length = [], length

    def __len__(self):
        if self.length is None:
            raise TypeError("unknown")
        return self.length

    def __iter__(self):
        self.log.append("iter")
        try:
            yield from map(element, range(ELEMENTS))
            self.log.append("end")
        finally:
            self.log.append("closed")


WHOLE = ["iter", "end", "closed"]


@pytest.mark.parametrize("length", [None, ELEMENTS, ELEMENTS - 3, ELEMENTS + 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_iter_is_called_once_for_each_epoch(length, accumulation):
    """Also in a second fit; two elements do not fill a step of three, and are read all the same."""
    loader, held_out = Watched(length), Watched(length)
    trainer = tr.Trainer(
        lambda w, x: x.mean() + 0 * w.sum(),
        optax.sgd(0.1),
        np.zeros(2, np.float32),
        steps_per_execution=2,
        accumulation=accumulation,
    )
    for epochs in (2, 1):
        history = trainer.fit(loader, epochs=epochs, validation_data=held_out, progress=False)
        assert len(history.loss) == epochs * (ELEMENTS // accumulation)
        assert loader.log == held_out.log == WHOLE * epochs
        loader.log.clear(), held_out.log.clear()
    assert trainer.evaluate(loader, lambda w, x: x.sum(), combine="sum")["loss"] == 56
    assert trainer.predict(loader, lambda w, x: x).shape == (2 * ELEMENTS,)
    assert loader.log == WHOLE * 2


@pytest.mark.parametrize("length", [None, 2])
def test_a_generator_that_is_left_is_closed(length):
    """`fit(steps=)` is a loop with `break`: it reads its elements, and leaves; `len()` is a hint."""
    loader = Watched(length)
    trainer = make_trainer()
    assert trainer.fit(loader, steps=5, progress=False).loss.tolist() == [0, 1, 2, 3, 4]
    assert loader.log == ["iter", "closed"]
    with pytest.raises(tr.errors.DataExhausted, match="This one has 8; 8 steps were done"):
        trainer.fit(loader, steps=9, progress=False)


def test_an_iterator_that_is_used_up_is_a_sentence():
    class Once:
        def __init__(self):
            self.rows = iter(range(ELEMENTS))

        def __iter__(self):
            return self

        def __next__(self):
            return element(next(self.rows))

    with pytest.raises(tr.errors.DataExhausted, match="used up after one pass. To read it again"):
        make_trainer().fit(Once(), epochs=2, progress=False)


@pytest.mark.parametrize("column", [[[1.0, 2.0], [3.0]], [1.0, None], [1, "a"]])
def test_lists_that_are_no_arrays_are_a_sentence(column):
    with pytest.raises(
        tr.errors.DataError, match=r"leaf \['x'\], a list of 2 .* Pad it in the dataset"
    ):
        make_trainer().fit([{"x": column}] * 4, epochs=1, progress=False)
