"""Where two runs, or two functions, part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_parts import chosen, execution
from small_runs import PARAMS, make_trainer, train

import tailrace as tr
from tailrace.runs.writer import RunWriter


def written(directory, change=None, steps=6):
    """A run made by hand; `change` is (tensor number, step, by how much)."""
    ones = [chosen("activation/a"), chosen("grad/b", shape=(2,)), chosen("update/c")]
    sink = RunWriter(directory)
    with sink.fitting({"catalogue": []}):
        done = execution(0, steps, ones)
        for number, step, amount in [change] if change else []:
            done.parts[number].value[step] += np.float32(amount)
        sink.execution(done)
    return directory


def test_equal_runs(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    found = tr.diff(first, tr.open_run(second))
    assert not found
    assert str(found) == "No difference in 4 tensors."


@pytest.mark.parametrize("amount", [0.5, float("nan"), float("inf")])
def test_the_first_step_and_tensor(tmp_path, amount):
    first, second = written(tmp_path / "a"), written(tmp_path / "b", (1, 3, amount))
    found = tr.diff(str(first), second)
    assert (found.tensor, found.step, found.kind) == ("grad/b", 3, "tensor")
    assert found.largest == (0.5 if amount == 0.5 else np.inf)
    assert "They part in step 3, microbatch 0 at grad/b (tensor): 3" in str(found)


def test_tolerances(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b", (2, 4, 0.25))
    assert tr.diff(first, second).tensor == "update/c"
    assert tr.diff(first, second).relative == pytest.approx(0.25 / 4.25)
    assert not tr.diff(first, second, atol=0.3)
    assert not tr.diff(first, second, rtol=0.1)


def test_real_runs_part_where_the_learning_rate_acts(tmp_path):
    taps = ["grad/*", "update/*", "activation/hidden"]
    train(make_trainer(tmp_path / "a", taps))
    train(make_trainer(tmp_path / "b", [*taps, "param/*"], rate=0.011))
    found = tr.diff(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.tensor) == (0, "update/first")
    assert found.field in ("mean", "std", "min", "max")
    assert found.relative == pytest.approx(0.1 / 1.1, rel=1e-3)
    assert found.only_second == ("param/first", "param/second")
    assert "Only the second has 2 more (param/first, param/second)." in str(found)


def test_trainers_after_a_fit():
    one, other = make_trainer(), make_trainer()
    train(one)
    train(other)
    assert not tr.diff(one, other)
    params = {**PARAMS, "first": PARAMS["first"] + np.float32(1e-3)}
    changed = make_trainer(params=params)
    train(changed)
    found = tr.diff(one, changed)
    assert (found.step, found.tensor) == (0, "grad/first")


# -- functions ----------------------------------------------------------------------------------


def model(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return (h * h).sum()


def narrow(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        h = h.astype(jnp.bfloat16)
        return (h * h).astype(jnp.float32).sum()


def test_functions():
    batch = (jnp.eye(3), jnp.linspace(0, 1, 6).reshape(2, 3))
    assert not tr.diff(model, model, batch)
    found = tr.diff(model, narrow, batch)
    assert found.tensor == "activation/second:mul"
    assert 0 < found.relative < 1e-2
    assert str(found).startswith("They part at activation/second:mul (tensor): ")
    assert not tr.diff(model, narrow, batch, rtol=0.05)


def test_gradients_of_functions():
    def gradient(of):
        return lambda w, x: jax.grad(of)(w, x)

    batch = (jnp.eye(3), jnp.ones((2, 3)))
    assert not tr.diff(gradient(model), gradient(model), batch)
    assert tr.diff(gradient(model), gradient(narrow), batch)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 2), "compares two runs or two functions. Received: int and int"),
        ((abs, abs), "of two functions needs a batch"),
        (("a", "b", 3), "takes a batch for two functions, not for two runs"),
        ((abs, "b"), "compares two runs or two functions. Received: builtin_function"),
    ],
)
def test_what_cannot_be_compared(arguments, text):
    with pytest.raises(tr.errors.OptionError, match=text):
        tr.diff(*arguments)


def test_more_that_cannot_be_compared(tmp_path):
    with pytest.raises(tr.errors.OptionError, match="rtol is a number of at least 0"):
        tr.diff("a", "b", rtol=-1)
    with pytest.raises(tr.errors.OptionError, match="no tensor in common"):
        tr.diff(lambda: jnp.ones(2), lambda: jnp.ones(3), ())
    empty = tmp_path / "empty"
    with RunWriter(empty).fitting({"catalogue": []}):
        pass
    with pytest.raises(tr.errors.OptionError, match="nothing in common to compare"):
        tr.diff(empty, written(tmp_path / "a"))
