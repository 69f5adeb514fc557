"""`tr.Trainer.from_step`: a fit is the plain loop of its step, and everything around it works."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from own_algorithms import ALGORITHMS, Case, apply, dense, gan, mse, pairs, rows

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import (
    CheckpointError,
    NonFiniteError,
    OptionError,
    ProgramError,
    ReplicaError,
    SelectionError,
)

STEPS = 12


@pytest.fixture(autouse=True)
def users_promotion():
    """The steps are users' programs, and optax', which mix dtypes as JAX lets them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def bare(tree):
    """A tree whose random keys are numbers, which NumPy has."""

    def leaf(x):
        is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else jnp.asarray(x)

    return jax.tree.map(leaf, tree)


def plain(case, steps=STEPS):
    """The state and the metrics of a `lax.scan` of the step, as anybody writes it."""
    elements = () if case.data is None else case.data[:steps]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *elements) if elements else None

    def one(state, element):
        batch = () if element is None else element if isinstance(element, tuple) else (element,)
        return case.step(state, *batch)

    state, metrics = jax.jit(lambda s, e: lax.scan(one, s, e, length=steps))(case.state, stacked)
    return bare(state), metrics if isinstance(metrics, dict) else {"loss": metrics}


def trainer_of(case, **options):
    return tr.Trainer.from_step(case.step, case.state, **{"steps_per_execution": 3, **options})


class Stops(tr.Callback):
    """What kills a fit."""

    def __init__(self, step):
        self.step = step

    def on_execution_end(self, trainer, execution):
        if trainer.step >= self.step:
            raise InterruptedError


# -- algorithms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_fit_is_the_scan_of_the_step_killed_or_not(name, tmp_path):
    make, tap = ALGORITHMS[name]
    case = make()
    state, metrics = plain(case)
    watched = trainer_of(case, observe=[tr.Tap(tap, reduce="tensor")])
    watched.fit(case.data, steps=STEPS)
    assert_bits_equal(bare(watched.state), state)
    assert watched.history.step_names == sorted(metrics)
    for metric, values in metrics.items():
        assert_bits_equal(watched.history[metric], np.asarray(values))
    assert watched.records.names
    for observed in watched.records.names:
        assert watched.records[observed].steps.tolist() == list(range(STEPS))
    kept = tr.Checkpoint(tmp_path / "kept", every=3)
    with pytest.raises(InterruptedError):
        trainer_of(case).fit(case.data, steps=STEPS, checkpoint=kept, callbacks=[Stops(6)])
    resumed = trainer_of(case)
    history = resumed.fit(case.data, steps=STEPS, checkpoint=kept)
    assert_bits_equal(bare(resumed.state), state)
    for metric, values in metrics.items():
        assert_bits_equal(history[metric], np.asarray(values))


def test_what_taps_see_is_what_the_step_computes():
    case = gan()
    taps = ["state/g/0/w", "updated/g/0/w", "grad/generator/0/w", "aux/g_loss"]
    taps = [tr.Tap(taps, reduce="tensor"), tr.Tap("cotangent/judged/*", reduce="norm")]
    trainer = trainer_of(case, observe=taps)
    trainer.fit(case.data, steps=STEPS)
    records = trainer.records
    assert_bits_equal(records["state/g/0/w"].values[1:], records["updated/g/0/w"].values[:-1])
    assert_bits_equal(records["state/g/0/w"].values[0], np.asarray(case.state["g"][0]["w"]))
    assert_bits_equal(records["updated/g/0/w"].values[-1], np.asarray(trainer.state["g"][0]["w"]))
    assert_bits_equal(records["aux/g_loss"].values, trainer.history["g_loss"])
    # The gradient by hand, of the first step.
    (first,), _ = jax.tree.flatten(case.data[:1])
    _, records_of_one = tr.observe(case.step, [tr.Tap("grad/generator/0/w", reduce="tensor")])(
        case.state, first
    )
    mine = records["grad/generator/0/w"].values[0]
    np.testing.assert_allclose(mine, records_of_one["grad/generator/0/w"].values[0], rtol=1e-5)


