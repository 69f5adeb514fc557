"""`evaluate`, `predict` and `explain`."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_apply, mlp_loss, regression
from tailrace.errors import DataError, DataExhausted, OptionError, ProgramError
from tailrace.trainer.evaluation import evaluate
from threads import infeed_threads

ELEMENTS = regression(7)


@pytest.fixture(params=[1, 2, 4], ids=lambda r: f"{r} replicas")
def trainer(request):
    return tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), replicas=request.param)


@pytest.fixture
def three_at_a_time(monkeypatch):
    """Executions of three passes, so that small datasets take several."""
    monkeypatch.setattr(evaluate, "piece_within", lambda length, bytes_per_pass: 3)


def outputs(params, x, y):
    return {"y": mlp_apply(params, x), "sum": y.sum(), "pair": jnp.stack([y[0], y[1]])}


@pytest.mark.usefixtures("three_at_a_time")
@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_evaluate_is_the_mean_over_all_elements(trainer, count):
    found = trainer.evaluate(ELEMENTS[:count])
    each = [mlp_loss(mlp(), *e) for e in ELEMENTS[:count]]
    assert found.keys() == {"loss", "mae"}
    assert_close(np.float32(found["loss"]), np.float32(np.mean([loss for loss, _ in each])))
    assert_close(np.float32(found["mae"]), np.float32(np.mean([aux["mae"] for _, aux in each])))
    assert not infeed_threads()


@pytest.mark.usefixtures("three_at_a_time")
@pytest.mark.parametrize("count", [1, 5, 7])
def test_predict_keeps_the_order_and_drops_nothing(trainer, count):
    found = trainer.predict(iter(ELEMENTS[:count]), outputs)
    each = [outputs(mlp(), *e) for e in ELEMENTS[:count]]
    # Results with the batch's leading dim are joined along it, all others are stacked.
    assert_close(found["y"], np.concatenate([e["y"] for e in each]))
    assert_close(found["sum"], np.stack([e["sum"] for e in each]))
    assert_close(found["pair"], np.stack([e["pair"] for e in each]))
    assert not infeed_threads()


@pytest.mark.usefixtures("three_at_a_time")
def test_predict_live_streams_the_same(trainer):
    stream = trainer.predict(iter(ELEMENTS), outputs, live=True)
    found = list(stream)
    assert len(found) == 7
    for element, expected in zip(found, ELEMENTS, strict=True):
        assert_close(element, jax.tree.map(np.asarray, outputs(mlp(), *expected)))
    assert not infeed_threads()


def test_live_results_come_before_the_dataset_ends():
    """The dataset waits for the first result: it must arrive while the rest is not there yet."""
    arrived = []

    def elements():
        yield ELEMENTS[0]
        yield ELEMENTS[1]
        for element in ELEMENTS[2:]:
            assert arrived, "no result came before the third element was asked for"
            yield element

    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    for result in trainer.predict(elements(), outputs, live=True):
        arrived.append(result)
    assert len(arrived) == 7


def test_a_stream_that_is_left_ends_its_thread():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    stream = trainer.predict(ELEMENTS, outputs, live=True)
    next(stream)
    stream.close()
    assert not infeed_threads()


def test_a_stream_uses_the_parameters_of_its_start():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.5), mlp(), steps_per_execution=2)
    stream = trainer.predict(ELEMENTS, outputs, live=True)
    first = next(stream)
    trainer.fit(ELEMENTS, steps=4)
    rest = list(stream)
    expected = [outputs(mlp(), *e)["y"] for e in ELEMENTS]
    assert_close(np.stack([r["y"] for r in [first, *rest]]), np.stack(expected))


def test_evaluating_does_not_disturb_training():
    elements = regression(8)

    def train(evaluate):
        trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), steps_per_execution=2)
        history = []
        for start in (0, 4):
            history.append(trainer.fit(elements[start : start + 4], steps=4).loss)
            if evaluate:
                trainer.evaluate(ELEMENTS)
                trainer.predict(ELEMENTS, outputs)
        return trainer.params, np.concatenate(history)

    assert_bits_equal(train(True), train(False))


def test_evaluate_sees_what_was_trained():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    before = trainer.evaluate(ELEMENTS)["loss"]
    trainer.fit(ELEMENTS, epochs=5)
    after = trainer.evaluate(ELEMENTS)["loss"]
    mean = np.mean([mlp_loss(trainer.params, *e)[0] for e in ELEMENTS])
    assert after < before
    assert_close(np.float32(after), np.float32(mean))


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda p, x, y: y.mean(), {"loss"}),
        (lambda p, x, y: {"a": y.mean(), "b": {"c": y.max()}}, {"a", "b/c"}),
        (lambda p, x, y: (y.mean(), y.max()), {"loss", "aux"}),
        (lambda p, x, y: (y.mean(), {"m": y.max()}), {"loss", "m"}),
        (lambda p, x, y: {"count": (y > 0).sum()}, {"count"}),
    ],
)
def test_functions_that_evaluate_takes(fn, names):
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    found = trainer.evaluate(ELEMENTS, fn)
    assert found.keys() == names
    assert all(isinstance(value, float) for value in found.values())
    if names == {"count"}:
        assert found["count"] == np.mean([(y > 0).sum() for _, y in ELEMENTS])


@pytest.mark.parametrize("replicas", [1, 2])
def test_model_state_is_read_and_left_alone(replicas):
    def loss_fn(params, state, x, y):
        error = mlp_apply(params, x) - y + state["shift"]
        return (error**2).mean(), ({"shift": state["shift"] + 1}, {"shift": state["shift"]})

    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.0), mlp(), model_state={"shift": jnp.float32(2)}, replicas=replicas
    )
    expected = np.mean([loss_fn(mlp(), {"shift": 2.0}, *e)[0] for e in ELEMENTS])
    found = trainer.evaluate(ELEMENTS)
    assert_close(np.float32(found["loss"]), np.float32(expected))
    assert found["shift"] == 2
    assert trainer.evaluate(ELEMENTS, loss_fn) == found
    assert trainer.model_state["shift"] == 2
    predicted = trainer.predict(ELEMENTS, lambda params, state, x, y: state["shift"] + y)
    assert_close(predicted, np.concatenate([2 + y for _, y in ELEMENTS]))


def test_keys_differ_from_element_to_element():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), replicas=2)
    draw = lambda params, x, y: jax.random.bits(tr.key(), (), jnp.uint32)  # noqa: E731
    found = trainer.predict(regression(10), draw)
    assert len(np.unique(found)) == 10
    assert_bits_equal(trainer.predict(regression(10), draw), found)


def rows():
    return tuple(np.concatenate(leaf) for leaf in zip(*ELEMENTS, strict=True))


@pytest.mark.parametrize("size", [6, 27, 28, 40])
@pytest.mark.parametrize("kind", ["arrays", "kept", "list", "generator"])
def test_every_row_counts(trainer, kind, size):
    """28 rows: with a smaller last batch, without, and with nothing else."""
    x, y = rows()
    cut = [(x[i : i + size], y[i : i + size]) for i in range(0, 28, size)]
    data = {
        "arrays": lambda: tr.batches((x, y), size, shuffle=True),
        "kept": lambda: tr.batches((x, y), size, drop_remainder=False),
        "list": lambda: cut,
        "generator": lambda: iter(cut),
    }[kind]()
    found = trainer.evaluate(data)
    loss, aux = mlp_loss(mlp(), x, y)
    assert_close(np.float32(found["loss"]), np.float32(loss))
    assert_close(np.float32(found["mae"]), np.float32(aux["mae"]))
    if kind != "arrays":  # which are shuffled
        again = cut if kind == "generator" else data
        assert_close(trainer.predict(again, lambda p, x, y: mlp_apply(p, x)), mlp_apply(mlp(), x))
    assert not infeed_threads()


def test_rows_that_are_dropped_on_purpose(trainer):
    x, y = rows()
    found = trainer.evaluate(tr.batches((x, y), 8, drop_remainder=True))
    assert_close(np.float32(found["loss"]), np.float32(mlp_loss(mlp(), x[:24], y[:24])[0]))


# -- how values become one ----------------------------------------------------------------------


class Range:
    """A metric: the span of all values."""

    def init(self):
        return (np.inf, -np.inf)

    def update(self, state, value):
        return (min(state[0], value.min()), max(state[1], value.max()))

    def result(self, state):
        return state[1] - state[0]


def statistics(p, x, y):
    positive = (y > 0).astype(jnp.int32)
    return {
        "mean": y.mean(),
        "counts": jnp.stack([positive.sum(), (1 - positive).sum()]),
        "columns": x.mean(axis=0),
        "peak": y.max(),
        "sum": y.sum(),
    }


def test_rules_of_combining(trainer):
    x, y = rows()
    data = tr.batches((x, y), 8)
    found = trainer.evaluate(data, statistics, combine={"peak": "max", "sum": "sum"})
    assert found["counts"].tolist() == [(y > 0).sum(), (y <= 0).sum()], "integers are summed"
    assert_close(np.float32(found["columns"]), x.mean(axis=0))
    assert_close(np.float32(found["mean"]), y.mean())
    assert np.float32(found["peak"]) == y.max()
    assert_close(np.float32(found["sum"]), y.sum())
    assert isinstance(found["mean"], float)


def test_metrics_and_functions_of_all_values(trainer):
    x, y = rows()
    data = tr.batches((x, y), 8)
    only = lambda p, x, y: {"peak": y.max()}  # noqa: E731
    peaks = [part.max() for part in np.split(y, [8, 16, 24])]
    assert trainer.evaluate(data, only, combine=Range())["peak"] == max(peaks) - min(peaks)
    found = trainer.evaluate(data, only, combine={"peak": np.median})
    assert_close(np.float32(found["peak"]), np.float32(np.median(peaks)))
    assert np.float32(trainer.evaluate(data, only, combine="last")["peak"]) == peaks[-1]


def test_results_that_are_no_floats(trainer):
    data = tr.batches(rows(), 8)

    def turned(params, x, y):
        total = jax.lax.complex(jnp.zeros(()), x.sum())
        return {"whole": total, "each": jax.lax.complex(y[:2], y[:2]), "peak": y.max()}

    class Grade:
        def init(self):
            return 0

        def update(self, state, value):
            return state + 1

        def result(self, state):
            return "good"

    found = trainer.evaluate(data, turned, combine={"peak": Grade(), "whole": "sum", "each": None})
    x, y = rows()
    assert found["peak"] == "good"
    np.testing.assert_allclose(found["whole"], x.sum(dtype=np.float64) * 1j, rtol=1e-5)
    mean = sum(len(part) * part[:2].astype(np.float64) for part in np.split(y, [8, 16, 24]))
    np.testing.assert_allclose(found["each"], mean / len(y) * (1 + 1j), rtol=1e-5)


def test_rules_that_are_none(trainer):
    with pytest.raises(
        OptionError, match=r"'mean', 'sum', 'max', 'min', 'last', an object with init"
    ):
        trainer.evaluate(ELEMENTS, combine="middle")
    with pytest.raises(
        OptionError, match="by the names of what the function returns: 'loss', 'mae'"
    ):
        trainer.evaluate(ELEMENTS, combine={"accuracy": "max"})
    with pytest.raises(OptionError, match="Mean, which keeps its state in itself, as Keras'"):
        trainer.evaluate(ELEMENTS, combine={"loss": Mean()})


class Mean:
    """As Keras' metrics are."""

    def update_state(self, values, sample_weight=None): ...

    def __call__(self, *args): ...


