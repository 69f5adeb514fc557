"""Loss scaling and computing in 16 bits: against plain JAX, Keras' scaler and PyTorch's."""

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_apply, mlp_loss, regression
from tailrace.program.memory import activation_offload, host_memory, optimizer_state
from tailrace.program.step.loss_scale import unless_skipped

SCALE = tr.LossScale(2.0**90, growth=2.0, backoff=0.5, interval=3)
"""So large that a gradient of 2**46 overflows float32."""


def spiked(count, *at, seed=0):
    """Elements of which some have labels of 1e14: times 2**90, their gradients are infinite."""
    elements = regression(count, seed=seed)
    for number in at:
        x, y = elements[number]
        elements[number] = (x, y + np.float32(1e14))
    return elements


ELEMENTS = spiked(24, 5, 6, 17)


@pytest.fixture(autouse=True)
def _optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


def cast(tree, dtype):
    """Floats in another dtype."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if jnp.result_type(x).kind == "f" else jnp.asarray(x), tree
    )


def plain(
    loss_fn, optimizer, params, elements, rule, microbatches=1, replicas=1, state=None, dtype=None
):
    """By hand: one jitted call a step, and an `if`; all that there is after each step."""
    initial, growth, backoff, interval = rule
    params, model_state = jax.tree.map(jnp.asarray, (params, state))
    opt_state, scale, streak = optimizer.init(params), np.float32(initial), 0

    def forward(params, model_state, scale, batch):
        if dtype is not None:
            params, batch = cast(params, dtype), cast(batch, dtype)
        first = (params,) if state is None else (params, model_state)
        loss, aux = loss_fn(*first, *batch)
        after = jax.tree.map(lambda a, b: a.astype(b.dtype), aux[0], model_state) if state else None
        loss = loss.astype(jnp.float32)
        return loss * scale, (loss, after)

    @jax.jit
    def step(params, opt_state, model_state, scale, batches):
        totals, states, losses = [], [], []
        for r in range(replicas):
            total, own = None, model_state
            for m in range(microbatches):
                (_, (loss, own)), grads = jax.value_and_grad(forward, has_aux=True)(
                    params, own, scale, batches[m * replicas + r]
                )
                grads = jax.tree.map(lambda g: g / microbatches, grads)
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
                losses.append(loss)
            totals.append(total)
            states.append(own)
        grads = jax.tree.map(lambda *g: sum(g) / replicas if replicas > 1 else g[0], *totals)
        model_state = jax.tree.map(lambda *s: sum(s) / replicas if replicas > 1 else s[0], *states)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        grads = jax.tree.map(lambda g: g / scale, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, finite, losses

    found, per_step = [], microbatches * replicas
    for t in range(len(elements) // per_step):
        batches = elements[t * per_step : (t + 1) * per_step]
        used = scale
        after = step(params, opt_state, model_state, scale, batches)
        if after[3]:
            params, opt_state, model_state = after[:3]
            streak += 1
            if streak == interval:
                scale, streak = np.float32(scale * np.float32(growth)), 0
        else:
            scale, streak = np.float32(scale * np.float32(backoff)), 0
        found.append((params, opt_state, model_state, used, np.mean([float(x) for x in after[4]])))
    return found, scale


RULES = {
    "by powers of two": (2.0**90, 2.0, 0.5, 3),
    "by other factors": (1e27, 1.5, 0.375, 2),
}

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw on a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
}

# -- against the plain loop ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_plain_loop_at_every_step(rule, name):
    expected, scale = plain(mlp_loss, OPTIMIZERS[name](), mlp(), ELEMENTS, RULES[rule])
    trainer = tr.Trainer(
        mlp_loss, OPTIMIZERS[name](), mlp(), loss_scale=tr.LossScale(*RULES[rule]),
        steps_per_execution=5, observe=[tr.Tap("updated/*", reduce="tensor")],
    )  # fmt: skip
    history = trainer.fit(ELEMENTS, steps=24)
    scales = np.asarray([step[3] for step in expected])
    assert {-1, 0, 1} == set(np.sign(np.diff(scales)))
    assert_bits_equal(history["loss_scale"], scales)
    assert trainer.loss_scale == scale
    for number, (params, *_) in enumerate(expected):
        assert_bits_equal(trainer.records["updated/out"].values[number], params["out"])
    assert_bits_equal(trainer.params, expected[-1][0])
    assert_bits_equal(trainer.state.optimizer_state, expected[-1][1])


def with_state(params, state, x, y):
    """A loss that depends on a running mean, as BatchNorm does, and counts its calls."""
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0).astype(state["mean"].dtype)
    error = mlp_apply(params, x - mean.astype(x.dtype)) - y
    state = {"mean": mean, "calls": state["calls"] + 1}
    return (error**2).mean(), (state, {"mae": jnp.abs(error).mean()})


STATE = {"mean": np.zeros(3, np.float32), "calls": np.float32(0)}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("microbatches", "replicas"), [(3, 1), (1, 2), (2, 2)], ids=["accumulated", "replicas", "both"]
)
def test_one_bad_microbatch_skips_the_step(microbatches, replicas, dtype):
    rule = (2.0**90, 2.0, 0.5, 2)
    expected, scale = plain(
        with_state, optax.adam(0.01), mlp(), ELEMENTS, rule, microbatches, replicas, STATE, dtype
    )
    trainer = tr.Trainer(
        with_state, optax.adam(0.01), mlp(), accumulation=microbatches, replicas=replicas,
        model_state=STATE, loss_scale=tr.LossScale(*rule), precision=dtype,
    )  # fmt: skip
    history = trainer.fit(ELEMENTS, steps=len(expected))
    assert_bits_equal(history["loss_scale"], np.asarray([step[3] for step in expected]))
    assert trainer.loss_scale == scale
    assert_close(trainer.params, expected[-1][0])
    assert_close(trainer.state.optimizer_state, expected[-1][1])
    assert_close(trainer.model_state, expected[-1][2])
    assert_close(history.loss, np.asarray([step[4] for step in expected], np.float32))
    skipped = {number // (microbatches * replicas) for number in (5, 6, 17)}
    taken = len(expected) - len(skipped)
    assert int(trainer.model_state["calls"]) == taken * microbatches


# -- against Keras and PyTorch --------------------------------------------------------------------


def test_equal_to_the_scaler_of_keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=SCALE.initial, dynamic_growth_steps=SCALE.interval
    )
    model.compile(scaler, "mse")
    params = [np.asarray(weight) for weight in model.get_weights()]

    def loss_fn(params, x, y):
        first, bias, second, offset = params
        found = jnp.tanh(x @ first + bias) @ second + offset
        return jnp.mean(jnp.square(y[:, None] - found))

    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params, loss_scale=SCALE)
    scales = []
    for x, y in ELEMENTS:
        model.train_on_batch(x, y[:, None])
        history = trainer.fit([(x, y)], steps=1)
        scales.append(history["loss_scale"][0])
        assert trainer.loss_scale == float(scaler.dynamic_scale.value)
        assert int(trainer.state.loss_scale.streak) == int(scaler.step_counter.value)
        assert_bits_equal(list(trainer.params), model.get_weights())
    assert np.unique(scales).size > 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_equal_to_the_scaler_of_pytorch(rule, microbatches):
    torch = pytest.importorskip("torch")
    initial, growth, backoff, interval = RULES[rule]
    params = mlp()
    weights = [torch.tensor(leaf, requires_grad=True) for leaf in jax.tree.leaves(params)]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff,
        growth_interval=interval,
    )  # fmt: skip
    trainer = tr.Trainer(
        mlp_loss, optax.sgd(0.1, momentum=0.9), params, accumulation=microbatches,
        loss_scale=tr.LossScale(initial, growth, backoff, interval),
    )  # fmt: skip
    skipped = 0
    for start in range(0, len(ELEMENTS), microbatches):
        step = ELEMENTS[start : start + microbatches]
        optimizer.zero_grad()
        for x, y in step:
            bias, kernel, out = weights
            error = torch.tanh(torch.tensor(x) @ kernel + bias) @ out - torch.tensor(y)
            scaler.scale((error**2).mean() / microbatches).backward()
        before = [weight.detach().clone() for weight in weights]
        scaler.step(optimizer)
        scaler.update()
        skipped += all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
        trainer.fit(step, steps=1)
        assert trainer.loss_scale == scaler.get_scale()
        assert_close(jax.tree.leaves(trainer.params), [w.detach().numpy() for w in weights])
    assert skipped >= 2


# -- a skipped step -------------------------------------------------------------------------------


def test_a_skipped_step_counts_and_changes_nothing():
    observed = [tr.Tap(["update/*", "updated/*", "skipped"], reduce="tensor")]
    trainer = tr.Trainer(
        with_state, optax.adam(0.01), mlp(), model_state=STATE, loss_scale=SCALE, observe=observed
    )
    trainer.fit(ELEMENTS, steps=5)
    before = trainer.state
    trainer.fit(spiked(1, 0), steps=1)
    after = trainer.state
    assert_bits_equal(after[:3], before[:3])
    assert trainer.step == 6
    assert trainer.records["skipped"].values.tolist() == [1.0]
    assert not trainer.records["update/out"].values.any()
    assert_bits_equal(trainer.records["updated/out"].values[0], before.params["out"])
    assert (float(after.loss_scale.scale), int(after.loss_scale.streak)) == (2.0**90, 0)
    assert float(before.loss_scale.scale) == 2.0**91


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_is_a_scale_that_stays(bad):
    def loss_fn(w, x):
        return (w * x).sum()

    trainer = tr.Trainer(loss_fn, optax.sgd(1.0), np.float32(3.0), loss_scale=1024)
    history = trainer.fit([np.float32(1.0), np.float32(bad), np.float32(2.0)], steps=3)
    assert (float(trainer.params), trainer.loss_scale) == (0.0, 1024.0)
    assert history.names == ["loss"]
    assert history.loss[[0, 2]].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"replicas": 2}])
def test_optimizer_state_and_activations_elsewhere(options, monkeypatch):
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 8)
    monkeypatch.setattr(host_memory, "obstacle", lambda device, guarded: None)
    monkeypatch.setattr(host_memory, "memory_moves", lambda: host_memory.NO_MOVES)
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 8)

    def train(**kwargs):
        trainer = tr.Trainer(mlp_loss, optax.adam(0.01), mlp(), loss_scale=SCALE, **kwargs)
        trainer.fit(ELEMENTS, steps=10)
        return trainer.state

    expected = train(**options)
    assert_close(train(offload_optimizer_state=True, **options), expected)
    assert_close(train(offload_activations=True, **options), expected)
    if "replicas" in options:
        assert_close(train(shard_optimizer_state=True, **options), expected)
    assert int(expected.optimizer_state[0].count) < 10


def test_float16_parameters_with_wide_accumulators():
    """The scale is divided out in the accumulators' dtype: what it saved is not lost again."""

    def loss_fn(w, x):
        return (w * x).sum()

    def train(**kwargs):
        trainer = tr.Trainer(
            loss_fn, optax.scale(-1e6), np.float16(1.0), loss_scale=1024.0, **kwargs
        )
        trainer.fit([np.float16(6e-8)], steps=1)
        return trainer.params

    wide = train(accumulation=tr.Accumulation(1, dtype="float32"))
    assert wide.dtype == jnp.float16
    assert_bits_equal(wide, jnp.float16(1 - 1e6 * np.float64(np.float16(6e-8))))


