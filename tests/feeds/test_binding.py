"""How an element becomes the arguments of a function."""

import functools
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tailrace.errors import ProgramError
from tailrace.feeds.elements import bind_element, call_with_element


class Point(NamedTuple):
    x: int
    y: int


def two(state, x, y):
    return ("two", x, y)


def whole(state, batch):
    return ("whole", batch)


def optional(state, x, y=7):
    return ("optional", x, y)


def many(state, *args):
    return ("many", args)


def named(state, **kwargs):
    return ("named", kwargs)


def only_names(state, *, x, y):
    return ("only names", x, y)


def nothing():
    return "nothing"


@pytest.mark.parametrize(
    ("function", "element", "expected"),
    [
        (two, (1, 2), ("two", 1, 2)),
        (two, [1, 2], ("two", 1, 2)),
        (two, {"y": 2, "x": 1}, ("two", 1, 2)),
        (whole, (1, 2), ("whole", (1, 2))),
        (whole, {"x": 1}, ("whole", {"x": 1})),
        (whole, {"batch": 1}, ("whole", 1)),
        (whole, {1: 2}, ("whole", {1: 2})),
        (whole, (1,), ("whole", 1)),
        (whole, 5, ("whole", 5)),
        (whole, Point(1, 2), ("whole", Point(1, 2))),
        (two, Point(1, 2), ("two", 1, 2)),
        (optional, Point(1, 2), ("optional", Point(1, 2), 7)),
        (many, Point(1, 2), ("many", (Point(1, 2),))),
        (optional, (1, 2), ("optional", 1, 2)),
        (optional, (1,), ("optional", 1, 7)),
        (optional, {"x": 1}, ("optional", 1, 7)),
        (optional, {"z": 1}, ("optional", {"z": 1}, 7)),
        (many, (1, 2), ("many", (1, 2))),
        (many, {"x": 1}, ("many", ({"x": 1},))),
        (named, {"x": 1}, ("named", {"x": 1})),
        (only_names, {"y": 2, "x": 1}, ("only names", 1, 2)),
        (whole, ({"x": 1}, 2), ("whole", ({"x": 1}, 2))),
        (two, ({"x": 1}, 2), ("two", {"x": 1}, 2)),
    ],
)
def test_how_an_element_becomes_arguments(function, element, expected):
    assert call_with_element(function, ("state",), element) == expected


def test_methods_partials_and_callables():
    class Model:
        def step(self, state, x, y):
            return x, y

        def __call__(self, state, batch):
            return batch

    assert call_with_element(Model().step, (0,), (1, 2)) == (1, 2)
    assert call_with_element(Model(), (0,), (1, 2)) == (1, 2)
    assert call_with_element(functools.partial(two, y=9), (0,), (1,)) == ("two", 1, 9)


def test_without_first_arguments():
    assert call_with_element(lambda x, y: (x, y), (), (1, 2)) == (1, 2)
    assert call_with_element(lambda batch: batch, (), {"a": 1}) == {"a": 1}


def test_a_builtin_without_a_signature_decides_itself():
    assert bind_element(max, 0, (1, 2)) == ((1, 2), {})


@pytest.mark.parametrize(
    ("function", "given", "element", "text"),
    [
        (two, 1, (1, 2, 3), "two(state, x, y) gets 1 argument first and then 3 positional"),
        (two, 1, (1,), "and then 1 positional argument, which does not fit"),
        (two, 1, 5, "and then one array, which does not fit"),
        (two, 1, {"x": 1, "z": 2}, "and then the keyword arguments ['x', 'z'], which"),
        (nothing, 0, (1,), "nothing() gets 0 arguments first"),
        (only_names, 1, (1, 2), "take the element whole with one more parameter"),
    ],
)
def test_what_does_not_fit(function, given, element, text):
    with pytest.raises(ProgramError, match=re.escape(text)):
        bind_element(function, given, element)


def notes(function, first, element):
    with pytest.raises((TypeError, KeyError)) as caught:
        jax.jit(lambda element: call_with_element(function, first, element))(element)
    return [note for note in caught.value.__notes__ if note.startswith("Tailrace called")]


ARRAYS = (np.ones((8, 16), np.float32), np.ones((8, 4), np.float32))


def test_an_exception_of_the_function_says_what_it_was_called_with():
    def loss(params, x, y):
        return (x @ params["w"] - y).sum()

    (note,) = notes(loss, ({"w": np.ones((3, 4), np.float32)},), ARRAYS)
    assert note == (
        "Tailrace called loss with params={'w': float32[3, 4]}, x=float32[8, 16], y=float32[8, 4]."
    )


def test_and_that_it_took_the_element_whole():
    (note,) = notes(lambda params, x: x @ params, (1,), ARRAYS)
    assert "x=(float32[8, 16], float32[8, 4])" in note
    assert "has 2 parts, and the function takes it whole. With 2 parameters for it" in note


@pytest.mark.parametrize("use", [bool, int, np.asarray], ids=["if", "int", "numpy"])
def test_and_that_its_values_are_not_known(use):
    (note,) = notes(lambda x, y: use(x.sum()), (), ARRAYS)
    assert "values are not known while it is traced: use jnp for np, jnp.where" in note


def test_only_the_innermost_call_is_noted():
    def inner(x, y):
        raise KeyError("missing")

    (note,) = notes(lambda x, y: call_with_element(inner, (), (x, y)), (), ARRAYS)
    assert note.startswith("Tailrace called inner with")


def test_errors_that_teach_get_no_note():
    def refuses(x, y):
        raise ProgramError("The rule.")

    with pytest.raises(ProgramError) as caught:
        call_with_element(refuses, (), ARRAYS)
    assert not hasattr(caught.value, "__notes__")