def test_the_catalogue_has_no_parameter_that_nobody_gave():
    case = gan()
    trainer = trainer_of(case)
    catalogue = trainer.tensors(case.data[0])
    kinds = {entry.kind for entry in catalogue}
    assert kinds == {"input", "state", "aux", "updated", "grad", "activation", "cotangent"}
    assert "updated/d_opt/hyperparams/learning_rate" in catalogue.names
    explained = str(trainer.explain(case.data[0]))
    assert "state" in explained
    assert "parameter" not in explained + str(trainer.summary()) + repr(trainer)
    assert trainer.summary().what == "state"
    for name in ("params", "model_state", "model"):
        with pytest.raises(ProgramError, match=f"trainer.{name}. Use trainer.state"):
            getattr(trainer, name)


# -- any state ----------------------------------------------------------------------------------


def counted(state, x):
    """A step on numbers of Python."""
    after = {
        "n": state["n"] + 1,
        "mean": state["mean"] * 0.5 + x.mean(),
        "late": state["late"] + 0.5,
    }
    return after, {"loss": after["mean"], "late": after["late"]}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_numbers_of_python_begin_as_lax_scan_begins_them(dtype, tmp_path):
    data = [np.asarray(x, dtype) for x in rows()]
    case = Case(counted, {"n": 0, "mean": 0.0, "late": 0}, data)
    state, _ = plain(case)
    trainer = trainer_of(case, fingerprint=True)
    trainer.fit(data, steps=6, checkpoint=tmp_path / "kept")
    trainer.fit([*data, *data][6:], steps=6)  # another fit, on what has become wider
    assert_bits_equal(trainer.state, state)
    assert trainer.state["mean"].dtype == dtype
    assert trainer.state["late"].dtype == np.float32
    for replayed in (trainer, trainer_of(case, fingerprint=True)):
        found = replayed.replay(4, data, checkpoint=tmp_path / "kept")
        assert found.proved is True, str(found)
    restored = trainer_of(case)
    trainer.save(tmp_path / "saved")
    restored.restore(tmp_path / "saved")
    assert_bits_equal(restored.state, state)
    restored.fit(data, steps=1)
    assert restored.step == STEPS + 1


def test_equinox_modules_keep_what_is_no_array():
    eqx = pytest.importorskip("equinox")
    opt = optax.adam(1e-2)
    first, last = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Linear(2, 4, key=first),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.5, inference=True),  # a number and a bool that are no state
        eqx.nn.Linear(4, 1, key=last),
    ]
    model = eqx.nn.Sequential(layers)
    trained, rest = eqx.partition(model, eqx.is_array)

    def step(state, x, y):
        model, opt_state = state
        loss = eqx.filter_value_and_grad(lambda m: ((jax.vmap(m)(x) - y) ** 2).mean())
        value, grads = loss(model)
        updates, opt_state = opt.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": value}

    def on_arrays(state, x, y):
        (model, opt_state), metrics = step((eqx.combine(state[0], rest), state[1]), x, y)
        return (eqx.filter(model, eqx.is_array), opt_state), metrics

    case = Case(on_arrays, (trained, opt.init(trained)), pairs())
    state, metrics = plain(case)
    trainer = trainer_of(Case(step, (model, opt.init(trained)), case.data))
    trainer.fit(case.data, steps=STEPS)
    now, _ = trainer.state
    assert isinstance(now, eqx.nn.Sequential)
    assert now.layers[1].fn is jax.nn.relu
    assert now.layers[2].inference is True
    assert_bits_equal(eqx.filter(trainer.state, eqx.is_array), state)
    assert_bits_equal(trainer.history.loss, np.asarray(metrics["loss"]))
    assert "state/0/layers/0/weight" in trainer.tensors().names
    predicted = trainer.predict(case.data, lambda state, x, y: jax.vmap(state[0])(x))
    np.testing.assert_allclose(predicted[:4], jax.vmap(now)(case.data[0][0]), rtol=1e-5)


def test_nnx_modules_and_their_random_streams_are_those_of_the_plain_loop():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(2, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(self.drop(nnx.relu(self.first(x)))))

    def made():
        net = Net(nnx.Rngs(0))
        return {"net": net, "opt": nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)}

    def step(state, x, y):
        value, grads = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(state["net"])
        state["opt"].update(state["net"], grads)
        return state, {"loss": value}

    data, by_hand = pairs(), made()
    jitted, losses = nnx.jit(step), []
    for x, y in data:
        by_hand, metrics = jitted(by_hand, x, y)
        losses.append(metrics["loss"])
    given = made()
    trainer = trainer_of(Case(step, given, data))
    trainer.fit(data, steps=STEPS)
    assert isinstance(trainer.state["net"], Net)
    now, then = (bare(nnx.to_pure_dict(nnx.state(s))) for s in (trainer.state, by_hand))
    assert_bits_equal(now, then)
    assert_bits_equal(trainer.history.loss, np.asarray(losses))
    assert int(given["opt"].step[...]) == 0  # what was given is not touched
    trainer.state["net"].first.kernel[...] += 1  # nor what was read