@pytest.mark.cpu
def test_a_step_that_may_be_skipped_copies_no_state(compilations):
    """Selected beside its use, each moment would be copied before it is overwritten."""
    params = {"w": np.ones((37, 41), np.float32)}

    def loss_fn(params, x):
        return jnp.tanh(x @ params["w"]).mean()

    trainer = tr.Trainer(loss_fn, optax.adam(0.1), params, loss_scale="dynamic")
    trainer.fit([np.ones((2, 37), np.float32)] * 4, steps=4)
    text = max((lowered.compile().as_text() for lowered in list(compilations)), key=len)
    assert "while" in text
    assert not [line for line in text.splitlines() if "f32[37,41]{1,0} copy(" in line]


def test_results_that_a_skipped_rule_only_passes_on():
    def rule(a, b, c):
        total = a + b
        return total, total, c, jnp.float32(3.0), total * 2

    @jax.jit
    def run(taken, *args):
        return unless_skipped(rule, args, taken, tuple(map(jnp.float32, (10, 20, 30, 40, 50))))

    args = tuple(map(jnp.float32, (1, 2, 4)))
    assert [float(x) for x in run(True, *args)] == [3, 3, 4, 3, 6]
    assert [float(x) for x in run(False, *args)] == [10, 20, 30, 40, 50]