@pytest.mark.parametrize("rule", ["mean", "sum", "max", "last"])
def test_values_of_rows_have_no_rule(trainer, rule):
    match = r"'v' batch by batch.*\[8\], then \[4\] of a batch with 4"
    with pytest.raises(ProgramError, match=match):
        trainer.evaluate(tr.batches(rows(), 8), lambda p, x, y: {"v": y}, combine=rule)


def test_metrics_with_several_results(trainer):
    both = lambda peaks: {"low": peaks.min(), "high": peaks.max()}  # noqa: E731
    data = tr.batches(rows(), 8)
    found = trainer.evaluate(data, lambda p, x, y: {"peak": y.max()}, combine={"peak": both})
    peaks = [part.max() for part in np.split(rows()[1], [8, 16, 24])]
    assert found == {"peak/low": min(peaks), "peak/high": max(peaks)}


def test_arrays_of_a_validation_are_named(caplog):
    """The history has scalars; what is not in it is said."""
    evaluated = lambda p, x, y: {"loss": mlp_loss(p, x, y)[0], "rows": jnp.ones(2)}  # noqa: E731
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.01), mlp(), eval_fn=evaluated)
    history = trainer.fit(ELEMENTS[:2], validation_data=ELEMENTS[:2], validation_every=2)
    assert "val_loss" in list(history)
    assert "'rows' of eval_fn are arrays, and not in the history" in caplog.text


