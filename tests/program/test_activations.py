"""Activations on the host: the forward pass in parts, computed again for the backward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.jaxprs import internals
from tailrace.jaxprs.stretches import opened
from tailrace.program.memory import activation_offload, host_memory, optimizer_state
from tailrace.program.memory.offload_segments import segments

WIDTH, LAYERS = 8, 9


@pytest.fixture
def as_if_moved(monkeypatch):
    """The program of an accelerator, in which moving changes nothing."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 8)
    monkeypatch.setattr(activation_offload, "PARTS", 4)
    monkeypatch.setattr(host_memory, "obstacle", lambda device, guarded: None)
    monkeypatch.setattr(host_memory, "memory_moves", lambda: host_memory.NO_MOVES)


def kernels(count=LAYERS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3 for _ in range(count)]


def data(count=32):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(4, WIDTH)).astype(np.float32) for _ in range(count)]


# -- models: each is a difficulty of its own ----------------------------------------------------


def deep(params, x):
    for number, kernel in enumerate(params):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ kernel) + x
    return (x**2).mean(), {"size": jnp.abs(x).mean()}


def scanned(params, x):
    x = x @ params["in"]
    x, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel) + h, None), x, params["layers"])
    return ((x @ params["in"].T) ** 2).mean()  # the first kernel once more


def random(params, x):
    for kernel in params:
        keep = jax.random.bernoulli(tr.key(), 0.8, x.shape)
        x = jnp.where(keep, jax.nn.relu(x @ kernel), 0.0) + x
    return (x**2).mean()


@jax.jit
def jitted(params, x):
    for kernel in params:
        half = kernel.astype(jnp.bfloat16).astype(jnp.float32)  # of parameters alone
        x = jnp.tanh(x @ half)
    return (x**2).mean()


def skipping(params, x):
    down = []
    for kernel in params[:4]:
        x = jnp.tanh(x @ kernel)
        down.append(x)
    for kernel in params[4:8]:
        x = jnp.tanh((x + down.pop()) @ kernel)
    return (x**2).mean()


@jax.custom_vjp
def doubled(x):
    return 2.0 * x


doubled.defvjp(lambda x: (doubled(x), jnp.sign(x)), lambda sign, ct: (2.0 * ct * sign * sign,))


def mixed(params, x):
    rows = jnp.argsort(x[:, 0])  # integers and booleans cross the cuts as well
    positive = x > 0
    for number, kernel in enumerate(params):
        x = jax.checkpoint(lambda h, k: jnp.tanh(h @ k))(x, kernel)
        x = doubled(jax.nn.softmax(x)) if number % 2 else jax.nn.gelu(x)
        x = jax.lax.cond(number > tr.microbatch(), lambda h: h * 0.5, lambda h: h + 1.0, x)
        x = jnp.where(positive, x[rows], x)
    return (x**2).mean(), {"rows": rows.sum(), "norms": [jnp.linalg.norm(k) for k in params[:2]]}


MODELS = {
    "mixed": (mixed, kernels()),
    "deep": (deep, kernels()),
    "scanned": (scanned, {"in": kernels(1)[0], "layers": np.stack(kernels(5))}),
    "random": (random, kernels()),
    "jitted": (jitted, kernels()),
    "skipping": (skipping, kernels()),
}


def trained(loss, params, *, offloaded=True, steps=3, **options):
    optimizer = optax.sgd(1e-2, momentum=0.9)
    trainer = tr.Trainer(
        loss, optimizer, params, offload_activations=offloaded, steps_per_execution=steps, **options
    )
    trainer.fit(data(), steps=steps)
    return trainer


USUAL = ("mixed", "scanned")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in MODELS],
)
def test_the_same_training(as_if_moved, name):
    held = trained(*MODELS[name], accumulation=2)
    plain = trained(*MODELS[name], accumulation=2, offloaded=False)
    assert_close(held.history.loss, plain.history.loss)
    assert_close(held.state, plain.state)
    (messages,) = held.engine.memory.held_activations.said
    assert "are kept in host memory" in messages
    assert ("what loops carry" in messages) == (name == "scanned")


@pytest.mark.parametrize(
    ("microbatches", "replicas"),
    [(3, 2), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in [(1, 1), (1, 2)])],
)
def test_with_accumulation_and_replicas(as_if_moved, microbatches, replicas):
    options = {"accumulation": microbatches, "replicas": replicas}
    held = trained(*MODELS["deep"], **options)
    assert_close(held.params, trained(*MODELS["deep"], offloaded=False, **options).params)


STATE, SHARES = "offload_optimizer_state", "shard_optimizer_state"