def test_the_state_can_be_set_and_the_caller_s_arrays_stay():
    case = gan()
    before = bare(jax.tree.map(jnp.copy, case.state))
    trainer = trainer_of(case)
    trainer.fit(case.data, steps=3)
    trainer.state = {**trainer.state, "g": case.state["g"]}
    assert_bits_equal(trainer.state["g"], case.state["g"])
    trainer.fit(case.data, steps=3)
    assert_bits_equal(bare(case.state), before)
    with pytest.raises(ProgramError, match="missing key"):
        trainer.state = {name: part for name, part in trainer.state.items() if name != "key"}
    with pytest.raises(ProgramError, match=r"float32\[4\].*Received: float32\[3\]"):
        trainer.state = {**trainer.state, "g": jax.tree.map(lambda x: x[..., :3], case.state["g"])}


# -- around the steps ---------------------------------------------------------------------------


def regression_case(**metrics):
    opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    params = dense(jax.random.key(0), (2, 3, 1))

    def step(state, x, y):
        noise = jax.random.normal(tr.key(), y.shape) * 0.01
        value, grads = jax.value_and_grad(mse)(state["params"], x, y + noise)
        grads = tr.mark(grads, "grad/params")
        updates, opt_state = opt.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt_state}, {"fit": value, "step": tr.step()}

    return Case(step, {"params": params, "opt": opt.init(params)}, pairs())


def held_out(state, x, y):
    assert not tr.training()
    return {"error": mse(state["params"], x, y)}


def test_validation_evaluation_and_prediction_use_eval_fn():
    case = regression_case()
    trainer = trainer_of(case, eval_fn=held_out)
    data = pairs(5, 4, seed=9)
    history = trainer.fit(case.data, epochs=2, validation_data=data)
    state = trainer.state
    by_hand = np.mean([mse(state["params"], *pair) for pair in data])
    np.testing.assert_allclose(trainer.evaluate(data)["error"], by_hand, rtol=1e-5)
    np.testing.assert_allclose(history["val_error"][-1], by_hand, rtol=1e-5)
    assert len(history["val_error"]) == 2
    predicted = trainer.predict(data, lambda state, x, y: apply(state["params"], x))
    assert predicted.shape == (20, 1)
    without = trainer_of(case)
    for call in (
        lambda: without.evaluate(data),
        lambda: without.fit(case.data, epochs=1, validation_data=data),
    ):
        with pytest.raises(OptionError, match="no loss to evaluate. .* Give eval_fn="):
            call()
    assert without.step == 0


def test_a_run_directory_a_replay_and_a_rate(tmp_path):
    case = regression_case()
    options = {"fingerprint": True, "run_dir": tmp_path / "run", "log": "learning_rate"}
    trainer = trainer_of(case, **options)
    trainer.fit(case.data, steps=STEPS, checkpoint=tr.Checkpoint(tmp_path / "kept", every=4))
    assert trainer.history["step"].tolist() == list(range(STEPS))
    np.testing.assert_allclose(trainer.history["learning_rate"], 0.1)
    marks = trainer.history.fingerprints
    assert all(marks["model_state"])
    assert not any(marks["gradients"])
    with pytest.raises(SelectionError, match="No metric is called 'loss'. There are: fit, step"):
        _ = trainer.history.loss
    run = tr.open_run(tmp_path / "run")
    assert_bits_equal(run.history["fit"], trainer.history["fit"])
    tap = tr.Tap("grad/params/0/w", reduce="tensor")
    found = trainer.replay(7, case.data, observe=[tap], checkpoint=tmp_path / "kept")
    assert found.proved is True, str(found)
    assert found.loss == trainer.history["fit"][7]
    assert found["grad/params/0/w"].steps.tolist() == [7]
    assert trainer.rewind(5, case.data, checkpoint=tmp_path / "kept") is True
    again = trainer.fit(case.data[5:], steps=7)
    assert_bits_equal(again["fit"], run.history["fit"][5:])
    other = trainer_of(Case(case.step, {**case.state, "more": 0}, case.data))
    with pytest.raises(CheckpointError, match="state/more: int32"):
        other.restore(tmp_path / "kept")