# -- training and evaluating --------------------------------------------------------------------


def dropped(params, x, y):
    if tr.training():
        x = jnp.where(jax.random.bernoulli(tr.key(), 0.5, x.shape), x, 0)
    return ((mlp_apply(params, x) - y) ** 2).mean()


def test_training_is_a_bool_of_the_step():
    assert tr.training() is False
    trainer = tr.Trainer(dropped, optax.sgd(0.0), mlp())
    history = trainer.fit(ELEMENTS, epochs=1)
    plain = [((mlp_apply(mlp(), x) - y) ** 2).mean() for x, y in ELEMENTS]
    assert not np.allclose(history.loss, plain)
    assert_close(np.float32(trainer.evaluate(ELEMENTS)["loss"]), np.float32(np.mean(plain)))
    assert tr.training() is False


def test_a_loss_that_draws_keys_is_noted_once(caplog):
    def noisy(params, x, y):
        return dropped(params, x * jax.random.uniform(tr.key(), x.shape), y)

    for loss, notes in ((dropped, 0), (noisy, 1)):
        trainer = tr.Trainer(loss, optax.sgd(0.0), mlp())
        trainer.evaluate(ELEMENTS)
        trainer.evaluate(ELEMENTS)
        found = [r for r in caplog.records if "draws random keys" in r.getMessage()]
        assert len(found) == notes