@pytest.mark.parametrize(
    "others",
    [
        (STATE, SHARES),
        *(pytest.param((one,), marks=pytest.mark.exhaustive) for one in (STATE, SHARES)),
    ],
    ids="+".join,
)
def test_with_the_optimizers_state_on_the_host_and_in_shares(as_if_moved, monkeypatch, others):
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 8)
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    both = {"accumulation": 2, "replicas": 2}
    held = trained(*MODELS["deep"], **dict.fromkeys(others, True), **both)
    messages = " ".join(held.decisions)
    assert ("are in the host's memory" in messages) == (STATE in others)
    assert ("sharded over 2 replicas" in messages) == (SHARES in others)
    assert_close(held.state, trained(*MODELS["deep"], offloaded=False, **both).state)


def test_models_with_state(as_if_moved):
    def loss(params, state, x):
        after = {}
        for number, kernel in enumerate(params):
            x = jnp.tanh(x @ kernel)
            after[number] = 0.9 * state[number] + 0.1 * x.mean(0)
            x = x - after[number]
        return (x**2).mean(), (after, {"mean": x.mean()})

    state = {number: np.zeros(WIDTH, np.float32) for number in range(LAYERS)}
    options = {"model_state": state, "accumulation": 2, "replicas": 2}
    held = trained(loss, kernels(), **options)
    plain = trained(loss, kernels(), offloaded=False, **options)
    assert_close(held.state, plain.state)
    assert_close(held.history["mean"], plain.history["mean"])


def test_everything_is_seen_once(as_if_moved):
    sent = tr.OutfeedQueue()

    def loss(params, x):
        first = x @ params[0]
        sent.enqueue({"first": first})
        return deep(params[1:], first)

    taps = [tr.Tap(what, reduce="tensor") for what in ("activation/*", "cotangent/*", "grad/*")]
    held = trained(loss, kernels(), observe=taps)
    assert "into 4 parts" in held.engine.memory.held_activations.said[0]
    seen = sent.dequeue()["first"]
    plain = trained(loss, kernels(), observe=taps, offloaded=False)
    assert_close(seen, sent.dequeue()["first"])
    assert sorted(held.records.names) == sorted(plain.records.names)
    assert any(name.startswith("cotangent/layer3") for name in held.records.names)
    for name in plain.records.names:
        assert_close(held.records[name].values, plain.records[name].values)


def test_work_after_the_loss_has_no_gradient(as_if_moved):
    """The last parts make what is only reported."""

    def loss(params, x):
        made, aux = deep(params[:5], x)
        for kernel in params[5:]:
            x = jnp.tanh(x @ jax.lax.stop_gradient(kernel)) + x
        return made, {**aux, "other": jnp.abs(x).mean()}

    held, plain = trained(loss, kernels()), trained(loss, kernels(), offloaded=False)
    assert_close(held.params, plain.params)


# -- the order ----------------------------------------------------------------------------------


def equations(trainer):
    """The equations of a microbatch, in order."""
    runner = trainer.engine.runner
    (loop,) = [e for e in runner.traced.jaxpr.eqns if e.primitive.name == "scan"]
    return loop.params["jaxpr"].jaxpr.eqns


def products(eqns):
    inside = [
        e for eqn in eqns for _, _, inner, _ in internals.inner_jaxprs(eqn) for e in inner.eqns
    ]
    return sum(e.primitive.name == "dot_general" for e in eqns) + (
        products(inside) if inside else 0
    )


