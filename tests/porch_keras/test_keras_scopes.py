"""Scopes adopt the models made in them, and nothing else: threads, tasks, nesting, errors, names."""

import asyncio
import contextlib
import copy
import inspect
import pickle
import threading

import keras
import numpy as np
import pytest
from keras_oracle import SPARSE, classifier, digits_like

import tailrace as tr
import tailrace.keras as tk
from tailrace.keras.handles import attached
from waits import LIMIT_S

L = keras.layers


def is_adopted(model):
    return attached(model) is not None


def in_a_thread(function):
    """What a function returns that runs in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_models_made_in_the_scope_are_adopted():
    with tk.Strategy().scope():
        made = [keras.Sequential(), keras.Model(x := keras.Input((1,)), L.Dense(1)(x))]
        assert not is_adopted(in_a_thread(keras.Sequential))
    assert all(map(is_adopted, made))
    assert not is_adopted(keras.Sequential())


def test_scopes_that_overlap_leave_nothing_behind():
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(tk.Strategy().scope())
    second.enter_context(tk.Strategy(replicas=2).scope())
    first.close()
    assert tk.of(keras.Sequential()).settings.replicas == 2
    second.close()
    assert not is_adopted(keras.Sequential())


def test_scopes_of_two_threads_that_overlap():
    opened, closed = threading.Event(), threading.Event()

    def other():
        with tk.Strategy().scope():
            opened.set()
            closed.wait(LIMIT_S)
            return is_adopted(keras.Sequential())

    found = []
    thread = threading.Thread(target=lambda: found.append(other()))
    with tk.Strategy().scope():
        thread.start()
        assert opened.wait(LIMIT_S)
    assert not is_adopted(keras.Sequential())
    closed.set()
    thread.join()
    assert found == [True]
    assert not is_adopted(keras.Sequential())


def test_the_innermost_scope_adopts():
    with tk.Strategy(replicas=2).scope(), tk.Strategy(replicas=1).scope():
        assert tk.of(keras.Sequential()).settings.replicas == 1


def test_a_scope_that_is_left_by_an_exception():
    with pytest.raises(KeyError), tk.Strategy().scope():
        raise KeyError
    assert not is_adopted(keras.Sequential())


def test_tasks_are_in_the_scope_they_were_started_in_while_it_is_open():
    async def main():
        go = asyncio.Event()

        async def late():
            await go.wait()
            return is_adopted(keras.Sequential())

        async def beside():
            return is_adopted(keras.Sequential())

        before = asyncio.create_task(late())
        with tk.Strategy().scope():
            inside = await asyncio.create_task(beside())
            outliving = asyncio.create_task(late())
            await asyncio.sleep(0)
        go.set()
        return await before, inside, await outliving

    assert asyncio.run(main()) == (False, True, False)


def test_a_scope_that_is_closed_in_another_context():
    scope = tk.Strategy().scope()
    scope.__enter__()
    in_a_thread(lambda: scope.__exit__(None, None, None))
    assert not is_adopted(keras.Sequential())


def test_datasets_are_iterated_as_ever():
    x, y = digits_like(16)
    with tk.Strategy().scope():
        batches = list(tr.batches((x, y), 8))
    np.testing.assert_array_equal(batches[1][0], x[8:])


def test_layers_of_another_thread_note_no_stage():
    with tk.Strategy().scope(), tk.PipelineStage(1):
        here = L.Dense(1)
        there = in_a_thread(lambda: L.Dense(1))
    assert here.__dict__["_tailrace_stage"] == 1
    assert "_tailrace_stage" not in there.__dict__
    assert "_tailrace_stage" not in L.Dense(1).__dict__


def test_hooked_methods_look_like_those_of_keras():
    found = inspect.getfullargspec(keras.layers.Layer.__init__)  # Keras reads it like this
    assert (found.args, "dtype" in found.kwonlyargs) == (["self"], True)
    assert "steps_per_epoch" in inspect.signature(keras.Model.fit).parameters
    assert keras.Sequential.compile is keras.Model.compile, "or Keras takes it for overridden"


# -- names that the user has taken --------------------------------------------------------------


class Library(keras.Model):
    """Has its own uses for names that adopted models have."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4, activation="softmax")
        self.records = ["Blue"]
        self.tailrace = 3

    def call(self, x):
        return self.dense(x)

    def tensors(self):
        return "mine"


def test_a_users_names_win_and_ours_are_reached_by_of():
    x, y = digits_like(32)
    with tk.Strategy().scope():
        model = Library()
    model.compile("sgd", SPARSE["loss"](), steps_per_execution=2, observe=["loss"])
    model.fit(x, y, batch_size=8, verbose=0)
    assert (model.records, model.tensors(), model.tailrace) == (["Blue"], "mine", 3)
    assert tk.of(model).records["loss"].values.shape == (4,)
    assert "loss" in [entry.name for entry in tk.of(model).tensors()]


def test_plain_models_do_not_have_what_adopted_ones_have():
    plain = keras.Sequential()
    assert not hasattr(plain, "records")
    assert not hasattr(plain, "set_pipelining_options")
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'tensors'"):
        plain.tensors()


# -- copies and files ---------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_adopted_as_the_model_is(copied):
    x, y = digits_like(32)
    model = tk.adopt(classifier())
    model.set_gradient_accumulation_options(2)
    model.compile("adam", SPARSE["loss"](), steps_per_execution=4)
    model.fit(x, y, batch_size=8, verbose=0)
    again = copied(model)
    assert type(again) is keras.Sequential
    assert again.tailrace.options == model.tailrace.options
    for one in (model, again):
        keras.utils.set_random_seed(0)
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
