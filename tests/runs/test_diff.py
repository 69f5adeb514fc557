"""Where two runs, or two functions, part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_parts import chosen, execution
from small_runs import PARAMS, make_trainer, train

import tailrace as tr
from tailrace.runs.diff.difference import rank_of
from tailrace.runs.writer import RunWriter


def written(directory, *changes, steps=6):
    """A run made by hand; a change is (tensor number, step, by how much)."""
    ones = [chosen("activation/a"), chosen("grad/b", shape=(2,)), chosen("update/c")]
    ones.append(chosen("optimizer/d"))
    sink = RunWriter(directory)
    with sink.fitting({"catalogue": []}):
        done = execution(0, steps, ones)
        for number, step, amount in changes:
            done.parts[number].value[step] += np.float32(amount)
        sink.execution(done)
    return directory


def test_equal_runs(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    found = tr.diff(first, tr.open_run(second))
    assert not found
    assert str(found) == "No difference in 5 tensors."


@pytest.mark.parametrize("amount", [0.5, float("nan"), float("inf")])
def test_the_first_step_and_tensor(tmp_path, amount):
    first, second = written(tmp_path / "a"), written(tmp_path / "b", (1, 3, amount))
    found = tr.diff(str(first), second)
    assert (found.tensor, found.step, found.kind) == ("grad/b", 3, "tensor")
    assert found.largest == (0.5 if amount == 0.5 else np.inf)
    assert "They first differ in step 3, microbatch 0 at grad/b (tensor): 3" in str(found)


def test_the_update_comes_after_the_gradients(tmp_path):
    """The optimizer's state is that after the step: it is not the cause of other gradients."""
    names = ["activation/a", "grad/b", "optimizer/d", "update/c"]
    order = [0, 1, 3, 2]
    first = written(tmp_path / "a")
    for begin in (0, 2):
        changes = [(number, 3, 0.5) for number in order[begin:]]
        second = written(tmp_path / str(begin), *changes)
        assert tr.diff(first, second).tensor == names[begin]
    assert sorted(reversed(names), key=rank_of) == names


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


def test_complex_values_are_more_than_their_magnitude():
    """1 and -1j are as long as each other; what is shown is the values."""
    x = np.array([1, 1j, 2], np.complex64)

    def turned(by):
        def function(x):
            with jax.named_scope("turn"):
                return x * jnp.complex64(by)

        return function

    plain, rotated = turned(1), turned(-1j)
    found = tr.diff(plain, rotated, (x,))
    assert found.tensor.startswith("activation/turn")
    assert found.values == (2, -2j)
    assert found.largest == pytest.approx(2 * 2**0.5)
    assert "2+0j and 0-2j" in str(found) or "2+0j and -0-2j" in str(found)
    assert not tr.diff(plain, plain, (x,))


def test_functions():
    batch = (jnp.eye(3), jnp.linspace(0, 1, 6).reshape(2, 3))
    assert not tr.diff(model, model, batch)
    found = tr.diff(model, narrow, batch)
    assert found.tensor == "activation/second:mul"
    assert 0 < found.relative < 1e-2
    assert str(found).startswith("They first differ at activation/second:mul (tensor): ")
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


# -- devices, dtypes, names ---------------------------------------------------------------------


BATCH = (jnp.eye(3), jnp.linspace(0, 1, 6).reshape(2, 3))


@pytest.mark.cpu
def test_one_function_on_two_devices(monkeypatch):
    from tailrace.runs.diff import functions

    seen = []
    plain = functions.observe

    def watched(function, taps, **options):
        made = plain(function, taps, **options)
        if not taps:
            return made

        def call(*args):
            out, records = made(*args)
            seen.append(out.devices())
            if out.devices() == {jax.devices()[3]}:  # this one is broken
                records["activation/second:mul"].values[...] += np.float32(0.5)
            return out, records

        return call

    monkeypatch.setattr(functions, "observe", watched)
    assert not tr.diff(model, model, BATCH, devices=(0, "cpu:2"))
    assert seen == [{jax.devices()[0]}, {jax.devices("cpu")[2]}]
    found = tr.diff(model, model, BATCH, devices=(jax.devices()[1], 3))
    assert seen[2:] == [{jax.devices()[1]}, {jax.devices()[3]}]
    assert found.tensor == "activation/second:mul"
    assert found.largest == pytest.approx(0.5)


def test_one_function_in_two_dtypes():
    assert not tr.diff(model, model, BATCH, dtypes=("float32", None))
    found = tr.diff(model, model, BATCH, dtypes=(None, jnp.bfloat16), rtol=1e-4)
    assert found.tensor == "activation/first:dot_general"
    assert 1e-4 < found.relative < 1e-2
    assert not tr.diff(model, model, BATCH, dtypes=(None, jnp.bfloat16), rtol=0.02)


def other_names(w, x):
    with jax.named_scope("a"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("b"):
        return (h * h).sum() + 1e-3


def test_names():
    assert tr.diff(model, other_names, BATCH).tensor == "output/0"
    found = tr.diff(model, other_names, BATCH, names={"a": "first", "b": "second"})
    assert found.tensor == "activation/second"
    assert found.compared == 9
    assert found.only_second == ("activation/second:add",)
    swapped = {"a": "second", "activation/b:mul": "activation/first:tanh"}
    assert tr.diff(model, other_names, BATCH, names=swapped)
    by_call = tr.diff(
        model, other_names, BATCH, names=lambda name: name.replace("/a", "/first"), rtol=1e-2
    )
    assert not by_call
    assert "activation/b" in by_call.only_second


def test_names_of_runs(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b", (1, 3, 0.5))
    found = tr.diff(first, second, names={"b": "z"})
    assert not found
    assert found.only_second == ("grad/z",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": "cpu"}, r"devices are two, one for each function.*Received: 'cpu'"),
        ({"devices": (0, 99)}, r"its number, or a platform.* Received: 99. There are: 'cpu:0', "),
        ({"devices": (0, "tpu")}, r"Received: 'tpu'. There are: 'cpu:0'"),
        ({"devices": (0, "cpu:x")}, r"Received: 'cpu:x'"),
        ({"dtypes": (None, int)}, r"dtypes are floats, or None. Received: <class 'int'>"),
        ({"dtypes": (None, "half a byte")}, r"dtypes are floats, or None"),
        ({"names": {"c": "d"}}, r"names has an entry for 'c', and the second has no such tensor"),
        (
            {"names": {"first": "second", "second": "second"}},
            r"two tensors of the second one name, 'activation/second.*'",
        ),
        ({"names": lambda name: None}, r"gives each name a name. Received: None"),
    ],
)
def test_options_of_functions(options, text):
    with pytest.raises(tr.errors.OptionError, match=text):
        tr.diff(model, model, BATCH, **options)


def test_options_that_are_not_for_runs(tmp_path):
    first = written(tmp_path / "a")
    with pytest.raises(tr.errors.OptionError, match="takes devices for two functions, not for two"):
        tr.diff(first, first, devices=(0, 1))
    with pytest.raises(tr.errors.OptionError, match="takes dtypes for two functions, not for two"):
        tr.diff(first, first, dtypes=(None, None))