def test_parts_are_computed_again_but_for_the_last(as_if_moved):
    eqns = equations(trained(*MODELS["deep"]))
    again = [e for e in eqns if e.params.get("differentiated")]
    assert len(again) == 3
    # 9 forward, twice as many backward (none for the elements), and those of three parts again.
    last = products(eqns) - sum(products([e]) for e in again) - LAYERS
    assert last % 2 == 0
    assert products(eqns) == 2 * LAYERS + (LAYERS - last // 2) + LAYERS - 1


def test_the_order_of_sending_and_fetching(as_if_moved):
    order = []
    for eqn in equations(trained(*MODELS["deep"])):
        tag = eqn.params.get("tag")
        if tag is not None and tag.role == "memory":
            order.append("send")
        elif eqn.primitive.name == "cond":
            taken, _ = (branch.jaxpr.eqns for branch in eqn.params["branches"])
            order.append("fetch" if any("tag" in e.params for e in taken) else "wait")
        elif eqn.params.get("differentiated"):
            order.append("again")
    # What only the last part reads is not sent; the first part reads nothing of the host, and waits
    # with the elements until the gradients of the second are there.
    forward = ["send", "send", "wait", "wait"]
    assert order == [*forward, "fetch", "again", "fetch", "again", "wait", "again"]


def test_a_part_waits_for_all_gradients_of_the_part_after_it(as_if_moved):
    eqns = equations(trained(*MODELS["deep"]))
    again = [e for e in eqns if e.params.get("differentiated")]
    waits = [e for e in eqns if e.primitive.name == "cond"][-2:]
    for before, wait in zip(again, waits, strict=False):
        made = [v for v in before.outvars if v.aval.shape == (WIDTH, WIDTH)]
        assert made
        assert set(made) <= set(wait.invars)


def test_cuts_stand_where_little_crosses():
    def loss(params, x):
        for kernel in params:
            wide = jnp.concatenate([x] * 16, axis=1)
            wide = jnp.sin(jnp.cos(wide) * 2.0)
            x = jnp.tanh(wide[:, :WIDTH] @ kernel)
        return (x**2).mean()

    params, x = kernels(4), data(1)[0]
    closed = jax.make_jaxpr(lambda *params: [loss(params, x)])(*params)
    cut = segments(opened(closed, params).jaxpr, 4)
    assert len(cut.parts) == 4
    assert [sum(v.aval.size for v in each) for each in cut.crossing(8)] == [32, 32, 0, 0]


def test_effects_on_the_host_are_not_repeated(as_if_moved, caplog):
    def loss(params, x):
        jax.debug.callback(lambda: None)  # may not run twice
        return deep(params, x)

    with caplog.at_level("WARNING", "tailrace"):
        held = trained(loss, kernels())
    assert "the forward pass has effects on the host" in caplog.text
    assert_bits_equal(held.params, trained(loss, kernels(), offloaded=False).params)


def test_small_activations_are_neither_sent_nor_computed_again(as_if_moved, monkeypatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1 << 20)
    held = trained(*MODELS["deep"])
    assert products(equations(held)) == 3 * LAYERS - 1
    assert_bits_equal(held.params, trained(*MODELS["deep"], offloaded=False).params)


def test_explain_says_what_waits_on_the_host(as_if_moved):
    trainer = tr.Trainer(*(deep, optax.sgd(0.1), kernels()), offload_activations=True)
    shown = str(trainer.explain(data(1)[0]))
    assert "Activations: of a microbatch 0.0 MB are kept in host memory" in shown
    assert "(what crosses the cuts into 4 parts); the rest is computed again" in shown


def test_a_loss_that_does_not_depend_on_some_parameters(as_if_moved):
    def loss(params, x):
        return deep(params[:-1], x)[0]

    held = trained(loss, kernels())
    assert_bits_equal(held.params[-1], kernels()[-1])
    assert_close(held.params, trained(loss, kernels(), offloaded=False).params)


# -- where it is not possible -------------------------------------------------------------------


@pytest.mark.cpu
def test_on_a_cpu_they_stay(caplog):
    with caplog.at_level("WARNING", "tailrace"):
        trainer = trained(*MODELS["deep"])
    messages = "Activations stay on the device: the device is a CPU"
    assert trainer.decisions[0].startswith(messages)
    assert_bits_equal(trainer.params, trained(*MODELS["deep"], offloaded=False).params)


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "Accelerator X"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": kind})() for kind in ("device", "pinned_host")]


def test_what_is_sent_goes_to_the_hosts_memory():
    held, messages = activation_offload.activations_on_host(Device())
    assert messages == ()  # known once the forward pass is
    policy = str(jax.make_jaxpr(lambda x: held.moves.to_host(x))(jnp.ones(3)))
    assert "host" in policy.lower()
    held, messages = activation_offload.activations_on_host(Device(), pipelined=True)
    assert held is not None
    assert messages == ("Activations: what forwards keep for backwards is in the host's memory.",)


@pytest.mark.parametrize("name", ["deep", "scanned"])
def test_with_the_moves_of_an_accelerator(as_if_moved, monkeypatch, name):
    """A CPU compiles and runs them; there they move nothing."""
    space = jax.memory.Space
    moves = host_memory.Moves(
        lambda value: jax.device_put(value, space.Host),
        lambda value: jax.device_put(value, space.Device),
    )
    monkeypatch.setattr(host_memory, "memory_moves", lambda: moves)
    held = trained(*MODELS[name], accumulation=2)
    assert_close(held.state, trained(*MODELS[name], accumulation=2, offloaded=False).state)


def test_more_than_the_host_has_memory_for(as_if_moved, monkeypatch):
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 100)
    text = "offload_activations=True would keep .* GB in the host's memory, which has 0.0 GB free"
    trainer = tr.Trainer(deep, optax.sgd(0.1), kernels(), offload_activations=True, replicas=2)
    with pytest.raises(tr.errors.OptionError, match=text):
        trainer.fit(data(4), steps=1)
    stages = [lambda p, x: jnp.tanh(x @ p)] * 2
    pipeline = tr.Pipeline(stages, lambda x: (x**2).mean(), accumulation=4)
    trainer = tr.Trainer(pipeline, optax.sgd(0.1), kernels(2), offload_activations=True)
    with pytest.raises(tr.errors.OptionError, match=text):
        trainer.fit(data(4), steps=1)
