"""Cutting a traced model: pieces run one after the other are the model."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.errors import PipelineError
from tailrace.jaxprs.internals import Literal, primitives
from tailrace.pipeline.lowering.cut import cut
from tailrace.pipeline.lowering.forward_backward import training_stages

drawn = settings(deadline=None, max_examples=25)


def traced(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return cut(closed, 1, range(1, len(args)))


def staged(made, recompute):
    """The stages of a model that returns its loss and one more value, or its loss alone."""
    loss, *aux = made.outvars
    return training_stages(made, jax.tree.structure((loss, None, aux)), recompute).each


def run(made, inputs):
    """The pieces one after the other, each with what the ones before it made."""
    known = {**made.consts, **dict(zip(made.invars, inputs, strict=True))}
    for piece in made.pieces:
        inside = piece.run([known[v] for v in piece.inputs], made.consts)
        known.update((v, inside[v]) for v in piece.outputs)
    return [v.val if isinstance(v, Literal) else known[v] for v in made.outvars]


def random_model(seed):
    """A function of (w, x) with boundaries, its operations and operands drawn."""

    def model(w, x):
        rng = random.Random(seed)
        values = [x, w * 2.0, x + 1.0]
        for number in range(rng.randint(3, 14)):
            if number and rng.random() < 0.25:
                chosen = rng.randrange(len(values))
                values[chosen] = tr.stage_boundary(values[chosen])
                continue
            a, b = rng.choice(values), rng.choice(values)
            values.append(rng.choice([jnp.add, jnp.multiply, lambda a, b: jnp.sin(a) * w])(a, b))
        loss = sum(v.sum() for v in rng.sample(values, 3)) + (w * values[-1]).sum()
        return loss, values[-1]

    return model


@drawn
@given(st.integers(0, 10**6))
def test_pieces_make_what_the_model_makes(seed):
    model = random_model(seed)
    args = (jnp.float32(0.5), jnp.arange(3.0))
    made = traced(model, *args)
    with jax.disable_jit():
        assert_bits_equal(run(made, args), list(model(*args)))


@drawn
@given(st.integers(0, 10**6))
def test_nothing_is_used_before_it_is_made_or_handed_over(seed):
    made = traced(random_model(seed), jnp.float32(0.5), jnp.arange(3.0))
    handed = {*made.invars, *made.consts}
    owners = {}
    for piece in made.pieces:
        assert set(piece.inputs) <= handed
        inside = {*piece.inputs, *made.consts}
        for eqn in piece.equations:
            assert {v for v in eqn.invars if not isinstance(v, Literal)} <= inside
            inside.update(eqn.outvars)
        assert set(piece.outputs) <= inside
        for var in piece.outputs:  # one piece answers for each value that is handed over
            assert owners.setdefault(var, piece) is piece
        handed.update(piece.outputs)
    assert {v for v in made.outvars if not isinstance(v, Literal)} <= handed
    stages = [(piece.stage, piece.member) for piece in made.pieces]
    assert stages == sorted(stages)


@drawn
@given(st.integers(0, 10**6), st.sampled_from([False, True, "interleaved"]))
def test_stages_make_the_gradient_of_the_model(seed, recompute):
    model = random_model(seed)
    args = (jnp.float32(0.5), jnp.arange(3.0))
    made = traced(model, *args)
    stages = staged(made, recompute)
    known = {**made.consts, **dict(zip(made.invars, args, strict=True))}
    kept = []
    for stage in stages:
        inputs = [known[v] for v in stage.inputs]
        outputs = jax.core.eval_jaxpr(stage.forward.jaxpr, stage.forward.consts, *inputs)
        known.update(zip(stage.outputs, outputs, strict=False))
        taken = {"input": inputs, "output": outputs}
        kept.append([taken[source][index] for source, index in stage.residuals])
    gradients = {made.outvars[0]: jnp.float32(1)}
    for stage, residuals in reversed([*zip(stages, kept, strict=True)]):
        if stage.backward is None:
            continue
        back = [gradients.get(v, jnp.zeros(v.aval.shape)) for v in stage.sends]
        found = jax.core.eval_jaxpr(stage.backward.jaxpr, stage.backward.consts, *residuals, *back)
        assert stage.params == tuple(0 for v in stage.wants if v is made.invars[0])
        for var, gradient in zip(stage.wants, found, strict=True):
            gradients[var] = gradients[var] + gradient if var in gradients else gradient
    expected = jax.grad(lambda w, x: model(w, x)[0])(*args)
    assert_close(gradients[made.invars[0]], expected)


# -- what moves -----------------------------------------------------------------------------------


def names(piece):
    return [eqn.primitive.name for eqn in piece.equations]


def test_what_depends_on_parameters_alone_is_in_each_piece_that_uses_it():
    def model(w, x):
        weight = jnp.exp(w)
        return (jnp.cos(tr.stage_boundary(jnp.sin(x * weight))) * weight).sum()

    first, second = traced(model, jnp.float32(1), jnp.arange(3.0)).pieces
    assert "exp" in names(first)
    assert "exp" in names(second)


def test_labels_are_prepared_where_they_are_used():
    def model(w, x, y):
        target = jnp.exp(y)
        return (tr.stage_boundary(x * w) - target).sum()

    first, second = traced(model, jnp.float32(1), jnp.arange(3.0), jnp.arange(3.0)).pieces
    assert names(first) == ["mul"]
    assert names(second)[0] == "exp"


def test_what_a_boundary_names_stays():
    def model(w, x):
        h = jnp.exp(x)
        return (tr.stage_boundary(h) * w).sum()

    first, second = traced(model, jnp.float32(1), jnp.arange(3.0)).pieces
    assert names(first) == ["exp"]
    assert "exp" not in names(second)


def test_the_order_of_tracing_decides():
    def model(w, x):
        early = jnp.sin(x * w)
        late = tr.stage_boundary(jnp.cos(x * w))
        return (early * late).sum()

    first, second = traced(model, jnp.float32(1), jnp.arange(3.0)).pieces
    assert {"sin", "cos"} <= set(names(first))
    assert len(first.outputs) == 2
    assert "sin" not in names(second)


def test_jit_around_a_boundary_is_opened_and_others_are_kept():
    @jax.jit
    def inner(h):
        return jnp.cos(tr.stage_boundary(jnp.sin(h)))

    @jax.jit
    def whole(h):
        return jnp.tanh(h) * 2.0

    def model(w, x):
        return whole(inner(x * w)).sum()

    made = traced(model, jnp.float32(1), jnp.arange(3.0))
    assert len(made.pieces) == 2
    kinds = [eqn.primitive for piece in made.pieces for eqn in piece.equations]
    assert kinds.count(primitives.jit_p) == 1


@pytest.mark.parametrize("place", ["scan", "cond", "remat", "custom_jvp_call", "while"])
def test_a_boundary_inside_something_else_is_refused(place):
    def mark(h):
        return tr.stage_boundary(jnp.sin(h))

    def inside(h):
        if place == "scan":
            return jax.lax.scan(lambda c, _: (mark(c), None), h, None, length=2)[0]
        if place == "cond":
            return jax.lax.cond(h.sum() > 0, mark, lambda h: h, h)
        if place == "remat":
            return jax.checkpoint(mark)(h)
        if place == "while":
            return jax.lax.while_loop(lambda c: c.sum() < 9, mark, h)
        function = jax.custom_jvp(mark)
        function.defjvp(lambda primals, tangents: (mark(*primals), tangents[0]))
        return function(h)

    with pytest.raises(PipelineError, match="where a model cannot be cut. Move it out"):
        traced(lambda w, x: inside(x * w).sum(), jnp.float32(1), jnp.arange(3.0))


def test_residuals_that_are_inputs_are_not_returned_again():
    def model(w, x):
        return (tr.stage_boundary(x * w) ** 2).sum()

    made = traced(model, jnp.float32(1), np.arange(3.0, dtype=np.float32))
    first = staged(made, False)[0]
    assert len(first.forward.jaxpr.outvars) == len(first.outputs)
    assert {source for source, _ in first.residuals} == {"input"}