def test_seeds_and_lengths_of_executions_decide_what_they_decide_elsewhere():
    case = regression_case()
    ends = []
    for options in ({}, {"steps_per_execution": 5}, {"seed": 3}):
        trainer = trainer_of(case, **options)
        trainer.fit(case.data, steps=STEPS)
        ends.append(np.asarray(trainer.state["params"][0]["w"]))
    assert_bits_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])


# -- guards -------------------------------------------------------------------------------------


def with_a_bad_row(number):
    data = pairs()
    data[number] = (np.full_like(data[number][0], np.nan), data[number][1])
    return data


@pytest.mark.parametrize("select", ["aux/fit", "updated/*", "grad/*"])
def test_a_guard_stops_before_the_bad_step(select):
    case = regression_case()
    trainer = trainer_of(case, observe=[tr.stop_on_nonfinite(select)])
    text = "Not finite in step 7: .* The state is that before that step"
    with pytest.raises(NonFiniteError, match=text) as caught:
        trainer.fit(with_a_bad_row(7), steps=STEPS)
    assert caught.value.step == trainer.step == 7
    good = trainer_of(case)
    good.fit(case.data, steps=7)
    assert_bits_equal(trainer.state, good.state)


def test_on_nonfinite_skips_where_gradients_are_marked():
    case = regression_case()
    trainer = trainer_of(case, on_nonfinite="skip")
    trainer.fit(with_a_bad_row(7), steps=STEPS)
    assert np.flatnonzero(trainer.history["skipped"]).tolist() == [7]
    assert np.isfinite(trainer.state["params"][0]["w"]).all()
    unmarked = Case(counted, {"n": 0, "mean": 0.0, "late": 0.0}, rows())
    with pytest.raises(OptionError, match=r"on_nonfinite='skip'.*tr.mark\(grads, 'grad/"):
        trainer_of(unmarked, on_nonfinite="skip").fit(unmarked.data, steps=2)
    stops = trainer_of(unmarked, on_nonfinite="stop")
    data = rows()
    data[4][0] = np.inf
    with pytest.raises(NonFiniteError, match="step 4"):
        stops.fit(data, steps=STEPS)


# -- replicas -----------------------------------------------------------------------------------


def drifting(combine):
    def step(w, x):
        grad = jax.grad(lambda w: ((w - x) ** 2).mean())(w)
        return w - 0.1 * combine(grad), {"loss": (w - x.mean()) ** 2}

    return Case(step, jnp.float32(0), rows(12))


def test_replicas_train_where_the_step_combines_them():
    case = drifting(tr.cross_replica_mean)
    trainer = trainer_of(case, replicas=2)
    trainer.fit(case.data, steps=6)
    w = np.float32(0)
    for first, second in zip(case.data[::2], case.data[1::2], strict=True):
        grads = [jax.grad(lambda w, x=x: ((w - x) ** 2).mean())(w) for x in (first, second)]
        w = w - 0.1 * (grads[0] + grads[1]) / 2
    np.testing.assert_allclose(trainer.state, w, rtol=1e-5)
    assert trainer.history.each("loss").shape == (6, 1, 2)


