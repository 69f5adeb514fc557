"""`ema=`: averaged parameters, and evaluations on them or on any others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal, assert_close, mlp, mlp_loss, plain_scan, regression
from tailrace.errors import CheckpointError, OptionError, ProgramError

ELEMENTS = regression(24)


def trainer_of(ema=0.9, optimizer=None, params=None, **options):
    optimizer = optax.sgd(0.1, 0.9) if optimizer is None else optimizer
    params = mlp() if params is None else params
    return tr.Trainer(mlp_loss, optimizer, params, ema=ema, steps_per_execution=4, **options)


def averaged(ema, start, steps):
    """Parameters and their average after a hand-written scan."""
    optimizer = optax.sgd(0.1, 0.9)

    def one(carry, x, y):
        params, state, average, own = carry
        grads = jax.grad(mlp_loss, has_aux=True)(params, x, y)[0]
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if isinstance(ema, float):
            average = optax.incremental_update(params, average, 1 - ema)
        else:
            average, own = ema.update(params, own)
        return (params, state, average, own), None

    start = jax.tree.map(jnp.asarray, start)
    own = () if isinstance(ema, float) else ema.init(start)
    first = (start, optimizer.init(start), start, own)
    return plain_scan(one, first, ELEMENTS[:steps])[0]


@pytest.mark.parametrize("ema", [0.9, optax.ema(0.9), optax.ema(0.9, debias=False)])
def test_equal_to_the_plain_loop(ema):
    with jax.numpy_dtype_promotion("standard"):
        trainer = trainer_of(ema)
        trainer.fit(ELEMENTS, steps=10, progress=False)
        params, _, average, _ = averaged(ema, mlp(), 10)
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(trainer.ema_params, average)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 2, "replicas": 2},
        {"replicas": 4, "shard_optimizer_state": True},
        {"accumulation": 4, "offload_optimizer_state": True},
        {"accumulation": 4, "loss_scale": 8.0},
    ],
)
def test_with_options(options):
    """The average is that of the parameters that the same trainer has after each step."""
    network = mlp(hidden=400) if "shard_optimizer_state" in options else mlp()
    trainer = trainer_of(params=network, optimizer=optax.sgd(1e-3), **options)
    average = jax.tree.map(jnp.asarray, network)
    for step in range(3):
        trainer.fit(ELEMENTS[4 * step : 4 * step + 4], steps=1, progress=False)
        average = optax.incremental_update(trainer.params, average, 1 - 0.9)
    assert_close(trainer.ema_params, average)


def test_evaluations_use_the_average_unless_told_otherwise():
    trainer = trainer_of(eval_fn=lambda params, x, y: {"sum": params["out"].sum()})
    history = trainer.fit(ELEMENTS, steps=8, validation_data=ELEMENTS[:2], progress=False)
    raw, average = trainer.params, trainer.ema_params
    expected = float(np.float32(average["out"].sum()))
    assert history["val_sum"][-1] == pytest.approx(expected)
    assert trainer.evaluate(ELEMENTS[:2])["sum"] == pytest.approx(expected)
    assert trainer.evaluate(ELEMENTS[:2], params=raw)["sum"] == pytest.approx(
        float(raw["out"].sum())
    )
    plain = tr.Trainer(mlp_loss, optax.sgd(0.1), average)
    assert trainer.evaluate(ELEMENTS, mlp_loss) == plain.evaluate(ELEMENTS)
    assert trainer.evaluate(ELEMENTS, mlp_loss, params=mlp()) == tr.Trainer(
        mlp_loss, optax.sgd(0.1), mlp()
    ).evaluate(ELEMENTS)

    def bias(params, x, y):
        return params["hidden"]["bias"]

    found = trainer.predict(ELEMENTS[:1], bias)
    assert_bits_equal(found[0], average["hidden"]["bias"])
    (live,) = trainer.predict(ELEMENTS[:1], bias, live=True, params=raw)
    assert_bits_equal(live, raw["hidden"]["bias"])


def test_a_killed_fit_resumes_and_replays(tmp_path):
    whole = trainer_of(fingerprint=True, observe=["ema/*"])
    whole.fit(ELEMENTS, steps=16, progress=False)
    kept = tr.Checkpoint(tmp_path, every=4)
    options = {"steps": 16, "checkpoint": kept, "progress": False}
    with pytest.raises(Killed):
        trainer_of(fingerprint=True).fit(ELEMENTS, callbacks=[Kill(2)], **options)
    trainer = trainer_of(fingerprint=True)
    trainer.fit(ELEMENTS, **options)
    assert_bits_equal(trainer.ema_params, whole.ema_params)
    replay = trainer.replay(
        9, ELEMENTS, observe=[tr.Tap("ema/out", reduce="tensor")], checkpoint=kept
    )
    assert replay.proved
    assert whole.records["ema/out"].values["mean"][9] == pytest.approx(
        replay["ema/out"].values.mean(), rel=1e-4
    )
    with pytest.raises(CheckpointError, match="optimizer_state"):
        trainer_of(None).fit(ELEMENTS, **{**options, "steps": 20})


def test_a_skipped_step_does_not_move_it():
    bad = [(x * np.inf, y) if n == 2 else (x, y) for n, (x, y) in enumerate(ELEMENTS[:3])]
    trainer = trainer_of(on_nonfinite="skip")
    trainer.fit(bad[:2], steps=2, progress=False)
    before = trainer.ema_params
    trainer.fit(bad[2:], steps=1, progress=False)
    assert_bits_equal(trainer.ema_params, before)


def test_sixteen_bits_are_averaged_in_32():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp())

    def loss_fn(params, x, y):
        return mlp_loss(jax.tree.map(lambda p: p.astype(jnp.float32), params), x, y)

    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), half, ema=0.999)
    trainer.fit(ELEMENTS, steps=3, progress=False)
    assert trainer.state.optimizer_state.ema["out"].dtype == jnp.float32
    assert trainer.ema_params["out"].dtype == jnp.bfloat16
    assert not np.array_equal(trainer.state.optimizer_state.ema["out"], half["out"])


def test_in_a_pipeline():
    stages = [
        lambda w, x, y: (jnp.tanh(x * w), y),
        lambda w, h, y: ((h.sum(-1) * w - y) ** 2).mean(),
    ]
    start = [np.float32(1), np.float32(0.5)]

    def whole(params, x, y):
        return stages[1](params[1], *stages[0](params[0], x, y))

    pipeline = tr.Pipeline(stages, accumulation=4, device_mapping=[0, 1])
    piped = tr.Trainer(pipeline, optax.sgd(0.1), start, ema=0.9, observe=["ema/*"])
    plain = tr.Trainer(whole, optax.sgd(0.1), start, ema=0.9, accumulation=4)
    for trainer in (piped, plain):
        trainer.fit(ELEMENTS, steps=4, progress=False)
    assert_close(piped.ema_params, plain.ema_params)
    for params in (None, start):
        found = piped.evaluate(ELEMENTS, params=params)["loss"]
        assert found == pytest.approx(plain.evaluate(ELEMENTS, params=params)["loss"], rel=1e-5)
    assert set(name for name, _ in piped.records) == {"ema/0", "ema/1"}


def test_what_is_refused():
    for wrong in (1.0, -0.1, True, "0.9"):
        with pytest.raises(OptionError, match="at least 0 and less than 1"):
            trainer_of(wrong)
    with pytest.raises(ProgramError, match="Received: a trainer without ema="):
        _ = trainer_of(None).ema_params
    with pytest.raises(OptionError, match="params= is a tree like trainer.params"):
        trainer_of().evaluate(ELEMENTS, params={"out": np.zeros(5, np.float32)})
    other = {**mlp(), "out": np.zeros(4, np.float32)}
    with pytest.raises(OptionError, match=r"'out' is float32\[5\]. Received: float32\[4\]"):
        trainer_of().evaluate(ELEMENTS, params=other)