# -- what people see ------------------------------------------------------------------------------


def test_what_is_seen_is_without_the_scale():
    names = ["grad/*", "accumulated/*", "reduced/*"]

    def train(*own, **kwargs):
        trainer = tr.Trainer(
            mlp_loss, optax.sgd(0.1), mlp(), accumulation=2, replicas=2,
            observe=[tr.Tap([*names, *own], reduce="tensor")], **kwargs,
        )  # fmt: skip
        return trainer.fit(regression(16), steps=4), trainer.records

    plainly, records = train()
    scaled, others = train("loss_scale", loss_scale=tr.LossScale(2.0**20))
    assert_bits_equal(scaled.loss, plainly.loss)
    for name, _ in records:
        assert_bits_equal(others[name].values, records[name].values)
    assert others["loss_scale"].values.tolist() == [2.0**20] * 4


def test_the_scale_goes_on_from_fit_to_fit_and_through_executions():
    def train(*counts, **kwargs):
        trainer = tr.Trainer(mlp_loss, optax.adam(0.01), mlp(), loss_scale=SCALE, **kwargs)
        data = iter(ELEMENTS)
        scales = [trainer.fit(data, steps=count)["loss_scale"] for count in counts]
        return np.concatenate(scales), trainer.state

    expected = train(20, steps_per_execution=20)
    assert_bits_equal(train(7, 6, 7, steps_per_execution=4), expected)


