"""Runs of the Keras and PyTorch front ends: written, opened, and compared with plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import assert_same_records

import tailrace as tr
import tailrace.keras as tk  # chooses the backend, before anybody imports keras

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype(np.float32)
Y = RNG.normal(size=(64, 3)).astype(np.float32)
UP, DOWN = (RNG.normal(size=shape).astype(np.float32) * 0.3 for shape in ((6, 5), (5, 3)))
RATE = 0.05
LAYERS = {"up": {"kernel": UP, "bias": np.zeros(5, np.float32)}}
LAYERS["down"] = {"kernel": DOWN, "bias": np.zeros(3, np.float32)}


def forward(layers, x):
    with jax.named_scope("up"):
        h = jax.nn.relu(x @ layers["up"]["kernel"] + layers["up"]["bias"])
    with jax.named_scope("down"):
        return h @ layers["down"]["kernel"] + layers["down"]["bias"]


def plain(run_dir=None, observe=("grad/*",), wrong=0.0):
    """The same training in plain JAX; `wrong` is added to what the second layer gives."""

    def loss_fn(layers, x, y):
        return ((forward(layers, x) + wrong - y) ** 2).mean()

    trainer = tr.Trainer(
        loss_fn, optax.sgd(RATE), LAYERS, observe=list(observe), run_dir=run_dir,
        steps_per_execution=4,
    )  # fmt: skip
    trainer.fit(tr.batches((X, Y), 8), steps=8, progress=False)
    return trainer


# -- Keras --------------------------------------------------------------------------------------


@pytest.fixture
def keras():
    with jax.numpy_dtype_promotion("standard"):  # as Keras expects
        yield pytest.importorskip("keras")


def keras_model(keras):
    layers = keras.layers
    model = keras.Sequential(
        [layers.Dense(5, activation="relu", name="up"), layers.Dense(3, name="down")]
    )
    model.build((None, 6))
    for name, weights in LAYERS.items():
        model.get_layer(name).set_weights([weights["kernel"], weights["bias"]])
    return model


def keras_trained(keras, run_dir, observe=("grad/*", "loss")):
    model = tk.adopt(keras_model(keras))
    optimizer = keras.optimizers.SGD(RATE)
    model.compile(optimizer, "mse", steps_per_execution=4, observe=list(observe), run_dir=run_dir)
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model, history


def test_a_keras_run(keras, tmp_path):
    model, history = keras_trained(keras, tmp_path / "run")
    run = tr.open_run(tmp_path / "run")
    assert run.is_ended
    assert list(run.history.steps) == list(range(8))
    assert run.history.loss.mean() == pytest.approx(history.history["loss"][-1], rel=1e-5)
    assert_same_records(run.records, model.records)
    assert list(run.records["grad/up/kernel"].steps) == list(range(8))
    assert run.catalogue["grad/up/kernel"].shape == (6, 5)
    assert "keras" in run.info["versions"]
    times = run.executions["times"]  # by what the device did
    assert times.shape == (len(run.executions["ended"]), 7)
    assert (times[:, 0] > 0).all()


class Stop(Exception):
    """Stands for the end of a process."""


def test_validations_of_a_keras_fit(keras, tmp_path):
    """Those of Keras' history; also if a kill comes between an epoch's batches and its validation."""

    def trained(place, fails_in=None):
        model = tk.adopt(keras_model(keras))
        run_dir = tmp_path / place / "run"
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=4, run_dir=run_dir)

        class Fail(keras.callbacks.Callback):
            epoch = 0

            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_test_begin(self, logs=None):
                if self.epoch == fails_in:
                    raise Stop

        kept = tr.Checkpoint(tmp_path / place / "kept", every=4)
        call = {"validation_data": (X[:16], Y[:16]), "batch_size": 8, "shuffle": False}
        model.fit(X, Y, epochs=3, verbose=0, checkpoint=kept, callbacks=[Fail()], **call)
        return model.history.history, tr.open_run(run_dir).history

    expected, found = trained("whole")
    assert found.validated.tolist() == [8, 16, 24]
    for name in ("val_loss", "val_mae"):
        np.testing.assert_array_equal(found[name], expected[name])
    for fails_in in (1, 2):
        with pytest.raises(Stop):
            trained("pieces", fails_in)
    _, again = trained("pieces")
    assert again.validated.tolist() == [8, 16, 24]
    np.testing.assert_array_equal(again["val_loss"], expected["val_loss"])
    assert again.steps.tolist() == list(range(24))


def test_records_of_a_keras_fit_with_a_smaller_last_batch(keras, tmp_path):
    """Batches of two shapes are two programs, and one fit."""
    model = tk.adopt(keras_model(keras))
    model.compile("sgd", "mse", steps_per_execution=2, observe="loss", run_dir=tmp_path / "run")
    for _ in range(2):  # records are those of the latest fit
        model.fit(X[:7], Y[:7], batch_size=2, epochs=3, shuffle=False, verbose=0)
    steps = model.records["loss"].steps.tolist()
    assert steps == list(range(12, 24))
    assert tr.open_run(tmp_path / "run").records["loss"].steps.tolist() == list(range(24))


def test_a_keras_run_beside_plain_jax(keras, tmp_path):
    model, _ = keras_trained(keras, tmp_path / "keras")
    plain(tmp_path / "jax")
    found = tr.diff(tmp_path / "keras", tmp_path / "jax", rtol=1e-4)
    assert not found, found
    assert found.compared >= 5  # four gradients and the loss
    plain(tmp_path / "wrong", wrong=0.5)
    found = tr.diff(tmp_path / "keras", tmp_path / "wrong", rtol=1e-4)
    assert found.step == 0
    assert found.tensor.startswith("grad/")
    assert not tr.diff(model, plain(), rtol=1e-4)  # the objects themselves


def test_a_keras_function_beside_plain_jax(keras):
    model = keras_model(keras)
    weights = [variable.value for variable in model.trainable_variables]

    def of_keras(weights, x):
        return model.stateless_call(weights, [], x)[0]

    def of_jax(weights, x):
        up, down = weights[:2], weights[2:]
        pair = {"up": dict(zip(("kernel", "bias"), up, strict=True))}
        pair["down"] = dict(zip(("kernel", "bias"), down, strict=True))
        return forward(pair, x)

    def wrong(weights, x):
        return of_jax([weights[0], weights[1] + 0.25, *weights[2:]], x)

    same = tr.diff(of_keras, of_jax, (weights, X[:4]), rtol=1e-6)
    assert not same, same
    assert same.compared > 10
    found = tr.diff(of_keras, wrong, (weights, X[:4]), rtol=1e-6)
    assert found.tensor.startswith("activation/up:")


# -- PyTorch ------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def tt(torch):
    return pytest.importorskip("tailrace.torch")


NAMES = {
    "fc1.weight": "up/kernel",
    "fc1.bias": "up/bias",
    "fc2.weight": "down/kernel",
    "fc2.bias": "down/bias",
}


def torch_module(torch):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)

        def forward(self, x, y=None):
            out = self.fc2(torch.relu(self.fc1(x)))
            return out if y is None else (out, torch.nn.functional.mse_loss(out, y))

    net = Net()
    with torch.no_grad():
        for layer, name in ((net.fc1, "up"), (net.fc2, "down")):
            layer.weight.copy_(torch.from_numpy(LAYERS[name]["kernel"].T.copy()))
            layer.bias.zero_()
    return net


def test_a_torch_run_beside_plain_jax(torch, tt, tmp_path):
    net = torch_module(torch)
    model = tt.training_model(
        net,
        tt.optim.SGD(net.parameters(), lr=RATE),
        device_iterations=4,
        observe=["grad/*"],
        run_dir=tmp_path / "torch",
    )
    for start in (0, 32):
        model(*(torch.from_numpy(a[start : start + 32]) for a in (X, Y)))
    model.destroy()
    run = tr.open_run(tmp_path / "torch")
    assert list(run.history.steps) == list(range(8))
    assert list(run.records["grad/fc1.weight"].steps) == list(range(8))
    assert run.catalogue["grad/fc1.weight"].shape == (5, 6)
    plain(tmp_path / "jax")
    found = tr.diff(tmp_path / "jax", tmp_path / "torch", names=NAMES, rtol=1e-4)
    assert not found, found
    assert found.compared == 5  # four gradients, and the loss
    plain(tmp_path / "wrong", wrong=0.5)
    found = tr.diff(tmp_path / "wrong", tmp_path / "torch", names=NAMES, rtol=1e-4)
    assert (found.step, found.tensor.split("/")[0]) == (0, "grad")


def test_a_torch_function_beside_plain_jax(torch, tt):
    function, params = tt.as_function(torch_module(torch))

    def of_jax(params, x):
        layers = {
            up: {"kernel": params[f"{fc}.weight"].T, "bias": params[f"{fc}.bias"]}
            for fc, up in (("fc1", "up"), ("fc2", "down"))
        }
        return forward(layers, x)

    batch = (params, jnp.asarray(X[:4]))
    np.testing.assert_allclose(function(*batch), of_jax(*batch), rtol=1e-5)
    names = {"fc1/linear:add": "up:add", "fc2": "down"}  # before and behind the relu
    same = tr.diff(of_jax, function, batch, names=names, rtol=1e-6)
    assert not same, same
    assert not {"activation/up:add", "activation/down"} & set(same.only_first)
    changed = {**params, "fc2.bias": params["fc2.bias"] + 0.5}
    found = tr.diff(lambda p, x: of_jax(changed, x), function, batch, names=names, rtol=1e-6)
    assert found.tensor == "activation/down"
    assert found.largest == pytest.approx(0.5, rel=1e-4)
