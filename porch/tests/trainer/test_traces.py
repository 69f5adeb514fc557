"""How often a user's function is traced, and how often its equations are gone through after that."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.jaxprs import internals

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
DATA = [X] * 48
PARAMS = {"a": np.ones((3, 4), np.float32), "b": np.ones((4, 2), np.float32)}
STAGED = [{"a": PARAMS["a"]}, {"b": PARAMS["b"]}]


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0
        self.__name__ = function.__name__

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def loss(params, x):
    return (jnp.cos(x @ params["a"]) @ params["b"]).mean()


def loss_of_state(params, state, x):
    return loss(params, x) + state * 0, (state + 1, {"x": x.mean()})


def cut_loss(params, x):
    x = tr.stage_boundary(jnp.cos(x @ params["a"]))
    return (x @ params["b"]).mean()


def cut_loss_of_state(params, state, x):
    return cut_loss(params, x), (state + 1, None)


def first(params, x):
    return jnp.cos(x @ params["a"])


def last(params, x):
    return (x @ params["b"]).mean()


PLAIN = {
    "plain": {},
    "accumulated": {"accumulation": 2},
    "in executions": {"steps_per_execution": 2},
    "all taps": {"observe": [tr.Tap("*")]},
    "periodic taps": {"observe": [tr.Tap("*", mode=tr.every(2))]},
    "summed taps": {"observe": [tr.Tap("grad/*", mode="sum", reduce="tensor")], "accumulation": 2},
    "guarded": {"observe": [tr.stop_on_nonfinite()]},
}
PIPELINES = {
    "plain": {},
    "recomputed": {"recompute": True},
    "at checkpoints": {"recompute": "interleaved"},
    "sequential": {"schedule": "sequential"},
}


def used(trainer, predict):
    """Everything that traces, several times; yields what was done last."""
    for steps in (5, 3, 5):
        trainer.fit(DATA, steps=steps)
        yield "fit"
    trainer.explain(X)
    yield "explain"
    for _ in range(2):
        trainer.evaluate(DATA[:8])
        yield "evaluate"
        trainer.predict(DATA[:8], predict)
        yield "predict"


def calls_after(function, trainer):
    """How often a function was called after each use of a trainer, beyond those before it."""
    return {what: function.calls for what in used(trainer, lambda params, x: x)}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_a_step_s_function_is_traced_once(options):
    function = Counted(loss)
    trainer = tr.Trainer(function, optax.sgd(0.1, momentum=0.9), PARAMS, **options)
    assert calls_after(function, trainer) == {"fit": 1, "explain": 1, "evaluate": 2, "predict": 2}


def test_with_a_model_state_too():
    function = Counted(loss_of_state)
    trainer = tr.Trainer(function, optax.sgd(0.1, momentum=0.9), PARAMS, model_state=jnp.float32(0))
    for _ in range(2):
        trainer.fit(DATA, steps=5)
        assert function.calls == 1


def pipelines(stages, **options):
    return tr.Pipeline(stages, accumulation=4, device_mapping=[0, 0], **options)


@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("observe", [(), [tr.Tap("*")]], ids=["unseen", "all taps"])
def test_the_forward_of_a_pipeline_is_traced_once(options, observe):
    function = Counted(cut_loss)
    trainer = tr.Trainer(
        pipelines(function, **options), optax.sgd(0.1, momentum=0.9), PARAMS, observe=observe
    )
    assert calls_after(function, trainer) == {"fit": 1, "explain": 1, "evaluate": 2, "predict": 2}


def test_so_is_each_stage_and_a_function_with_state():
    stages = [Counted(first), Counted(last)]
    trainer = tr.Trainer(pipelines(stages), optax.sgd(0.1, momentum=0.9), STAGED)
    trainer.fit(DATA, steps=5)
    assert [stage.calls for stage in stages] == [1, 1]
    function = Counted(cut_loss_of_state)
    state = jnp.float32(0)
    trainer = tr.Trainer(
        pipelines(function), optax.sgd(0.1, momentum=0.9), PARAMS, model_state=state
    )
    trainer.fit(DATA, steps=5)
    assert function.calls == 1


def test_balancing_adds_one():
    function = Counted(loss)
    balance = tr.balance(function, PARAMS, X, stages=2)
    trainer = tr.Trainer(
        balance.pipeline(accumulation=4, device_mapping=[0, 0]),
        optax.sgd(0.1, momentum=0.9),
        PARAMS,
    )
    trainer.fit(DATA, steps=5)
    assert function.calls == 2


# -- the equations of the forward, after it was traced ------------------------------------------


@pytest.fixture
def emitted(monkeypatch):
    """The equations `cos`, one for each time that Tailrace emits one."""
    found, context = [], internals.equation_context

    def counting(eqn):
        found.extend([eqn] if internals.operation(eqn) == "cos" else [])
        return context(eqn)

    monkeypatch.setattr(internals, "equation_context", counting)
    return found


@pytest.mark.parametrize(
    ("make", "most"),
    [
        # To be differentiated it is emitted by the trace itself; then once, in the program that runs.
        (lambda: tr.Trainer(loss, optax.sgd(0.1, momentum=0.9), PARAMS), 1),
        # Once more, to be differentiated with marks in it.
        (lambda: tr.Trainer(loss, optax.sgd(0.1, momentum=0.9), PARAMS, observe=[tr.Tap("*")]), 2),
        # Piece by piece, to be differentiated; then in the program, and again in its backward: what is
        # elementwise is not stashed.
        (lambda: tr.Trainer(pipelines([first, last]), optax.sgd(0.1, momentum=0.9), STAGED), 3),
        (
            lambda: tr.Trainer(
                pipelines([first, last]),
                optax.sgd(0.1, momentum=0.9),
                STAGED,
                observe=[tr.Tap("grad/*")],
            ),
            4,
        ),
    ],
    ids=["plain", "all taps", "pipeline", "pipeline with taps"],
)
def test_equations_are_emitted_no_more_often_than_needed(make, most, emitted):
    make().fit(DATA, steps=2)
    assert len(emitted) == most


def nested(depth, x):
    """Branches in branches, each with a value that is observed."""
    if not depth:
        return jnp.cos(x)
    with jax.named_scope(f"level{depth}"):
        return jax.lax.cond(x > depth, lambda v: nested(depth - 1, v) * 2, jnp.sin, x)


def nested_loops(depth, x):
    if not depth:
        return jnp.cos(x)
    return jax.lax.while_loop(lambda v: v > depth, lambda v: nested_loops(depth - 1, v) - 1, x)


@pytest.mark.parametrize("function", [nested, nested_loops])
def test_branches_in_branches_do_not_multiply(function, emitted):
    observed = tr.observe(lambda x: function(5, x), [tr.Tap("*")])
    output, _ = observed(jnp.float32(9))
    assert len(emitted) == 1
    assert output == function(5, jnp.float32(9))