def test_a_metric_of_the_same_name_keeps_its_value():
    def loss_fn(w, x):
        return (w * x).sum(), {"loss_scale": x.sum()}

    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(1.0), loss_scale="dynamic")
    history = trainer.fit([np.float32(7.0)], steps=1)
    assert history["loss_scale"].tolist() == [2.0**15]
    assert history["aux/loss_scale"].tolist() == [7.0]


def test_a_scale_never_leaves_the_numbers(caplog):
    """Keras' scale ends at infinity, that of both at zero: from there nothing comes back."""

    def loss_fn(w, x):
        return (w * x).sum()

    trainer = tr.Trainer(
        loss_fn, optax.sgd(1.0), np.float32(1.0), loss_scale=tr.LossScale(2.0**127, interval=1)
    )
    trainer.fit([np.float32(2.0**-10)] * 3, steps=3)
    assert trainer.loss_scale == 2.0**127
    with caplog.at_level(logging.WARNING, "tailrace"):
        trainer.fit([np.float32(np.nan)] * 300, steps=300)
    assert "not finite whatever the scale is" in caplog.text
    assert trainer.loss_scale == np.finfo(np.float32).tiny
    before = float(trainer.params)
    trainer.fit([np.float32(2.0)], steps=1)
    assert float(trainer.params) == before - 2


# -- in 16 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_computing_in_16_bits_equals_the_plain_casts(dtype):
    expected, _ = plain(
        with_state, optax.adam(0.01), mlp(), regression(12), (256.0, 2, 0.5, 50), 1, 1, STATE, dtype
    )
    trainer = tr.Trainer(
        with_state, optax.adam(0.01), mlp(), model_state=STATE, precision=dtype,
        loss_scale=tr.LossScale(256.0, 2, 0.5, 50),
    )  # fmt: skip
    history = trainer.fit(regression(12), steps=12)
    assert_bits_equal(trainer.state[:3], expected[-1][:3])
    assert_bits_equal(history.loss, np.asarray([step[4] for step in expected], np.float32))
    found = {entry.name: entry for entry in trainer.tensors()}
    assert found["grad/out"].dtype == found["param/out"].dtype == jnp.float32
    assert found["input/0"].dtype == found["loss"].dtype == found["aux/mae"].dtype == jnp.float32
    assert found["activation/:tanh"].dtype == dtype


def test_dtypes_that_a_function_sees_and_returns():
    seen = []

    def loss_fn(params, state, x, number):
        seen.append((params.dtype, state.dtype, x["value"].dtype, number.dtype))
        loss = (x["value"] * params).mean() + number.sum().astype(params.dtype)
        return loss, (loss, {"double": 2 * loss, "count": number.sum()})

    def fn(params, state, x, number):
        seen.append((params.dtype, state.dtype, x["value"].dtype, number.dtype))
        return {"value": x["value"] * params, "count": number}

    element = ({"value": np.full((2, 3), 0.1, np.float32)}, np.arange(2))
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.1), np.float32(1.0), model_state=np.float32(0), precision="bfloat16"
    )
    history = trainer.fit([element], steps=1)
    assert history.loss.dtype == history["double"].dtype == np.float32
    assert trainer.params.dtype == trainer.model_state.dtype == jnp.float32
    predicted = trainer.predict([element], fn)
    assert [predicted[name].dtype for name in ("value", "count")] == [np.float32, np.int32]
    product = jnp.bfloat16(0.1) * trainer.params.astype(jnp.bfloat16)  # XLA need not round it
    assert_close(predicted["value"], np.full((2, 3), product))
    assert trainer.evaluate([element]).keys() == {"loss", "double", "count"}
    assert {tuple(map(str, each)) for each in seen} == {
        ("bfloat16", "float32", "bfloat16", "int32")
    }


