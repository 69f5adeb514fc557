"""`tr.repeat` and `tr.while_loop` against plain `lax.scan`, and every sentence of theirs."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tailrace as tr
from oracles import assert_bits_equal, inc, mlp, mlp_loss, plain_scan, regression
from tailrace.errors import FeedError, ProgramError


def sgd(params, x, y):
    (loss, _), grads = jax.value_and_grad(mlp_loss, has_aux=True)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


# -- equal to lax.scan --------------------------------------------------------------------------


def test_repeat_is_a_scan_to_the_bit():
    elements, outfeed = regression(12), tr.OutfeedQueue()

    def body(params, x, y):
        params, loss = sgd(params, x, y)
        outfeed.enqueue({"loss": loss})
        return params

    infeed = tr.InfeedQueue(elements)
    found = tr.compile(lambda p: tr.repeat(12, body, p, infeed=infeed))(mlp())
    expected, losses = plain_scan(sgd, mlp(), elements)
    assert_bits_equal(found, expected)
    assert_bits_equal(outfeed.dequeue()["loss"], losses)


def test_while_loop_without_infeed():
    program = tr.compile(
        lambda v: tr.while_loop(lambda v: v[0] < 100, lambda v: (v[0] * 2, v[1] + 1), v)
    )
    assert jax.tree.map(int, program((3, 0))) == (192, 6)
    assert jax.tree.map(int, program((300, 0))) == (300, 0)


def test_maximum_iterations_ends_a_while_loop():
    program = tr.compile(
        lambda v: tr.while_loop(lambda v: v >= 0, lambda v: v + 1, v, maximum_iterations=7)
    )
    assert program(jnp.int32(0)) == 7


@pytest.mark.parametrize("replicas", [1, 2])
def test_unread_elements_of_a_while_loop_go_back(replicas):
    infeed, outfeed = tr.InfeedQueue([np.float32(i) for i in range(40)]), tr.OutfeedQueue()

    def body(v, x):
        outfeed.enqueue(x)
        return v + 1

    loop = tr.compile(
        lambda v, end: tr.while_loop(
            lambda s: s[0] < s[1],
            lambda s, x: (body(s[0], x), s[1]),
            (v, end),
            infeed=infeed,
            maximum_iterations=6,
        )[0],
        replicas=replicas,
    )
    for passes in (2, 0, 3, 6):
        assert loop(jnp.int32(0), jnp.int32(passes)) == passes
    total = 11 * replicas
    assert infeed.position == total
    shape = (11, 2) if replicas == 2 else (11,)
    assert_bits_equal(outfeed.dequeue(), np.arange(total, dtype=np.float32).reshape(shape))


def test_loops_after_a_while_loop_go_on_where_it_ended():
    """Several loops of a program consume one infeed consecutively, in program order."""
    infeed, seen = tr.InfeedQueue([np.float32(i) for i in range(40)]), tr.OutfeedQueue()

    def until(end):
        return tr.while_loop(
            lambda v: v < end, lambda v, x: v + 1, jnp.int32(0), infeed, maximum_iterations=5
        )

    def program(end):
        first = tr.repeat(2, lambda v, x: v + x, jnp.float32(0), infeed=infeed)
        count = until(end)
        count += until(end)
        tr.repeat(3, lambda x: (seen.enqueue(x), None)[1], infeed=infeed)
        return first, count

    compiled = tr.compile(program)
    assert jax.tree.map(float, compiled(jnp.int32(2))) == (1.0, 4.0)
    assert seen.dequeue().tolist() == [6, 7, 8]
    assert infeed.position == 9
    assert jax.tree.map(float, compiled(jnp.int32(1))) == (9.0 + 10.0, 2.0)
    assert seen.dequeue().tolist() == [13, 14, 15]


def test_nested_loops_and_several_feeds():
    a, b = tr.InfeedQueue(inc(7)), tr.InfeedQueue([np.float32(10 * i) for i in range(100)])
    inner_out, outer_out = tr.OutfeedQueue(), tr.OutfeedQueue()

    def inner(v, x):
        inner_out.enqueue({"x": x, "v": v + x})
        return v + x

    def outer(v, y):
        v = tr.repeat(3, inner, v + y, infeed=a)
        outer_out.enqueue([v])
        return v

    program = tr.compile(lambda v: tr.repeat(4, outer, v, infeed=b))
    v, xs, inners, outers = np.float32(1), [], [], []
    stream_a, stream_b = iter(x for (x,) in inc(7)), iter(np.float32(10 * i) for i in range(100))
    result = jnp.float32(1)
    for _ in range(2):
        result = program(result)
        for _ in range(4):
            v += next(stream_b)
            for _ in range(3):
                xs.append(next(stream_a))
                v += xs[-1]
                inners.append(v)
            outers.append(v)
        assert result == v
    found = inner_out.dequeue()
    assert_bits_equal(found["x"], np.float32(xs))
    assert_bits_equal(found["v"], np.float32(inners))
    assert_bits_equal(outer_out.dequeue()[0], np.float32(outers))


def test_one_infeed_in_the_outer_and_the_inner_loop():
    """Program order: the outer element first, then the inner ones, pass by pass."""
    infeed, outfeed = tr.InfeedQueue([np.int32(i) for i in range(100)]), tr.OutfeedQueue()

    def outer(v, x):
        rest = tr.repeat(2, lambda s, y: s * 100 + y, x, infeed=infeed)
        outfeed.enqueue(rest)
        return v

    tr.compile(lambda: tr.repeat(3, outer, 0, infeed=infeed))()
    assert outfeed.dequeue().tolist() == [102, 30405, 60708]


# -- what is carried ----------------------------------------------------------------------------


class Pair(NamedTuple):
    a: object
    b: object


def test_trees_with_none_named_tuples_and_literals():
    def body(s):
        return {"pair": Pair(s["pair"].a + 1, None), "list": [s["list"][0] * 2, ()]}

    program = tr.compile(lambda x: tr.repeat(3, body, {"pair": Pair(x, None), "list": [1.5, ()]}))
    found = program(jnp.int32(4))
    assert isinstance(found["pair"], Pair)
    assert jax.tree.map(float, found) == {"pair": Pair(7.0, None), "list": [12.0, ()]}


def test_a_carry_that_is_returned_as_it_came():
    program = tr.compile(lambda x: tr.repeat(3, lambda s: (s[1], s[0]), (x, 2.0)))
    assert jax.tree.map(float, program(jnp.float32(1))) == (2.0, 1.0)


def test_an_empty_carry_and_no_carry():
    infeed, outfeed = tr.InfeedQueue(inc(4)), tr.OutfeedQueue()
    empty = tr.compile(
        lambda: tr.repeat(2, lambda _, x: (outfeed.enqueue(x), ())[1], (), infeed=infeed)
    )
    assert empty() == ()

    def body(x):
        outfeed.enqueue(x)

    assert tr.compile(lambda: tr.repeat(2, body, infeed=infeed))() is None
    assert outfeed.dequeue().tolist() == [0, 1, 2, 3]


def test_zero_passes():
    infeed, outfeed = tr.InfeedQueue(inc(4)), tr.OutfeedQueue()

    def body(v, x):
        outfeed.enqueue({"x": x})
        return v + x

    program = tr.compile(lambda v: tr.repeat(0, body, v, infeed=infeed))
    assert program(jnp.float32(5)) == 5
    assert outfeed.dequeue()["x"].shape == (0,)
    assert infeed.position == 0


def test_the_number_of_passes_may_come_from_the_program():
    program = tr.compile(lambda n, v: tr.repeat(n, lambda v: v + 2, v))
    assert [int(program(jnp.int32(n), jnp.int32(1))) for n in (0, 1, 5)] == [1, 3, 11]


def test_an_index_like_number_of_passes():
    program = tr.compile(lambda v: tr.repeat(np.int64(3), lambda v: v + 1, v))
    assert program(0) == 3
    program = tr.compile(lambda v: tr.repeat(jnp.int32(2), lambda v: v + 1, v))
    assert program(0) == 2


def test_weak_literals_do_not_disturb_enqueue():
    """A Python number changes its type in the first pass, and JAX traces the body again."""
    outfeed = tr.OutfeedQueue()

    def body(v):
        v = v + jnp.float32(1)
        outfeed.enqueue(v)
        return v

    assert tr.compile(lambda: tr.repeat(3, body, 0.5))() == 3.5
    assert tr.compile(lambda v: tr.repeat(3, body, v))(0.5) == 3.5
    assert tr.compile(lambda: tr.while_loop(lambda v: v < 3, body, 0.5, None, 9))() == 3.5
    assert outfeed.dequeue().tolist() == [1.5, 2.5, 3.5] * 3


# -- sentences ----------------------------------------------------------------------------------


def refused(function, *args, text, error=ProgramError, **options):
    with pytest.raises(error, match=text):
        tr.compile(function, **options)(*args)


def test_outside_a_program():
    for call, name in [
        (lambda: tr.repeat(2, lambda v: v, 0), "tr.repeat"),
        (lambda: tr.while_loop(lambda v: v < 2, lambda v: v, 0), "tr.while_loop"),
    ]:
        with pytest.raises(ProgramError, match=rf"{name} means something only inside a program"):
            call()


@pytest.mark.parametrize("n", [-1, 2.5, True, "3", None])
def test_a_bad_number_of_passes(n):
    refused(lambda v: tr.repeat(n, lambda v: v, v), 0, text=f"n >= 0. Received: n={n!r}")


def test_an_infeed_needs_a_fixed_number():
    infeed = tr.InfeedQueue(inc(3))
    refused(
        lambda n: tr.repeat(n, lambda v, x: v + x, 0.0, infeed=infeed),
        3,
        text="tr.repeat with an infeed needs a number known when the program is compiled.*"
        "use tr.while_loop with maximum_iterations",
    )


def test_a_dataset_is_not_an_infeed():
    refused(
        lambda: tr.repeat(2, lambda v, x: v + x, 0.0, infeed=inc(3)),
        text=r"infeed must be a tr.InfeedQueue. Received: list. Wrap the dataset",
    )


def test_another_structure():
    refused(
        lambda v: tr.repeat(2, lambda v: (v, v), v),
        0,
        text=r"returns what it carries, in the same structure. It got .* and returned "
        r".*results leave through an outfeed",
    )
    infeed = tr.InfeedQueue(inc(3))
    refused(lambda: tr.repeat(2, lambda x: x, infeed=infeed), text="in the same structure")
    refused(lambda v: tr.repeat(2, lambda v: None, v), 0, text="in the same structure")


def test_another_shape_or_dtype_names_the_leaf():
    body = lambda s: {"a": s["a"], "b": s["b"].astype(jnp.float32)}  # noqa: E731
    refused(
        lambda: tr.repeat(2, body, {"a": jnp.ones(3), "b": jnp.ones(2, jnp.int32)}),
        text=re.escape("['b'] was int32[2] and came back as float32[2]"),
    )
    refused(
        lambda v: tr.repeat(2, lambda v: v[:1], v),
        jnp.ones(2),
        text=re.escape("the carried value was float32[2] and came back as float32[1]"),
    )


def test_while_loop_sentences():
    infeed = tr.InfeedQueue(inc(3))
    body = lambda v, x: v + x  # noqa: E731
    refused(
        lambda v: tr.while_loop(lambda v: v < 3, body, v, infeed=infeed),
        0.0,
        text="needs maximum_iterations=.*Received: maximum_iterations=None",
    )
    for bad in (-1, 2.5):
        refused(
            lambda v, bad=bad: tr.while_loop(lambda v: v < 3, lambda v: v, v, None, bad),
            0.0,
            text=f"maximum_iterations is an integer >= 0. Received: {bad}",
        )
    refused(
        lambda v: tr.while_loop(lambda v: v, lambda v: v, v),
        0.0,
        text=r"returns one boolean. Received: float32\[\]",
    )
    refused(
        lambda v: tr.while_loop(lambda v: v < 3, lambda v: v, v),
        jnp.ones(2),
        text=r"returns one boolean. Received: bool\[2\]",
    )

    def nested(v):
        return tr.repeat(
            2, lambda v: tr.while_loop(lambda v: v < 3, body, v, infeed, maximum_iterations=2), v
        )

    refused(nested, 0.0, text="must stand at the top of a program, not inside another loop")


def test_elements_that_do_not_fit_the_body():
    infeed = tr.InfeedQueue([(np.float32(1), np.float32(2))])

    def takes_three(v, x, y, z):
        return v

    refused(
        lambda v: tr.repeat(1, takes_three, v, infeed=infeed),
        0.0,
        text=re.escape(
            "takes_three(v, x, y, z) gets 1 argument first and then 2 positional arguments, "
            "which does not fit. Change its parameters, or take the element whole"
        ),
    )


def test_an_infeed_loop_in_a_branch_is_refused():
    infeed = tr.InfeedQueue(inc(3))

    def program(v):
        fed = lambda v: tr.repeat(2, lambda v, x: v + x, v, infeed=infeed)  # noqa: E731
        return jax.lax.cond(v > 0, fed, lambda v: v, v)

    refused(program, 1.0, text="may not stand inside lax.cond or lax.switch")


def test_an_outfeed_in_a_loop_of_unknown_length_is_refused():
    outfeed = tr.OutfeedQueue()
    text = "whose length only the running program knows needs an upper bound"
    refused(
        lambda n: tr.repeat(n, lambda v: outfeed.enqueue(v) + 1, 0), 3, text=text, error=FeedError
    )
    refused(
        lambda v: tr.while_loop(lambda v: v < 3, lambda v: outfeed.enqueue(v) + 1, v),
        0,
        text=text,
        error=FeedError,
    )


def test_a_program_is_made_of_a_function():
    with pytest.raises(ProgramError, match=r"takes a function of arrays. Received: int"):
        tr.compile(3)


@pytest.mark.parametrize("outer", ["while", "repeat"])
def test_a_fed_loop_in_a_loop_of_unknown_length(outer):
    infeed = tr.InfeedQueue([np.int32(1)] * 6)

    def fed(total):
        return tr.repeat(3, lambda t, x: t + x, total, infeed=infeed)

    def loops(total, n):
        if outer == "repeat":
            return tr.repeat(n, fed, total)
        return jax.lax.fori_loop(0, n, lambda _, t: fed(t), total)

    with pytest.raises(ProgramError, match="whose length only the running program knows"):
        tr.compile(loops)(jnp.int32(0), jnp.int32(2))
