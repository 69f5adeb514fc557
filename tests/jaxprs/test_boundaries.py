"""Boundaries at residual sums: where there are any, that none changes a bit, and what moves none."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from residual_models import WIDTH, convnet, perceptron, residual_loss, residual_sum, transformer

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.jaxprs.boundaries import keeps_barriers
from tailrace.program.compiling.compiled_programs import forget_programs

OFF = {"boundaries": False}
_, PARAMS, X = perceptron(4)

pytestmark = pytest.mark.cpu


def operations(compilations):
    """How many operations of each kind the programs compiled since the last call have."""
    text = "\n".join(lowered.as_text() for lowered in compilations)
    compilations.clear()
    forget_programs()
    return collections.Counter(re.findall(r"stablehlo\.(\w+)", text))


def boundaries_in(compilations, run):
    """How many boundaries there are in the programs that `run` compiles; its results are equal."""
    found, results = [], []
    for rewrites in (None, OFF):
        results.append(run(rewrites))
        found.append(operations(compilations))
    assert_bits_equal(*results)
    with_them, without = found
    for name in ("add", "dot_general", "multiply", "subtract", "reduce", "while"):
        assert with_them[name] == without[name], name
    return sum(with_them[kind] - without[kind] for kind in ("case", "optimization_barrier"))


def compiled(compilations, function, *args):
    """How many boundaries a function has, compiled by `tr.compile`."""
    return boundaries_in(
        compilations,
        lambda rewrites: jax.device_get(tr.compile(function, rewrites=rewrites)(*args)),
    )


def trained(rewrites, loss_fn=residual_loss, params=PARAMS, element=X, **options):
    """A trainer after two steps."""
    optimizer = options.pop("optimizer", optax.sgd(0.1, momentum=0.5))
    trainer = tr.Trainer(
        loss_fn, optimizer, params, steps_per_execution=2, rewrites=rewrites, **options
    )
    trainer.fit([element] * 8, steps=2)
    return trainer


@pytest.fixture(autouse=True)
def _probed():
    keeps_barriers()  # compiles a program, once in a process


# -- where ----------------------------------------------------------------------------------------


def summed(products, x, ws):
    return sum((x @ w for w in ws[1:products]), x @ ws[0])


def twice(x, ws):
    """Reads a value with two kernels."""
    return jnp.tanh(x @ ws[0]) + jnp.tanh(x @ ws[1]), x.sum()


WHERE = {
    "a sum of two products": (0, lambda x, ws: twice(summed(2, x, ws), ws)),
    "a sum of three products": (1, lambda x, ws: twice(summed(3, x, ws), ws)),
    "a sum of four products": (1, lambda x, ws: twice(summed(4, x, ws), ws)),
    "read by one kernel": (0, lambda x, ws: summed(4, x, ws) @ ws[0]),
    "read by one kernel, through others": (0, lambda x, ws: jnp.tanh(summed(4, x, ws)) @ ws[0]),
    "read through a product": (1, lambda x, ws: twice(summed(4, x, ws) * x, ws)),
    "a product of sums": (0, lambda x, ws: twice(summed(2, x, ws) * summed(2, x.T, ws), ws)),
    "leaves the program": (0, lambda x, ws: (h := summed(4, x, ws), h @ ws[0])),
    "too few elements": (0, lambda x, ws: twice(summed(4, x[:31], ws), ws)),
    "no floats": (0, lambda x, ws: twice(summed(4, x.astype(int), ws.astype(int)), ws)),
    "one product, read again": (0, lambda x, ws: twice((y := x @ ws[0]) + y + y + y, ws)),
    "arguments are no parts": (0, lambda x, ws: twice(x + ws[0] + ws[1] + ws[2] + ws[3], ws)),
    "one after the other": (0, lambda x, ws: ((x @ ws[0]) @ ws[1]) @ ws[2]),
    "a residual stream": (1, lambda x, ws: residual_stream(x, ws)),
    "inside jit": (1, lambda x, ws: jax.jit(lambda x: twice(summed(3, x, ws), ws))(x)),
    "inside remat": (1, lambda x, ws: jax.checkpoint(residual_stream)(x, ws)),
    "inside a scan": (
        1,
        lambda x, ws: lax.scan(lambda x, _: (residual_stream(x, ws), None), x, length=3)[0],
    ),
    "inside a while loop": (
        1,
        lambda x, ws: lax.fori_loop(0, 3, lambda _, x: residual_stream(x, ws), x),
    ),
    "inside a branch": (
        1,
        lambda x, ws: lax.cond(x.sum() > 0, lambda: residual_stream(x, ws), lambda: x),
    ),
    "inside our loop": (1, lambda x, ws: tr.repeat(3, lambda x: residual_stream(x, ws), x)),
    "before a loop": (
        1,
        lambda x, ws: lax.scan(lambda h, w: (h @ w, None), twice(summed(3, x, ws), ws)[0], ws)[0],
    ),
}  # fmt: skip


def residual_stream(x, ws):
    """Into the third sum three products flow; what follows reads that sum, and is read once."""
    for w in ws[:4]:
        x = x + jnp.tanh(x @ w)
    return x @ ws[0] + x


@pytest.mark.parametrize("what", WHERE)
def test_where_boundaries_are(what, compilations):
    expected, function = WHERE[what]
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(4, WIDTH, WIDTH)) / WIDTH, jnp.float32)
    x = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert compiled(compilations, function, x, ws) == expected


# -- training -------------------------------------------------------------------------------------

MODELS = {"perceptron": perceptron, "transformer": transformer, "convnet": convnet}


@pytest.mark.parametrize("name", ["perceptron", "convnet"])
def test_a_training_has_a_boundary_for_each_layer(name):
    def places(layers):
        loss_fn, params, element = MODELS[name](layers)
        trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params)
        return trainer.explain(element).rewrites["boundaries"]

    # For each of two more layers, forward and backward: not only in the first or the last ones.
    assert places(5) - places(3) >= 2


def test_a_plain_chain_has_none():
    def loss_fn(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), [np.eye(WIDTH, dtype=np.float32)] * 8)
    explanation = trainer.explain(X)
    assert explanation.rewrites["boundaries"] == 0
    assert "rewritten" not in str(explanation)


def test_explain_says_where_and_how_to_switch_them_off():
    on = trained(None).explain(X, 2)
    assert f"rewritten in {on.rewrites['boundaries']} places: residual sums" in str(on)
    assert "rewrites={'boundaries': False} switches it off" in str(on)
    off = trained(OFF).explain(X, 2)
    assert "boundaries" not in off.rewrites
    assert "rewritten" not in str(off)


def test_without_boundaries_the_program_is_that_of_small_sums(compilations, monkeypatch):
    trained(OFF)
    plain = max((one.as_text() for one in compilations), key=len)
    compilations.clear()
    forget_programs()
    monkeypatch.setattr("tailrace.jaxprs.boundaries.FEWEST_ELEMENTS", 1 << 30)
    trained(None)
    assert max((one.as_text() for one in compilations), key=len) == plain


# -- what moves none ------------------------------------------------------------------------------

OBSERVED = {
    "all of it": {"observe": "*", "on_nonfinite": "stop", "fingerprint": True},
    "every second step": {"observe": [tr.Tap("*", mode=tr.every(2))]},
    "a guard that skips": {"on_nonfinite": "skip"},
}


@pytest.fixture(scope="module")
def plain():
    trainer = trained(None)
    return jax.device_get(trainer.params), np.asarray(trainer.history.loss)


@pytest.mark.parametrize("how", OBSERVED)
def test_observing_moves_no_boundary_and_changes_no_bit(how, plain, compilations):
    places = []

    def run(rewrites):
        trainer = trained(rewrites, **OBSERVED[how])
        places.append(trainer.explain(X, 2).rewrites.get("boundaries"))
        return jax.device_get(trainer.params), np.asarray(trainer.history.loss)

    # As many as are found in the plain program, whatever else reads the values.
    assert boundaries_in(compilations, run) % places[0] == 0
    assert places == [trained_places(), None]
    assert_bits_equal(run(None), plain)


def trained_places():
    found = trained(None).explain(X, 2).rewrites["boundaries"]
    assert found > 0
    return found


FORMS = {
    "accumulation": {"accumulation": 2},
    "shared optimizer state": {"replicas": 2, "shard_optimizer_state": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_in_every_form_of_step(form, compilations):
    def run(rewrites):
        return jax.device_get(trained(rewrites, **FORMS[form]).state)

    assert boundaries_in(compilations, run) > 0


def test_in_stages_of_a_pipeline(compilations):
    def stage(params, x):
        return residual_sum(params, x)

    def run(rewrites):
        model = tr.Pipeline([stage, stage], lambda x: (x**2).mean(), accumulation=4)
        return jax.device_get(trained(rewrites, model, [PARAMS, PARAMS]).state)

    assert boundaries_in(compilations, run) > 0


def predicted(params, x):
    return residual_sum(params, x).mean(0), x


def test_in_evaluation_and_prediction(compilations):
    for name in ("evaluate", "predict"):
        runs = {
            "evaluate": lambda trainer: trainer.evaluate([X, X]),
            "predict": lambda trainer: [*trainer.predict([X, X], predicted)],
        }

        def run(rewrites, use=runs[name]):
            trainer = tr.Trainer(residual_loss, optax.sgd(0.1), PARAMS, rewrites=rewrites)
            return jax.device_get(use(trainer))

        assert boundaries_in(compilations, run) > 0, name


def test_a_step_is_replayed_with_its_boundaries(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    elements = [(X + number) for number in range(8)]

    def trainer_of(**options):
        options = {"fingerprint": True, "steps_per_execution": 2, **options}
        return tr.Trainer(residual_loss, optax.sgd(0.1), PARAMS, **options)

    kept = tr.Checkpoint(tmp_path / "kept", every=2)
    trainer = trainer_of()
    trainer.fit(elements, steps=8, checkpoint=kept)
    replay = trainer.replay(5, elements, observe="*", checkpoint=tmp_path / "kept")
    assert replay.proved is True, replay.differences
