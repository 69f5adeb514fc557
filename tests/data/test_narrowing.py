"""64-bit values on their way to 32 bits: those that fit pass, others are errors with leaf and value."""

import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.data.dtypes import narrowed, store_narrowed
from tailrace.errors import DataError, ProgramError

ROWS = 24
NARROWED = "int64 data is narrowed to int32 on its way to the device"
X = np.linspace(0, 1, ROWS * 2, dtype=np.float32).reshape(ROWS, 2)
# The dtype, a value that does not fit, one that does, and its text.
VALUES = {
    "int64": (2**40 + 5, 2**31 - 1, "1099511627781"),
    "int64 below": (-(2**31) - 1, -(2**31), "-2147483649"),
    "uint64": (2**32, 2**32 - 1, "4294967296"),
    "float64": (1e300, np.finfo(np.float32).max, "1e[+]300"),
    "complex128": (1e300j, 1e30j, "1e[+]300j"),
}


def column(name, which, at=13):
    dtype = np.dtype(name.split()[0])
    values = np.ones(ROWS, dtype)
    values[at] = VALUES[name][which]
    return values


def loss_fn(w, batch):
    return ((batch["x"] @ w) ** 2).mean(), {"seen": batch["y"].real.astype(np.float32).max()}


def lists(data):
    return [{k: v[n : n + 4] for k, v in data.items()} for n in range(0, ROWS, 4)]


SOURCES = {
    "tr.batches": lambda data: tr.batches(data, 4),
    "resident": lambda data: tr.InfeedQueue(tr.batches(data, 4), resident=True),
    "elements": lists,
    "a generator": lambda data: lambda: iter(lists(data)),
}
USES = {
    "fit": lambda trainer, data: trainer.fit(data, epochs=1, progress=False),
    "evaluate": lambda trainer, data: trainer.evaluate(data),
    "predict": lambda trainer, data: trainer.predict(data, lambda w, b: b["y"]),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("source", SOURCES)
def test_data_that_does_not_fit_is_refused(source, name):
    text = rf"which must hold them\. Received: \(?0?\+?{VALUES[name][2]}\)? in leaf \['y'\]"
    if source == "resident":
        queue = SOURCES[source]({"x": X, "y": column(name, 0)})
        program = tr.compile(
            lambda c: tr.repeat(
                2, lambda c, x, y: c + y.real.sum().astype(np.float32), c, infeed=queue
            )
        )
        with queue, pytest.raises(DataError, match=rf"Received: \(?0?\+?{VALUES[name][2]}"):
            program(np.float32(0))
        return
    for use in USES.values() if source == "tr.batches" and name == "int64" else [USES["evaluate"]]:
        trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.ones(2, np.float32))
        data = SOURCES[source]({"x": X, "y": column(name, 0)})
        with pytest.raises(DataError, match=text):
            use(trainer, data)


def test_data_that_fits_passes(caplog):
    for name, (_, fits, _) in VALUES.items():
        trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.ones(2, np.float32))
        found = trainer.predict(lists({"x": X, "y": column(name, 1)}), lambda w, b: b["y"])
        assert found.max() if "below" not in name else found.min() == np.array(fits, found.dtype)
        assert found[13] == np.array(fits, found.dtype)
    assert sum(text.startswith(NARROWED) for text in caplog.messages) == 1


def test_floats_that_were_not_finite_stay():
    values = np.array([np.inf, -np.inf, np.nan, 1e-300, 1.5])
    target = np.empty((1, 5), np.float32)
    store_narrowed(target, 0, values)
    np.testing.assert_array_equal(target[0], values.astype(np.float32))
    assert narrowed(values, values.dtype) is values


def test_parameters_and_arguments_that_do_not_fit():
    def loss(w, state, x):
        return (w * x).sum(), ({"n": state["n"]}, None)

    for params, state, text in (
        (np.array([1.0, 1e300]), {"n": 1}, r"Received: 1e\+300.*This is 'params' of params"),
        (np.ones(2), {"n": np.int64(2**40)}, "Received: 1099511627776.*This is 'n' of model_state"),
    ):
        with pytest.raises(ProgramError, match=text):
            tr.Trainer(loss, optax.sgd(0.1), params, model_state=state)
    trainer = tr.Trainer(loss, optax.sgd(0.1), np.ones(2), model_state={"n": np.int64(7)})
    assert trainer.model_state["n"] == 7
    program = tr.compile(lambda x: tr.repeat(2, lambda x: x + 1, x))
    with pytest.raises(ProgramError, match="Received: 1099511627776.* of Arguments of a program"):
        program(np.array([2**40]))
    assert program(np.array([5])).tolist() == [7]
