"""One table of features and front ends: each cell runs, and ends with the weights of a plain loop.

The model is one matrix, trained with SGD on 15 batches in executions of 5 steps; batch 7 may be NaN.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import tailrace as tr

pytestmark = pytest.mark.usefixtures("same_devices")  # IPU programs choose theirs

STEPS, EACH, BAD, RATE = 15, 5, 7, 0.1
X = np.random.default_rng(0).normal(size=(STEPS, 4, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)).astype(np.float32)


def plain(steps, data=X, wanted=Y):
    """The weights after some steps of a plain loop; a step whose loss is not finite changes nothing."""
    w = np.zeros((3, 1), np.float32)
    for x, y in zip(data[:steps], wanted[:steps], strict=True):
        gradient = 2 * x.T @ (x @ w - y) / len(x)
        w = w - RATE * gradient if np.isfinite(gradient).all() else w
    return w


def bad(*steps):
    data = X.copy()
    data[list(steps)] = np.nan
    return data


class OfTrainer:
    """`tr.Trainer`."""

    grad = "grad/w"

    def __init__(self, **options):
        optax = pytest.importorskip("optax")

        def loss(params, batch):
            return ((batch[0] @ params["w"] - batch[1]) ** 2).mean()

        params = {"w": np.zeros((3, 1), np.float32)}
        self.trainer = tr.Trainer(
            loss, optax.sgd(RATE), params, steps_per_execution=EACH, **options
        )

    def train(self, data=X, heard=None, checkpoint=None):
        callbacks = []
        if heard is not None:

            class Heard(tr.Callback):
                def on_step_end(self, trainer, step, logs):
                    heard(step + 1)

            callbacks = [Heard()]
        self.trainer.fit(
            list(zip(data, Y, strict=True)),
            epochs=1,
            callbacks=callbacks,
            progress=False,
            checkpoint=checkpoint,
        )

    @property
    def weights(self):
        return np.asarray(self.trainer.params["w"])

    @property
    def step(self):
        return self.trainer.step

    @property
    def records(self):
        return self.trainer.records


class OfKeras:
    """A Keras model in the scope of a `tk.Strategy`."""

    grad = "grad/d/kernel"

    def __init__(self, **options):
        if importlib.util.find_spec("keras") is None:
            pytest.skip("Keras is not installed")
        importlib.import_module("tailrace.keras")  # before Keras, whose backend it chooses
        import keras

        with self.scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(1, use_bias=False, name="d")]
            )
            model.compile(keras.optimizers.SGD(RATE), "mse", steps_per_execution=EACH, **options)
        model.set_weights([np.zeros((3, 1), np.float32)])
        self.model, self.keras = model, keras

    def scope(self):
        return tr.keras.Strategy().scope()

    def train(self, data=X, heard=None, checkpoint=None):
        callbacks = []
        if heard is not None:

            class Heard(self.keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None):
                    heard(batch + 1)

            callbacks = [Heard()]
        rows = data.reshape(-1, 3), Y.reshape(-1, 1)
        kept = {} if checkpoint is None else {"checkpoint": checkpoint}
        self.model.fit(*rows, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **kept)

    @property
    def weights(self):
        return np.asarray(self.model.get_weights()[0])

    @property
    def step(self):
        return int(self.model.optimizer.iterations)

    @property
    def records(self):
        return self.model.records


class OfIPU(OfKeras):
    """A Keras model in the scope of an `IPUStrategy`."""

    def scope(self):
        from tailrace.compat import ipu

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 1
        config.configure_ipu_system()
        return ipu.ipu_strategy.IPUStrategy().scope()


class OfTorch:
    """A PyTorch module, called in a loop of the user."""

    grad = "grad/linear.weight"

    def __init__(self, **options):
        self.torch = torch = pytest.importorskip("torch")
        import tailrace.torch as tt

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(3, 1, bias=False)
                torch.nn.init.zeros_(self.linear.weight)

            def forward(self, x, y):
                return torch.nn.functional.mse_loss(self.linear(x), y)

        self.module = Net()
        optimizer = torch.optim.SGD(self.module.parameters(), RATE)
        self.make = lambda **more: tt.training_model(
            self.module, optimizer, device_iterations=EACH, **options, **more
        )
        self.model = self.make()
        self.calls = 0

    def train(self, data=X, heard=None, checkpoint=None):
        begun = 0
        if checkpoint is not None:
            self.model.destroy()
            self.model = self.make(checkpoint=checkpoint)
            begun = self.model.resume().step
        for first in range(begun, STEPS, EACH):
            rows = data[first : first + EACH].reshape(-1, 3), Y[first : first + EACH].reshape(-1, 1)
            self.model(*map(self.torch.from_numpy, rows))
            if heard is not None:
                heard(first + EACH)

    @property
    def weights(self):
        return self.module.linear.weight.detach().numpy().T.copy()

    @property
    def step(self):
        return int(self.model.history.steps[-1]) + 1

    @property
    def records(self):
        return self.model.records


FRONT_ENDS = [OfTrainer, OfKeras, OfIPU, OfTorch]
each_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda kind: kind.__name__)


def run_of(directory):
    run = tr.open_run(directory)
    assert run.state == "ended"
    return run


@each_front_end
def test_a_guard_stops_before_the_bad_step(front_end, tmp_path):
    """Weights, step, history and records agree; bundle and run directory are complete."""
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite(bundle=tmp_path / "bundle")
    used = front_end(observe=[front_end.grad, guard], run_dir=tmp_path / "run")
    with pytest.raises(tr.errors.NonFiniteError, match=f"Not finite in step {BAD}") as caught:
        used.train(bad(BAD, BAD + 1))
    assert caught.value.step == BAD
    np.testing.assert_allclose(used.weights, plain(BAD), rtol=1e-5, atol=1e-6)
    assert used.step == BAD
    note = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert note["step"] == BAD
    run = run_of(tmp_path / "run")
    assert len(run.history.loss) == BAD
    assert [report["step"] for report in run.nonfinite_reports] == [BAD]
    assert run.compilations


@each_front_end
def test_skipped_steps_are_counted_up_to_the_limit(front_end):
    guard = tr.stop_on_nonfinite(on_nonfinite="skip", limit=1)
    used = front_end(observe=[guard])
    with pytest.raises(tr.errors.NonFiniteError, match="2 steps .* more than limit=1"):
        used.train(bad(1, BAD))
    # The count of Keras' optimizer is part of the state that a skipped step leaves as it is.
    done = used.step + 2 * isinstance(used, OfKeras)
    # The execution is whole, and so is one that was in flight behind it.
    assert done in (2 * EACH, 3 * EACH)
    np.testing.assert_allclose(used.weights, plain(done, bad(1, BAD)), rtol=1e-5, atol=1e-6)


@each_front_end
@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_between_two_executions_loses_nothing(front_end, raised, tmp_path):
    used = front_end(observe=[front_end.grad], run_dir=tmp_path / "run")

    def heard(step):
        if step == 2 * EACH:
            raise raised

    with pytest.raises(raised):
        used.train(heard=heard)
    assert used.step == 2 * EACH
    np.testing.assert_allclose(used.weights, plain(2 * EACH), rtol=1e-5, atol=1e-6)
    assert used.records[front_end.grad].steps[-1] == 2 * EACH - 1
    if front_end is OfTorch:  # the loop is the user's, and may go on
        used.model.destroy()
    run = run_of(tmp_path / "run")
    assert len(run.history.loss) == len(run.records[front_end.grad].values) == 2 * EACH


@each_front_end
def test_a_training_that_ends_in_the_middle_goes_on(front_end, tmp_path):
    """In another process, from its newest checkpoint: the last steps alone are trained."""
    pytest.importorskip("orbax.checkpoint")
    checkpoint, heard = tr.Checkpoint(tmp_path / "kept", every=EACH), []

    def stop(step):
        if step == 2 * EACH:
            raise KeyError

    used = front_end()
    with pytest.raises(KeyError):
        used.train(heard=stop, checkpoint=checkpoint)
    if front_end is OfTorch:
        used.model.destroy()
    again = front_end()
    again.train(heard=heard.append, checkpoint=checkpoint)
    assert heard
    assert min(heard) > EACH
    assert again.step == STEPS
    np.testing.assert_allclose(again.weights, plain(STEPS), rtol=1e-5, atol=1e-6)


def test_a_full_outfeed_hides_no_step():
    """The steps of the execution whose values have no room ran, and count."""
    optax = pytest.importorskip("optax")
    queue = tr.OutfeedQueue(most_bytes=4 * EACH)

    def loss(params, batch):
        return queue.enqueue(((batch[0] @ params["w"] - batch[1]) ** 2).mean())

    params = {"w": np.zeros((3, 1), np.float32)}
    trainer = tr.Trainer(loss, optax.sgd(RATE), params, steps_per_execution=EACH)
    with pytest.raises(tr.errors.FeedError, match="have no room"):
        trainer.fit(list(zip(X, Y, strict=True)), epochs=1, progress=False)
    assert 2 * EACH <= len(trainer.history.loss) == trainer.step
    assert len(queue.dequeue()) == EACH


@pytest.fixture
def heard_interrupts():
    """Who runs the tests may ignore Ctrl-C, as a shell does for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_inside_a_call_of_pytorch(presses, monkeypatch):
    """It waits until weights, step and history agree; a second one does not wait."""
    used = OfTorch()
    portions = importlib.import_module("tailrace.torch.programs.portions")
    joined = portions.joined

    def pressed(parts):
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return joined(parts)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(portions, "joined", pressed)
    with pytest.raises(KeyboardInterrupt):
        used.train()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    np.testing.assert_allclose(used.weights, plain(EACH), rtol=1e-5, atol=1e-6)
    assert presses == 2 or used.step == EACH
    used.train()
    assert used.step == EACH + STEPS
    twice = np.concatenate([X[:EACH], X]), np.concatenate([Y[:EACH], Y])
    np.testing.assert_allclose(used.weights, plain(EACH + STEPS, *twice), rtol=1e-5, atol=1e-6)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_front_ends import *
used = OfTorch(observe=[OfTorch.grad], run_dir={run!r})
used.train()
{ending}
"""


COLLECTED = """
import gc, torch
del used
gc.collect()
print(tr.open_run({run!r}).state, "grad" in vars(torch.nn.Parameter))
"""


@pytest.mark.parametrize("ending", ["", "raise KeyError", COLLECTED], ids=["end", "error", "gc"])
def test_a_pytorch_run_is_complete_when_the_process_exits(ending, tmp_path):
    """Nobody has called `destroy()`."""
    pytest.importorskip("torch")
    run = str(tmp_path / "run")
    tests = str(__import__("pathlib").Path(__file__).parent)
    script = SCRIPT.format(tests=tests, run=run, ending=ending.format(run=run))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == bool("raise" in ending), done.stderr
    assert ending != COLLECTED or done.stdout.strip() == "ended False"
    found = run_of(run)
    assert len(found.history.loss) == len(found.records[OfTorch.grad].values) == STEPS
    assert found.compilations
