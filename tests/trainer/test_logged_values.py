"""Values of steps that `log=` asks for: those that the plain program computes, wherever it runs."""

import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.runs.info import read_info, write_info
from tailrace.runs.storage.held import HeldDirectory

ROWS = np.random.default_rng(0).normal(size=(24, 4, 3)).astype(np.float32)
SCHEDULE = optax.exponential_decay(0.1, 3, 0.5)


def first(w, x):
    return jnp.tanh(x @ w)


def last(w, h):
    return jnp.mean((h - w) ** 2)


def loss_fn(w, x):
    return last(w[1], first(w[0], x))


def params():
    return [np.full((3, 2), 0.3, np.float32), np.ones(2, np.float32)]


def plain(elements, steps):
    """The norms of the mean gradients, with the plain update."""
    optimizer, w = optax.sgd(SCHEDULE), [jnp.asarray(leaf) for leaf in params()]
    held, norms = optimizer.init(w), []
    for step in range(steps):
        rows = ROWS[step * elements : (step + 1) * elements]
        grads = jax.tree.map(
            lambda *g: jnp.mean(jnp.stack(g), axis=0), *[jax.grad(loss_fn)(w, x) for x in rows]
        )
        norms.append(float(optax.tree.norm(grads)))
        updates, held = optimizer.update(grads, held, w)
        w = optax.apply_updates(w, updates)
    return np.array(norms, np.float32)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def assert_board_has(place, history):
    """Every column of the history is a scalar of the event file, step by step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
    for name in ("loss", "learning_rate", "grad_norm"):
        (tag,) = [tag for tag in events.Tags()["scalars"] if tag.split("/")[-1] == name]
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(len(history[name])))
        assert_close(np.array([scalar.value for scalar in scalars]), np.asarray(history[name]))


@pytest.mark.parametrize("where", ["one", "replicas", "pipeline"])
def test_norms_and_rates_are_those_of_the_plain_program(where, tmp_path):
    options = {
        "one": {},
        "replicas": {"replicas": 2, "accumulation": 2},
        "pipeline": {},
    }[where]
    function = loss_fn
    if where == "pipeline":
        function = tr.Pipeline([first, last], accumulation=4, device_mapping=[0, 1])
    trainer = tr.Trainer(
        function,
        optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE),
        params(),
        log=["learning_rate", "grad_norm"],
        observe=[tr.Tap("reduced/*", reduce="norm")],
        run_dir=tmp_path / "run",
        **options,
    )
    elements = 1 if where == "one" else 4
    steps = 6
    seen = []
    csv = tr.callbacks.CSVLogger(tmp_path / "log.csv")
    log = tr.callbacks.Metrics(lambda values, step: seen.append(values["grad_norm"]))
    board = tr.callbacks.TensorBoard(tmp_path / "board")
    history = trainer.fit(iter(ROWS), steps=steps, callbacks=[csv, log, board])
    assert_close(history["grad_norm"], plain(elements, steps))
    assert_close(history["learning_rate"], np.array([SCHEDULE(s) for s in range(steps)]))
    assert_close(np.array(seen), history["grad_norm"])
    run = tr.open_run(tmp_path / "run")
    np.testing.assert_array_equal(run.history["grad_norm"], history["grad_norm"])
    head = (tmp_path / "log.csv").read_text().splitlines()[0]
    assert set(head.split(",")) == {"step", "loss", "learning_rate", "grad_norm"}
    assert_board_has(tmp_path / "board", history)
    # Only what the user's own tap asked for is a record.
    assert {kind for _, kind in trainer.records} == {"norm"}
    assert [tap["reduce"] for tap in run.info["taps"]] == ["norm"]


def test_speeds_count_examples_tokens_and_operations():
    ids = np.zeros((24, 4, 7), np.int32)
    table = np.ones((5, 3), np.float32)

    def loss(w, ids):
        return jnp.mean((w[ids] @ w[:3].T) ** 2)

    trainer = tr.Trainer(
        loss,
        optax.sgd(0.1),
        table,
        accumulation=2,
        log={
            "learning_rate": lambda step: 0.5**step,
            "examples_per_second": True,
            "tokens_per_second": True,
            "mfu": 1e9,
        },
    )
    history = trainer.fit(iter(ids), steps=6)
    np.testing.assert_array_equal(history["learning_rate"], 0.5 ** np.arange(6, dtype=np.float32))
    speed = history["examples_per_second"]
    assert (speed > 0).all()
    np.testing.assert_allclose(history["tokens_per_second"], 7 * speed, rtol=1e-6)
    # A product of [28, 3] and [3, 3], forward, and backward for both factors.
    per_example = 3 * 2 * 7 * 3 * 3
    np.testing.assert_allclose(history["mfu"], per_example * speed / 1e9, rtol=1e-5)


def test_what_comes_before_the_steps_is_not_in_the_speed(monkeypatch):
    passed = 0

    class Slow(tr.Callback):
        def on_fit_begin(self, trainer):
            nonlocal passed
            passed += 1000

    clock = types.SimpleNamespace(perf_counter=lambda: passed + time.perf_counter())
    monkeypatch.setattr("tailrace.trainer.observation.logged_values.time", clock)
    x = list(np.ones((8, 4, 3), np.float32))
    trainer = tr.Trainer(
        lambda w, x: (x @ w).mean(), optax.sgd(0.1), np.ones(3, np.float32),
        log="examples_per_second", steps_per_execution=4,
    )  # fmt: skip
    # 16 examples in a thousand seconds would be 0.016 a second.
    assert trainer.fit(x, epochs=1, callbacks=[Slow()])["examples_per_second"][0] > 0.1


def test_arrays_in_the_configuration_are_numbers(tmp_path):
    config = {
        "numpy": np.float32(3),
        "jax": {"count": jnp.int32(2), "rate": jnp.bfloat16(0.5)},
        "flag": np.bool_(True),
        "list": [np.arange(4).reshape(2, 2), jnp.ones(2)],
        "complex": np.complex64(1j),
        "key": jax.random.key(0),
        "large": np.zeros(2000),
        "dtype": np.dtype("f4"),
    }
    held = HeldDirectory(tmp_path)
    held.hold()
    write_info(held, {"config": config})
    held.release()
    stored = read_info(tmp_path)["config"]
    assert str(stored.pop("key")).startswith("Array(")
    assert stored.pop("large") == str(np.zeros(2000))
    assert stored == {
        "numpy": 3.0,
        "jax": {"count": 2, "rate": 0.5},
        "flag": True,
        "list": [[[0, 1], [2, 3]], [1.0, 1.0]],
        "complex": "1j",
        "dtype": "float32",
    }


def test_what_the_user_configured_is_in_the_run(tmp_path, capsys):
    from tailrace.cli import main

    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(SCHEDULE, momentum=0.9),
        params(),
        seed=3,
        run_dir=tmp_path / "run",
        config={"data": "digits", "layers": [3, 2], "path": tmp_path},
    )
    trainer.fit(iter(ROWS), steps=2)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["config"] == {"data": "digits", "layers": [3, 2], "path": str(tmp_path)}
    assert info["options"]["seed"] == 3
    assert info["options"]["optimizer"] == (
        "trace(decay=0.9, nesterov=False), scale_by_schedule(step_size_fn=exponential_decay("
        "decay_rate=0.5, init_value=0.1, staircase=False, transition_begin=0, transition_steps=3))"
    )
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "config" in shown.lower()
    assert "digits" in shown
    assert "exponential_decay" in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"log": ["lr"]}, "names among 'learning_rate'"),
        ({"log": ["learning_rate"]}, "inject_hyperparams"),
        ({"log": {"grad_norm": 3}}, "a schedule for 'learning_rate'"),
        ({"log": "mfu"}, "log={'mfu': 1e12}"),
        ({"config": ["a"]}, "a dict of your own"),
    ],
)
def test_what_cannot_be_logged_is_a_sentence(options, text):
    with pytest.raises(tr.TailraceError, match=text.replace("{", r"\{")):
        tr.Trainer(loss_fn, optax.sgd(0.1), params(), **options)


def test_a_batch_without_tokens_is_a_sentence():
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params(), log=["tokens_per_second"])
    with pytest.raises(tr.TailraceError, match="Log 'examples_per_second'"):
        trainer.fit(iter(ROWS), steps=1)


def test_rates_of_groups_have_their_names():
    rate = optax.inject_hyperparams(optax.sgd)
    optimizer = optax.multi_transform({"slow": rate(0.01), "fast": rate(0.1)}, ["slow", "fast"])
    trainer = tr.Trainer(loss_fn, optimizer, params(), log=["learning_rate"])
    history = trainer.fit(list(ROWS[:2]), progress=False)
    assert history["learning_rate/slow"] == pytest.approx([0.01] * 2)
    assert history["learning_rate/fast"] == pytest.approx([0.1] * 2)


SCHEDULES = {
    "inf": lambda step: 1e-2 * step**-0.5,
    "joined": optax.join_schedules(
        [optax.linear_schedule(0, 1e-2, 5), lambda step: 1e-2 * (step + 5) ** -0.5], [5]
    ),
    "integer": lambda step: step // 2,
    "constant": lambda step: 0.5,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_called_as_by_an_optimizer(name, tmp_path):
    """In any execution, by its own step, also after a resume; never with an integer of Python."""
    schedule = SCHEDULES[name]
    expected = [float(jax.jit(schedule)(jnp.int32(step))) for step in range(6)]

    def trained(steps):
        options = {"steps_per_execution": 4, "accumulation": 2, "log": {"learning_rate": schedule}}
        trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params(), **options)
        return trainer.fit(list(ROWS), steps=steps, checkpoint=tmp_path / "kept")["learning_rate"]

    for steps in (3, 6):
        assert_close(trained(steps), np.float32(expected[:steps]))


def test_steps_of_many_executions_call_a_schedule_seldom():
    calls = []

    def counted(step):
        calls.append(step)
        return 0.5 / (step + 1)

    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.1), params(), log={"learning_rate": counted}, steps_per_execution=1
    )
    trainer.fit(list(ROWS), steps=24)
    assert len(calls) == 2  # to know its result, and for the program
    assert_close(trainer.history["learning_rate"], np.float32(0.5 / (np.arange(24) + 1)))


def test_a_schedule_that_decides_by_the_value_of_the_step(caplog):
    schedule = lambda step: 0.1 if step < 2 else 1 / (step - 3)  # noqa: E731
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params(), log={"learning_rate": schedule})
    rates = trainer.fit(list(ROWS), steps=5)["learning_rate"]
    assert_close(rates, np.float32([0.1, 0.1, -1, np.inf, 1]))
    assert "cannot be called in a compiled program" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (lambda step: [1, 2], "returns"),
        (lambda step: 1 / 0, "raises Zero"),
        (jnp.ones, "raises|ret"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, what):
    with pytest.raises(
        tr.errors.OptionError, match=f"returns one number.*Received: one that {what}"
    ):
        tr.Trainer(loss_fn, optax.sgd(0.1), params(), log={"learning_rate": schedule})