def test_an_eval_fn_is_used_instead_of_the_loss():
    def eval_fn(params, x, y):
        return {"worst": jnp.abs(mlp_apply(params, x) - y).max()}

    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), eval_fn=eval_fn)
    assert trainer.evaluate(ELEMENTS).keys() == {"worst"}
    assert trainer.evaluate(ELEMENTS, mlp_loss).keys() == {"loss", "mae"}
    history = trainer.fit(ELEMENTS, validation_data=ELEMENTS)
    assert history["val_worst"] == trainer.evaluate(ELEMENTS)["worst"]
    with pytest.raises(OptionError, match="eval_fn is a function of parameters and batch"):
        tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), eval_fn=3)


def test_a_generator_is_used_up_after_one_validation():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    rows = (element for element in ELEMENTS[:2])
    text = (
        r"^fit\(epochs=2\) reads validation_data 2 times, but generator <genexpr> can be read only "
        r"once. Give a list, tr.batches\(...\), or a function that makes an iterator.$"
    )
    with pytest.raises(DataError, match=text):
        trainer.fit(ELEMENTS[:2], epochs=2, validation_data=rows)
    with pytest.raises(DataError, match=r"^fit\(steps=2\) reads validation_data 2 times"):
        trainer.fit(ELEMENTS[:2], steps=2, validation_data=rows, validation_every=1)
    assert trainer.step == 0  # before anything is trained
    assert len(trainer.fit(ELEMENTS[:2], steps=2, validation_data=rows).validated) == 1
    text = "^Each validation reads all of validation_data. .* used up after one pass"
    with pytest.raises(DataExhausted, match=text):
        trainer.fit(ELEMENTS[:2], steps=2, validation_data=rows)
    with pytest.raises(DataExhausted, match="^A dataset needs .* used up after one pass"):
        trainer.evaluate(rows)
    history = trainer.fit(ELEMENTS[:2], epochs=2, validation_data=lambda: iter(ELEMENTS[:2]))
    assert len(history.validated) == 2


def test_sentences():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    with pytest.raises(DataExhausted, match="at least one element. Received: an empty list.$"):
        trainer.evaluate([])
    with pytest.raises(ProgramError, match="does not fit"):
        trainer.predict(ELEMENTS, lambda p: p)
    for use in (trainer.evaluate, trainer.predict):
        for result in (None, {}):
            with pytest.raises(ProgramError, match=f"<lambda> returns at least .*: {result}"):
                use(ELEMENTS, lambda p, x, y, result=result: result)
    endless = tr.batches((np.zeros((8, 3), np.float32), np.zeros(8, np.float32)), 4, repeat=True)
    for use in (
        lambda: trainer.evaluate(endless),
        lambda: trainer.predict(endless, outputs),
    ):
        with pytest.raises(tr.TailraceError, match="repeats without end"):
            use()
    # A stream may continue for as long as it is read.
    stream = trainer.predict(endless, outputs, live=True)
    assert next(stream)["y"].shape == (4,)
    stream.close()


