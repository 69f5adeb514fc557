"""Optimizer state in shares and on the host: the same training, whatever the optimizer does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close, mlp, mlp_loss, plain_accumulated_training, regression
from tailrace.errors import OptionError
from tailrace.program.memory import host_memory, optimizer_state
from tailrace.program.memory.sharded_state import Shares
from tailrace.program.memory.update_graph import PIECE, WHOLE, Evaluation, UpdateGraph

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "clip, then adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adam, then clip": optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.01)),
    "masked": optax.masked(
        optax.adam(1e-2), lambda p: jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, p)
    ),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}

# Each is different in kind: elementwise, per tensor, over all tensors, with a branch.
USUAL = ("adamw", "lamb", "clip, then adam", "if finite")


def each_optimizer():
    """All of them in the exhaustive run, the usual ones always."""
    return [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


@pytest.fixture
def small_leaves(monkeypatch):
    """Leaves are shared and moved however small they are."""
    monkeypatch.setattr(optimizer_state, "LEAST", 2)
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 8)


@pytest.fixture
def as_if_moved(small_leaves, monkeypatch):
    """The program of an accelerator, in which moving changes nothing."""
    monkeypatch.setattr(host_memory, "obstacle", lambda device, guarded: None)
    monkeypatch.setattr(host_memory, "memory_moves", lambda: host_memory.NO_MOVES)


def trained(optimizer, microbatches=1, replicas=1, steps=3, **options):
    trainer = tr.Trainer(
        mlp_loss, optimizer, mlp(), accumulation=microbatches, replicas=replicas,
        steps_per_execution=steps, **options,
    )  # fmt: skip
    trainer.fit(regression(64), steps=steps)
    return trainer


def expected(optimizer, microbatches=1, replicas=1, steps=3):
    data = regression(64)[: microbatches * replicas * steps]
    params, losses, _ = plain_accumulated_training(
        mlp_loss, optimizer, mlp(), data, microbatches=microbatches, replicas=replicas
    )
    return params, losses


# -- shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each_optimizer())
def test_shared_state_equals_the_plain_loop(small_leaves, name):
    optimizer = OPTIMIZERS[name]
    trainer = trained(optimizer, 2, 3, shard_optimizer_state=True)
    params, losses = expected(optimizer, 2, 3)
    assert_close(trainer.params, params)
    assert_close(trainer.history.each("loss"), losses)
    if name in ("adamw", "adafactor"):
        plain = trained(optimizer, 2, 3)
        assert_close(trainer.state.optimizer_state, plain.state.optimizer_state)


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 2), (3, 4)])
def test_shares_with_accumulation_and_replicas(small_leaves, microbatches, replicas):
    optimizer = OPTIMIZERS["adamw"]
    trainer = trained(optimizer, microbatches, replicas, shard_optimizer_state=True)
    params, _ = expected(optimizer, microbatches, replicas)
    assert_close(trainer.params, params)


def test_each_replica_holds_one_share(small_leaves):
    trainer = trained(OPTIMIZERS["adamw"], 1, 4, shard_optimizer_state=True)
    held = trainer.engine.held_state.optimizer_state[0].mu["hidden"]["kernel"]
    assert held.shape == (16,)  # 15 elements, padded
    assert {shard.data.shape for shard in held.addressable_shards} == {(4,)}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state.optimizer_state))
    shown = trainer.explain(regression(1)[0])
    assert shown.parts["optimizer state"] < 0.4 * whole
    assert "6 of 7 leaves" in str(shown)
    assert "sharded over 4 replicas" in str(shown)


def test_records_of_shared_state_are_whole(small_leaves):
    taps = [tr.Tap("optimizer/*", reduce="tensor"), tr.Tap("update/*", reduce="tensor")]
    optimizer = OPTIMIZERS["lamb"]
    shared = trained(optimizer, 2, 3, shard_optimizer_state=True, observe=taps)
    plain = trained(optimizer, 2, 3, observe=taps)
    assert sorted(shared.records.names) == sorted(plain.records.names)
    for name in plain.records.names:
        assert_close(shared.records[name].values, plain.records[name].values)
        assert (shared.records[name].replicas == -1).all()


def test_taps_do_not_change_what_is_computed(small_leaves):
    optimizer = OPTIMIZERS["adamw"]
    plain = trained(optimizer, 2, 2, shard_optimizer_state=True)
    tapped = trained(optimizer, 2, 2, shard_optimizer_state=True, observe=["optimizer/*"])
    assert_close(tapped.state, plain.state)


def test_shared_state_goes_on_where_it_was(small_leaves):
    optimizer, data = OPTIMIZERS["adamw"], regression(64)
    trainer = tr.Trainer(mlp_loss, optimizer, mlp(), replicas=2, shard_optimizer_state=True)
    trainer.fit(data[:6], steps=3)
    trainer.fit([(x[:2], y[:2]) for x, y in data[:4]], steps=2)  # another program
    plain = tr.Trainer(mlp_loss, optimizer, mlp(), replicas=2)
    plain.fit(data[:6], steps=3)
    plain.fit([(x[:2], y[:2]) for x, y in data[:4]], steps=2)
    assert_close(trainer.state, plain.state)


def test_leaves_of_shared_state_can_be_replaced(small_leaves):
    trainer = trained(OPTIMIZERS["momentum"], 1, 2, shard_optimizer_state=True)
    number = len(jax.tree.leaves(trainer.params))
    new = np.arange(5, dtype=np.float32)
    trainer.engine.replace({number: new})
    assert_close(jax.tree.leaves(trainer.state)[number], new)
    trainer.fit(regression(8), steps=2)


def test_a_guard_watches_shared_state(small_leaves):
    def loss(params, x, y):
        return mlp_loss(params, x, y)[0] * jnp.where(tr.step() == 2, jnp.nan, 1.0)

    trainer = tr.Trainer(
        loss, OPTIMIZERS["adamw"], mlp(), replicas=2, shard_optimizer_state=True,
        observe=[tr.stop_on_nonfinite("grad/*")], steps_per_execution=4,
    )  # fmt: skip
    with pytest.raises(tr.errors.NonFiniteError, match="Not finite in step 2"):
        trainer.fit(regression(16), steps=4)
    assert np.isfinite(jax.tree.leaves(trainer.state.optimizer_state)[1]).all()


def test_one_replica_has_nothing_to_share():
    trainer = trained(OPTIMIZERS["adamw"], shard_optimizer_state=True)
    assert trainer.decisions == ("shard_optimizer_state has no effect with one replica.",)


# -- the host's memory --------------------------------------------------------------------------


@pytest.mark.parametrize("name", each_optimizer())
def test_the_order_of_an_offloaded_update(as_if_moved, name):
    optimizer = OPTIMIZERS[name]
    trainer = trained(optimizer, 2, offload_optimizer_state=True)
    params, losses = expected(optimizer, 2)
    assert_close(trainer.params, params)
    assert_close(trainer.history.each("loss"), losses)
    if name in ("adamw", "adafactor"):
        plain = trained(optimizer, 2)
        assert_close(trainer.state.optimizer_state, plain.state.optimizer_state)


@pytest.mark.parametrize(
    ("microbatches", "replicas", "share"), [(1, 1, False), (2, 2, False), (2, 3, True)]
)
def test_offload_with_accumulation_replicas_and_shares(as_if_moved, microbatches, replicas, share):
    optimizer = OPTIMIZERS["adamw"]
    trainer = trained(
        optimizer, microbatches, replicas, offload_optimizer_state=True,
        shard_optimizer_state=share, observe=["update/*", "optimizer/*/mu/out"],
    )  # fmt: skip
    assert_close(trainer.params, expected(optimizer, microbatches, replicas)[0])
    plain = trained(optimizer, microbatches, replicas, observe=["update/*", "optimizer/*/mu/out"])
    for record in plain.records.names:
        found, wanted = trainer.records[record].values, plain.records[record].values
        assert_close(np.float32(found["mean"]), np.float32(wanted["mean"]))


def test_state_moves_inside_the_loop_after_the_microbatches(as_if_moved):
    trainer = trained(OPTIMIZERS["adamw"], 2, offload_optimizer_state=True)
    runner = trainer.engine.runner
    (loop,) = [e for e in runner.traced.jaxpr.eqns if e.primitive.name == "scan"]
    body = loop.params["jaxpr"].jaxpr
    order = [e.primitive.name for e in body.eqns if e.primitive.name in ("scan", "while")]
    assert order == ["scan", "while", "while", "while"]  # a part for each parameter
    assert "6 of 7 leaves" in trainer.decisions[0]


def test_observed_leaves_stay_on_the_device(as_if_moved):
    trainer = trained(OPTIMIZERS["adamw"], offload_optimizer_state=True, observe=["optimizer/*"])
    assert "(0 of 7 leaves" in trainer.decisions[0]


@pytest.mark.cpu
def test_on_a_cpu_offload_is_a_recorded_no_op(caplog):
    with caplog.at_level("WARNING", "tailrace"):
        trainer = trained(OPTIMIZERS["adamw"], 2, offload_optimizer_state=True)
    message = "Optimizer state stays on the device: the device is a CPU"
    assert trainer.decisions[0].startswith(message)
    assert message in caplog.text
    assert message in str(trainer.explain(regression(1)[0]))
    assert_close(trainer.params, expected(OPTIMIZERS["adamw"], 2)[0])


def test_left_open_offload_is_decided_quietly(caplog):
    with caplog.at_level("WARNING", "tailrace"):
        trainer = trained(OPTIMIZERS["adamw"], 2, offload_optimizer_state=None)
        assert trained(OPTIMIZERS["adamw"], 1, offload_optimizer_state=None).decisions == ()
    assert trainer.decisions
    assert not caplog.text


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "Accelerator X"
    kinds: tuple[str, ...] = ("device", "pinned_host")

    def addressable_memories(self):
        return [type("Memory", (), {"kind": kind})() for kind in self.kinds]


def test_why_state_cannot_leave_the_device():
    assert host_memory.obstacle(Device(), False) is None
    assert "has no pinned_host memory" in str(
        host_memory.obstacle(Device(kinds=("device",)), False)
    )
    assert "tr.stop_on_nonfinite" in str(host_memory.obstacle(Device(), True))
    assert "is a CPU" in str(host_memory.obstacle(Device("cpu"), False))


def test_more_than_the_host_has_memory_for(monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    with pytest.raises(OptionError, match=r"keep 3.0 GB in the host's memory, which has 2.0 GB"):
        host_memory.check_fits(3 * 10**9, 2 * 10**9, "gpu")
    with pytest.raises(OptionError, match="Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=108"):
        host_memory.check_fits(10**11, 10**12, "gpu")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    host_memory.check_fits(10**11, 10**12, "gpu")
    host_memory.check_fits(10, None, "tpu")


@pytest.mark.parametrize("replicas", [1, 2])
def test_too_much_state_is_refused_before_it_is_made(as_if_moved, monkeypatch, replicas):
    from tailrace.program.memory.first_state import FirstState

    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 100)
    monkeypatch.setattr(FirstState, "leaves", lambda self: pytest.fail("it was made"))
    with pytest.raises(OptionError, match="offload_optimizer_state=True would keep 0.0 GB in the"):
        trained(OPTIMIZERS["adamw"], 2, replicas, offload_optimizer_state=True)


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"shard_optimizer_state": 2}, "shard_optimizer_state is True or False. Received: 2"),
        ({"offload_optimizer_state": "auto"}, "True, False, or None for where it pays"),
        ({"offload_activations": None}, "offload_activations is True or False"),
    ],
)
def test_bad_options(options, expected_text):
    with pytest.raises(OptionError, match=expected_text):
        tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), **options)


class Applies:
    """An optimizer of another library: it returns parameters, not updates."""

    def __init__(self, inner):
        self.init, self._inner = inner.init, inner

    def apply(self, grads, state, params):
        updates, state = self._inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state


@pytest.mark.parametrize(
    "options", [{"shard_optimizer_state": True}, {"offload_optimizer_state": True}]
)
def test_optimizers_that_apply_themselves(as_if_moved, options):
    inner = OPTIMIZERS["adamw"]
    trainer = trained(Applies(inner), 2, 2, **options, observe=["update/*", "updated/*"])
    assert_close(trainer.params, expected(inner, 2, 2)[0])
    plain = trained(Applies(inner), 2, 2, observe=["update/*", "updated/*"])
    for name in plain.records.names:
        assert_close(
            np.float32(trainer.records[name].values["max"]),
            np.float32(plain.records[name].values["max"]),
        )


# -- the graph of an update ---------------------------------------------------------------------


def test_what_each_result_needs():
    def update(g1, g2, s1, s2):
        total = jnp.sqrt((g1**2).sum() + (g2**2).sum())
        return [s1 * 0.9 + g1 / total, s2 + g2, s1.sum() + s2.sum()]

    shapes = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 4
    graph = UpdateGraph(update, shapes)
    needs = graph.needs([2, 3])
    assert [needs(value) for value in graph.outputs] == [0b01, 0b10, 0b11]
    pieces = graph.in_pieces([2])
    assert [pieces(value) for value in graph.outputs] == [True, False, False]


def test_pieces_of_elementwise_results_are_computed_on_pieces():
    @jax.jit
    def inner(x, scale):
        return jnp.where(x > 0, x, 0.0) * scale

    def update(g, s):
        new = inner(s, 0.5) + jnp.broadcast_to(g.max(), s.shape).reshape(6) + g.reshape(6)
        return [new, new / jnp.linalg.norm(new)]

    g, s = np.arange(6, dtype=np.float32).reshape(2, 3) - 2, np.linspace(-1, 1, 6, dtype=np.float32)
    graph = UpdateGraph(update, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (g, s)])

    class Half(Shares):
        """The second of two shares; the test knows what gathering the squares would give."""

        gathered = 0

        def cut(self, array):
            return array.reshape(-1)[3:]

        def gather(self, share, form):
            Half.gathered += 1
            assert share.shape == (3,)
            return jnp.asarray(update(g, s)[0]) ** 2

    run = Evaluation(graph, [g, s[3:]].__getitem__, graph.in_pieces([1]), Half(2))
    new, scaled = update(g, s)
    np.testing.assert_allclose(run.get(graph.outputs[0], PIECE), new[3:], rtol=1e-6)
    np.testing.assert_allclose(run.get(graph.outputs[1], PIECE), scaled[3:], rtol=1e-6)
    assert Half.gathered == 1
    assert run.get(graph.outputs[0], WHOLE).shape == (6,)


def test_a_deep_update_needs_no_deep_stack():
    def update(s):
        total = s
        for _ in range(3000):
            total = total + 1.0
        return [total]

    graph = UpdateGraph(update, [jax.ShapeDtypeStruct((2,), jnp.float32)])
    run = Evaluation(graph, [np.zeros(2, np.float32)].__getitem__)
    assert float(run.get(graph.outputs[0])[0]) == 3000.0