def test_state_that_drifts_apart_is_refused_or_declared():
    case = drifting(lambda grad: grad)
    with pytest.raises(ReplicaError, match="'state' is computed from each replica's own elements"):
        trainer_of(case, replicas=2).fit(case.data, steps=6)
    for declared in ("each", lambda name: "each"):
        trainer = trainer_of(case, replicas=2, replica_state=declared)
        trainer.fit(case.data, steps=6)
        alone = [trainer_of(Case(case.step, case.state, case.data[r::2])) for r in range(2)]
        for one in alone:
            one.fit(case.data[alone.index(one) :: 2], steps=6)
        assert_bits_equal(trainer.state, np.stack([np.asarray(one.state) for one in alone]))


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda s, x: {"w": s["w"]}, r"returns a pair, \(state, metrics\). Received from <lambda>"),
        (lambda s, x: None, "Received from <lambda>: None. Is its return statement missing?"),
        (lambda s, x: ({"w": s["w"], "v": 1.0}, {}), "structure that it got. Received: new v"),
        (lambda s, x: ({}, {}), "Received: missing w"),
        (
            lambda s, x: ({"w": s["w"][:1]}, {"loss": 1.0}),
            r"w was float32\[2\] and came back as float32\[1\] from <lambda>",
        ),
        (
            lambda s, x: ({"w": s["w"].astype(jnp.float16)}, {"loss": 1.0}),
            r"w was float32\[2\] and came back as float16\[2\] from <lambda>. Cast or reshape",
        ),
        (lambda s, x: (s, {}), "at least one scalar among the metrics"),
        (lambda s, x: (s, {"all": x}), "at least one scalar among the metrics"),
        (lambda s, x: (s, {"text": "a"}), "metrics that <lambda> returns"),
        (lambda s, x: ({"w": "a"}, {"loss": 1.0}), "'w' came back as a str"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(step, text):
    trainer = tr.Trainer.from_step(step, {"w": np.zeros(2, np.float32)})
    with pytest.raises(ProgramError, match=text):
        trainer.fit(rows(2), steps=2)
    assert trainer.step == 0


def test_what_is_no_state_or_step_is_refused():
    with pytest.raises(ProgramError, match="at least one array. Received: state={}"):
        tr.Trainer.from_step(counted, {})
    torch = pytest.importorskip("torch")
    with pytest.raises(ProgramError, match=r"a Tensor of another library. Convert it: np.asarray"):
        tr.Trainer.from_step(counted, {"w": torch.zeros(2)})
    with pytest.raises(OptionError, match="step_fn is a function of state and batch. Received: 3"):
        tr.Trainer.from_step(3, {"w": 0.0})


# -- marks --------------------------------------------------------------------------------------


def test_a_mark_names_a_value_of_any_step():
    def loss_fn(w, x):
        hidden = tr.mark(x * w, "hidden/first")
        return (tr.mark({"a": hidden, "b": 2 * hidden}, "hidden/first")["a"] ** 2).mean()

    tap = tr.Tap("hidden/*", reduce="tensor")
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), np.float32(1), observe=[tap])
    x = np.arange(4, dtype=np.float32)
    trainer.fit([x], steps=1)
    assert_bits_equal(trainer.records["hidden/first"].values[0], x)
    assert_bits_equal(trainer.records["hidden/first/b"].values[0], 2 * x)
    plain_one = tr.Trainer(lambda w, x: ((x * w) ** 2).mean(), optax.sgd(0.1), np.float32(1))
    plain_one.fit([x], steps=1)
    assert_bits_equal(trainer.params, plain_one.params)


def test_a_name_that_is_taken_gets_a_number():
    def step(w, x):
        x = tr.mark(x, "x")
        for _ in range(2):
            x = tr.mark(2 * x, "x")
        return w + tr.mark(x.mean(), "updated/state"), {"loss": x.mean()}

    tap = tr.Tap(["x*", "updated/*"], reduce="tensor")
    trainer = tr.Trainer.from_step(step, np.float32(0), observe=[tap])
    trainer.fit([np.ones(2, np.float32)], steps=1)
    found = {name: float(trainer.records[name].values.ravel()[0]) for name in trainer.records.names}
    assert found == {"x": 1, "x#1": 2, "x#2": 4, "updated/state": 4, "updated/state#1": 4}


@pytest.mark.parametrize("name", ["", "a b", "a*", "/a", "a//b", 3, "activation/x:add"])
def test_a_mark_has_a_name(name):
    with pytest.raises(OptionError, match="tr.mark names a value by words"):
        tr.mark(1.0, name)


def test_outside_of_a_program_a_mark_is_nothing():
    assert float(tr.mark(2.0, "x")) == 2
    assert float(jax.jit(jax.grad(lambda x: tr.mark(x * x, "x")))(3.0)) == 6


@pytest.mark.parametrize("replicas", [1, 2])
def test_small_arrays_among_the_metrics_are_in_the_history(replicas):
    def step(state, x):
        state = state + tr.cross_replica_mean(x.sum())
        return state, {"loss": x.mean(), "rows": x, "pair": (x[0], x[1:3])}

    rows = [np.arange(4, dtype=np.float32) + n for n in range(6 * replicas)]
    trainer = tr.Trainer.from_step(step, np.float32(0), replicas=replicas)
    history = trainer.fit(rows, steps=6, progress=False)
    expected = np.array(rows).reshape(6, replicas, 4).mean(1)
    assert history.array_names == ["pair/1", "rows"]
    np.testing.assert_allclose(history["rows"], expected, rtol=1e-6)
    np.testing.assert_allclose(history["pair/1"], expected[:, 1:3], rtol=1e-6)