# -- explain ------------------------------------------------------------------------------------


def test_explain_before_and_after_training():
    trainer = tr.Trainer(mlp_loss, optax.adam(0.1), mlp(), accumulation=3, replicas=2)
    with jax.numpy_dtype_promotion("standard"):
        found = trainer.explain(ELEMENTS[0], steps=5)
    assert found.steps_per_execution == 5
    assert found.effective_batch_size == 4 * 3 * 2
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp()))
    assert found.parts["parameters"] == params
    assert found.parts["optimizer state"] >= 2 * params
    assert found.parts["elements"] == 5 * 3 * (4 * 3 * 4 + 4 * 4)
    assert "model state" not in found.parts
    assert found.peak_bytes > found.parts["parameters"]
    assert found.flops_per_step > 0
    assert found.compile_s > 0
    text = str(found)
    assert "5 steps an execution" in text
    assert "effective batch size: 24" in text
    assert "parameters" in text


def test_explaining_does_not_disturb_training():
    def train(explain):
        trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), steps_per_execution=2)
        history = trainer.fit(iter(regression(8)), steps=2)
        if explain:
            trainer.explain(ELEMENTS[0])
        rest = trainer.fit(regression(8)[2:], steps=4)
        return np.concatenate([history.loss, rest.loss]), trainer.params

    assert_bits_equal(train(True), train(False))


def test_explain_without_a_leading_dim():
    trainer = tr.Trainer(lambda w, x: w * x, optax.sgd(0.1), jnp.float32(1))
    found = trainer.explain((np.float32(1),), steps=1)
    assert found.effective_batch_size is None
    assert "effective batch size: unknown" in str(found)


def test_explain_needs_steps():
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp())
    for steps in (0, -1, 2.5):
        with pytest.raises(OptionError, match=f"whole number >= 1. Received: steps={steps}"):
            trainer.explain(ELEMENTS[0], steps=steps)


def test_a_stream_keeps_its_dataset_when_another_is_read_meanwhile(trainer):
    stream = trainer.predict(ELEMENTS, outputs, live=True)
    found = [next(stream)]
    trainer.predict(ELEMENTS[:2], outputs)
    found += list(stream)
    total = jax.jit(jnp.sum)
    assert_bits_equal([f["sum"] for f in found], [total(y) for _, y in ELEMENTS])


def test_programs_of_throw_away_functions_do_not_pile_up(trainer):
    kept = []
    for _ in range(evaluate.MOST_RUNNERS + 2):
        total = lambda params, x, y: y.sum()  # noqa: E731
        kept.append(weakref.ref(total))
        trainer.evaluate(ELEMENTS[:1], total)
    del total
    gc.collect()
    assert sum(one() is not None for one in kept) == evaluate.MOST_RUNNERS


def test_explain_counts_the_operations_of_all_microbatches():
    def flops(accumulation):
        trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), accumulation=accumulation)
        return trainer.explain(ELEMENTS[0]).flops_per_step

    assert 3 * flops(1) < flops(8) <= 9 * flops(1)


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit"])
def test_a_dataset_that_raises_when_it_is_opened_is_named(call):
    class Closed:
        def __iter__(self):
            raise OSError("no such bucket")

    trainer = tr.Trainer(lambda w, x: ((x - w) ** 2).mean(), optax.sgd(0.1), np.float32(0))
    data = [np.ones(2, np.float32)]
    calls = {
        "evaluate": lambda: trainer.evaluate(Closed()),
        "predict": lambda: trainer.predict(Closed(), lambda w, x: x - w),
        "fit": lambda: trainer.fit(data, epochs=1, validation_data=Closed(), progress=False),
    }
    text = r"dataset \(Closed\) raised OSError .*no such bucket"
    with pytest.raises(tr.errors.ProducerError, match=text):
        calls[call]()
    assert len(trainer.fit(data, epochs=1, progress=False)) == 1  # it can be used as before
