"""What a stage keeps between its forward and its backward: no more than it must."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelined import assert_same_training, elements, trained

import tailrace as tr
from oracles import assert_close
from tailrace.jaxprs.control import programs_in
from tailrace.jaxprs.own_equations import unit_in
from tailrace.pipeline.lowering.minimum_cut import minimum_cut

BATCH, WIDTH = 4, 8
BIG = 256


def weight(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, shape[0] ** -0.5, shape).astype(np.float32)


def layer(p, x, y):
    """A layer in bfloat16 on float32 parameters, as transformers have it."""
    h = x.astype(jnp.bfloat16) @ p["up"].astype(jnp.bfloat16)
    h = jax.nn.gelu(h) @ p["down"].astype(jnp.bfloat16)
    return x + h.astype(jnp.float32), y


def last(p, x, y):
    return ((x @ p - y[:, None]) ** 2).mean()


def pipeline_of(first, **options):
    return tr.Pipeline([first, last], accumulation=4, schedule="sequential", **options)


def assembly_of(first, params, **options):
    """The step of two stages of which the first is of interest; nothing is compiled."""
    trainer = tr.Trainer(pipeline_of(first), optax.sgd(0.1), [params, weight(WIDTH, 1)], **options)
    runner, _ = trainer.engine.program_for(elements(1, WIDTH, BATCH))
    return runner.assembly


def kept_by(first, params, **options):
    """The forms of what the first stage stashes."""
    puts = assembly_of(first, params, **options).jobs.jobs["F", 0, 0].puts
    return sorted(f"{var.aval.dtype.name}{list(var.aval.shape)}" for var in puts)


def operations(assembly, who):
    """How often each operation occurs in a unit."""
    found: dict[str, int] = {}

    def count(equations):
        for eqn in equations:
            name = eqn.primitive.name
            found[name] = found.get(name, 0) + 1
            for inner in programs_in(eqn):
                count(inner.eqns)

    units = [unit for eqn in assembly.jobs.body.eqns if (unit := unit_in(eqn)) is not None]
    count(next(unit for unit in units if unit.who == who).program.jaxpr.eqns)
    return found


LAYER = {"up": weight(WIDTH, BIG), "down": weight(BIG, WIDTH, seed=1)}


# -- what is kept -----------------------------------------------------------------------------------


def test_a_layer_keeps_its_product_and_neither_weights_nor_what_a_gelu_makes():
    assert kept_by(layer, LAYER) == [f"bfloat16[{BATCH}, {BIG}]"]


def test_products_are_not_computed_again():
    assembly = assembly_of(layer, LAYER)
    assert operations(assembly, ("F", 0, 0))["dot_general"] == 2
    # Of the element no gradient is wanted: two of weights, one of what is between the products.
    assert operations(assembly, ("B", 0, 0))["dot_general"] == 3


def test_dropout_keeps_a_mask_of_bytes_and_draws_once():
    def dropped(p, x, y):
        h = x @ p
        kept = jax.random.bernoulli(tr.key(), 0.9, h.shape)
        return jnp.tanh(jnp.where(kept, h / 0.9, 0.0)), y

    params = weight(WIDTH, WIDTH)
    form = f"[{BATCH}, {WIDTH}]"
    assert kept_by(dropped, params) == [f"bool{form}", f"float32{form}"]
    backward = operations(assembly_of(dropped, params), ("B", 0, 0))
    assert not any("random" in name or "threefry" in name for name in backward)


def test_a_cast_is_kept_narrow():
    def narrowed(p, x, y):
        h = (x @ p["up"]).astype(jnp.bfloat16)
        return (h @ p["down"].astype(jnp.bfloat16)).astype(jnp.float32), y

    assert kept_by(narrowed, LAYER) == [f"bfloat16[{BATCH}, {BIG}]"]


def test_a_function_of_weights_alone_is_not_kept_however_expensive():
    def normed(p, x, y):
        w = p["up"] / jnp.sqrt((p["up"] ** 2).sum(0))
        return jnp.tanh(x @ w) @ p["down"], y

    assert kept_by(normed, LAYER) == [f"float32[{BATCH}, {BIG}]"]


def test_a_long_row_of_operations_is_not_computed_again():
    def deep(p, x, y):
        h = x @ p
        for _ in range(40):
            h = jnp.sin(h)
        return h, y

    assembly = assembly_of(deep, weight(WIDTH, WIDTH))
    puts = assembly.jobs.jobs["F", 0, 0].puts
    assert 2 <= len(puts) < 40
    assert operations(assembly, ("B", 0, 0)).get("sin", 0) < 40


def test_taps_do_not_change_what_is_kept():
    tapped = kept_by(layer, LAYER, observe=[tr.Tap("*", reduce="norm")])
    assert tapped == kept_by(layer, LAYER)


def test_a_checkpoint_of_the_users_own_is_respected():
    small = f"float32[{BATCH}, {WIDTH}]"

    def first(wrap):
        def stage(p, x, y):
            inner = wrap(lambda p, x: jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"]))
            return inner(p, x @ p["in"]), y

        return stage

    params = {**LAYER, "in": weight(WIDTH, WIDTH)}
    assert kept_by(first(jax.checkpoint), params) == [small]
    assert kept_by(first(lambda f: f), params) == [f"float32[{BATCH}, {BIG}]", small, small]


# -- and computes the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_it_equals_the_plain_step(precision):
    def first(p, x, y):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], y

    def plain(params, x, y):
        return last(params[1], *first(params[0], x, y))

    params, data = [LAYER, weight(WIDTH, 1)], elements(8, WIDTH, BATCH)
    pipeline = tr.Pipeline([first, last], accumulation=4, schedule="grouped")
    options = {"precision": precision}
    with jax.numpy_dtype_promotion("standard"):
        found = trained(pipeline, optax.sgd(0.1), params, data, 2, **options)
        expected = trained(plain, optax.sgd(0.1), params, data, 2, accumulation=4, **options)
    if precision is None:
        assert_same_training(found, expected)
    narrow = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)  # noqa: E731
    assert_close(narrow(found.params), narrow(expected.params))
    assert_close(found.history.loss.astype(jnp.bfloat16), expected.history.loss)


# -- the cut ------------------------------------------------------------------------------------------


def passes(edges, sources, targets, removed):
    """Whether a way is left from a source to a target."""
    reached = [node for node in sources if node not in removed]
    for node in reached:
        reached += [b for a, b in edges if a == node and b not in removed and b not in reached]
    return any(node in targets for node in reached)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_set_that_separates_is_lighter(data):
    count = data.draw(st.integers(1, 7))
    weights = {n: data.draw(st.integers(1, 9)) for n in range(count)}
    pairs = list(itertools.combinations(range(count), 2))
    edges = [pair for pair in pairs if data.draw(st.booleans())]
    nodes = st.sets(st.integers(0, count - 1), min_size=1)
    sources, targets = data.draw(nodes), data.draw(nodes)
    found = minimum_cut(weights, edges, sources, targets)
    assert not passes(edges, sources, targets, found)
    subsets = (c for n in range(count + 1) for c in itertools.combinations(range(count), n))
    lightest = min(
        sum(weights[n] for n in chosen)
        for chosen in subsets
        if not passes(edges, sources, targets, chosen)
    )
    assert sum(weights[n] for n in found) == lightest
    # Beyond 32 bits, in which the flow is computed.
    assert minimum_cut({n: w << 40 for n, w in weights.items()}, edges, sources, targets) == found


def test_equal_edges_and_an_empty_graph():
    weights, edges = {"a": 2**29, "b": 2**28}, [("a", "b")] * 3
    assert minimum_cut(weights, edges, ["a"], ["b"]) == {"b"}
    assert minimum_cut(weights, edges, ["a"], []) == set()
    assert minimum_cut({}, [], [], []) == set()


def test_of_equal_cuts_the_one_nearest_to_what_is_wanted():
    chain = [("a", "b"), ("b", "c")]
    assert minimum_cut(dict.fromkeys("abc", 2), chain, ["a"], ["c"]) == {"c"}


# -- loops over layers --------------------------------------------------------------------------------

LAYERS = 3
STACKED = {
    "up": weight(LAYERS, WIDTH, BIG) / 4,
    "down": weight(LAYERS, BIG, WIDTH, seed=1) / 64,
}


def looped(one):
    def stage(p, x, y):
        return jax.lax.scan(lambda h, p: (one(p, h), None), x, p)[0], y

    return stage


def narrow_layer(p, x):
    h = x.astype(jnp.bfloat16) @ p["up"].astype(jnp.bfloat16)
    return x + (jax.nn.gelu(h) @ p["down"].astype(jnp.bfloat16)).astype(jnp.float32)


def test_a_loop_keeps_its_products_and_neither_weights_nor_what_a_gelu_makes():
    kept = kept_by(looped(narrow_layer), STACKED)
    product = f"bfloat16[{LAYERS}, {BATCH}, {BIG}]"
    assert product in kept
    # And what goes from layer to layer, in either dtype.
    rest = [form for form in kept if form != product]
    assert all(form.endswith(f"[{LAYERS}, {BATCH}, {WIDTH}]") for form in rest)
    assert len(rest) <= 2
    assembly = assembly_of(looped(narrow_layer), STACKED)
    assert operations(assembly, ("B", 0, 0))["dot_general"] == 4


def test_a_loop_keeps_masks_and_not_what_they_are_drawn_from():
    def dropped(p, x, y):
        def one(h, each):
            p, number = each
            key = jax.random.fold_in(tr.key(), number)
            masked = jnp.where(jax.random.bernoulli(key, 0.9, (BATCH, BIG)), h @ p["up"], 0.0)
            return h + masked @ p["down"], None

        return jax.lax.scan(one, x, (p, jnp.arange(LAYERS)))[0], y

    kept = kept_by(dropped, STACKED)
    assert f"bool[{LAYERS}, {BATCH}, {BIG}]" in kept
    assert not any(form.startswith("uint32") for form in kept)


def test_a_checkpoint_in_a_loop_is_respected():
    def again(p, x):
        return jax.checkpoint(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])(p, x)

    kept = kept_by(looped(again), STACKED)
    assert all(form.endswith(f"[{LAYERS}, {BATCH}, {WIDTH}]") for form in kept)


def test_a_loop_equals_the_plain_step():
    def one(p, x):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def plain(params, x, y):
        return last(params[1], *looped(one)(params[0], x, y))

    params, data = [STACKED, weight(WIDTH, 1)], elements(8, WIDTH, BATCH)
    found = trained(pipeline_of(looped(one)), optax.sgd(0.1), params, data, 2)
    expected = trained(plain, optax.sgd(0.1), params, data, 2, accumulation=4)
    assert_same_training(found, expected)