def test_small_gradients_survive_float16_with_a_scale(caplog):
    def loss_fn(w, x):
        return (w * x).sum()

    def train(**kwargs):
        trainer = tr.Trainer(
            loss_fn, optax.sgd(1e6), np.float32(1.0), precision="float16", **kwargs
        )
        trainer.fit([np.float32(6e-8)] * 2, steps=2)
        return trainer

    with caplog.at_level(logging.WARNING, "tailrace"):
        lost = train().params
    assert "Give loss_scale='dynamic'" in caplog.text
    kept = train(loss_scale="dynamic")
    assert kept.loss_scale == 2.0**15
    assert abs(float(kept.params) - 1) > 0.1 > abs(float(lost) - float(kept.params)) - 1


# -- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"loss_scale": 0},
            "a positive number, 'dynamic' or a tr.LossScale. Received: loss_scale=0",
        ),
        ({"loss_scale": "Dynamic"}, "Received: loss_scale='Dynamic'"),
        ({"loss_scale": True}, "Received: loss_scale=True"),
        ({"loss_scale": 1e60}, "Received: loss_scale=1e+60"),
        ({"precision": "bf16"}, "one of 'float32', 'bfloat16', 'float16'"),
        ({"precision": "int8"}, "Received: precision='int8'"),
        ({"loss_scale": 2.0, "observe": [tr.stop_on_nonfinite()]}, "tr.stop_on_nonfinite('loss')"),
        ({"loss_scale": 2.0, "observe": [tr.stop_on_nonfinite("reduced/o*")]}, "'reduced/out'"),
        (
            {"loss_scale": 2.0, "on_nonfinite": "skip"},
            "is skipped already, and the scale is lowered; on_nonfinite='skip' would count it as a bad "
            "step, of which there may be 10. Received: a guard of 'grad/hidden/bias' that skips. Leave "
            "on_nonfinite='skip' out, or guard the loss alone: "
            "observe=[tr.stop_on_nonfinite('loss', on_nonfinite='skip')].",
        ),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(tr.TailraceError) as error:
        tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), **options)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"initial": -1.0}, "initial of a tr.LossScale is a positive number"),
        ({"growth": 0.5}, "growth of a tr.LossScale is at least 1. Received: growth=0.5"),
        ({"backoff": 2.0}, "backoff of a tr.LossScale is more than 0, at most 1"),
        ({"interval": 0}, "interval of a tr.LossScale is a positive integer. Received: interval=0"),
    ],
)
def test_bad_numbers(numbers, text):
    with pytest.raises(tr.TailraceError) as error:
        tr.LossScale(**numbers)
    assert text in str(error.value)


def test_a_guard_of_the_loss_beside_a_scale():
    elements = spiked(4, 1)
    elements[2] = (elements[2][0], elements[2][1] * np.nan)
    trainer = tr.Trainer(
        mlp_loss, optax.sgd(0.1), mlp(), loss_scale=SCALE, observe=[tr.stop_on_nonfinite("loss")]
    )
    with pytest.raises(tr.errors.NonFiniteError, match="step 2"):
        trainer.fit(elements, steps=4)
    assert trainer.step == 2
    assert trainer.loss_scale == 2.0**89


def test_a_guard_that_skips_bad_losses_beside_a_scale():
    elements = spiked(4, 1)
    elements[2] = (elements[2][0], elements[2][1] * np.nan)
    guard = tr.stop_on_nonfinite("loss", on_nonfinite="skip", limit=1)
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), loss_scale=SCALE, observe=[guard])
    trainer.fit(elements, steps=4)
    assert trainer.step == 4
    assert np.isfinite(np.asarray(trainer.params["out"])).all()


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed", "int8", 3])
def test_other_names_of_precisions_are_refused(name):
    with pytest.raises(tr.TailraceError, match="precision is None or one of 'float32', 'bfloat16'"):
        tr.Trainer(lambda p, x: (p * x).sum(), optax.sgd(0.1), np.ones(2), precision=name)
