"""Fingerprints: equal to NumPy's, whatever holds the state, and without a trace in the training."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import OptionError
from tailrace.jaxprs.marks import path_name
from tailrace.program.running.replica_layout import ReplicaLayout
from tailrace.records.fingerprints import GROUPS, chained
from tailrace.taps.bit_digests import (
    digest,
    digest_many,
    digest_rows,
    host_digest,
    host_row_digest,
    joined,
    mixed_with,
)

ELEMENTS = regression(48)


def optimizer():
    return optax.sgd(0.25, momentum=0.5)


def trainer_of(loss_fn=mlp_loss, params=None, **options):
    options = {"steps_per_execution": 3, "fingerprint": True, **options}
    params = mlp() if params is None else params
    return tr.Trainer(loss_fn, optimizer(), params, **options)


def leaves_of(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def by_numpy(state):
    """The groups of a state as the contract has it: a sum over leaves, by path."""
    starts = {"parameters": "params", "optimizer": "optimizer_state", "model_state": "model_state"}
    found = {group: 0 for group in starts}
    for name, leaf in leaves_of(state).items():
        (group,) = (g for g, start in starts.items() if name.split("/")[0] == start)
        found[group] = (found[group] + host_digest(leaf, name)) % 2**64
    return found


def last(trainer):
    return {name: int(values[-1]) for name, values in trainer.history.fingerprints.items()}


DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint16", "bool", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn"])
def test_device_and_numpy_agree(dtype):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)) * 3).astype(dtype)
    assert int(joined(jax.jit(lambda x: digest(x, "a/b"))(value))) == host_digest(value, "a/b")
    rows = joined(jax.jit(lambda x: digest_rows(x, "a/b", 1))(value))
    assert [int(row) for row in rows] == [host_row_digest(row, "a/b") for row in value]


def test_every_bit_name_and_place_counts():
    value = np.random.default_rng(1).normal(size=40).astype(np.float32)
    bits = value.view(np.uint32)
    seen = {host_digest(value, "w"), host_digest(value, "v"), host_digest(value, "w", first=1)}
    seen.add(host_digest(value[::-1], "w"))
    for place in range(40):
        for bit in range(32):
            other = bits.copy()
            other[place] ^= np.uint32(1 << bit)
            seen.add(host_digest(other.view(np.float32), "w"))
    assert len(seen) == 4 + 40 * 32
    assert host_digest(np.float32(0.0), "w") != host_digest(np.float32(-0.0), "w")


def test_large_sums_carry_into_the_high_word():
    value = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32)
    assert int(joined(digest(jnp.asarray(value), "w"))) == host_digest(value, "w")


@pytest.mark.parametrize("in_memory", [True, False])
def test_digests_of_large_tensors_in_parts(monkeypatch, in_memory):
    """On an accelerator: alone, several at once, of sizes that no part divides, and padded."""
    monkeypatch.setattr("tailrace.devices.devices.platform", lambda: "gpu")
    rng = np.random.default_rng(5)
    sizes = [1 << 18, (1 << 18) + 1, 5, 768 * 768, *[1 << 18] * 5, 300 * 1024]
    values = [rng.normal(size=size).astype(np.float32) for size in sizes]
    names = [f"w{number}" for number in range(len(values))]
    kept = [None, 1 << 18, 3, None, 200_000, *[None] * 5]
    compiled = jax.jit(lambda values: digest_many(values, names, kept, in_memory))
    expected = [
        host_digest(value[:count], name)
        for value, name, count in zip(values, names, kept, strict=True)
    ]
    assert [int(one) for one in joined(compiled(values))] == expected


def test_changes_do_not_cancel():
    """Bits of equal weight flipped at two or three places, values exchanged, shifted, negated."""
    value = np.random.default_rng(4).normal(size=64).astype(np.float32)
    seen, tried = {host_digest(value, "w")}, 1
    for bit in (0, 22, 23, 31):
        for places in [
            *itertools.combinations(range(24), 2),
            *((i, i + 8, i + 16) for i in range(24)),
        ]:
            other = value.view(np.uint32).copy()
            other[list(places)] ^= np.uint32(1 << bit)
            seen.add(host_digest(other.view(np.float32), "w"))
            tried += 1
    for first, second in itertools.combinations(range(64), 2):
        other = value.copy()
        other[[first, second]] = value[[second, first]]
        seen.add(host_digest(other, "w"))
        tried += 1
    for other in (np.roll(value, 1), -value, np.zeros(64, np.float32), np.zeros(63, np.float32)):
        seen.add(host_digest(other, "w"))
        tried += 1
    assert len(seen) == tried


@pytest.fixture(scope="module")
def plain():
    trainer = trainer_of()
    trainer.fit(ELEMENTS[:9], steps=9)
    return trainer


def test_the_groups_are_those_of_numpy(plain):
    marks = last(plain)
    assert (marks["first_step"], marks["steps"]) == (6, 3)
    for group, expected in by_numpy(plain.state).items():
        assert marks[group] == expected, group
    before = trainer_of()
    before.fit(ELEMENTS[:8], steps=8)
    grads = jax.jit(jax.grad(lambda p, x, y: mlp_loss(p, x, y)[0]))(before.params, *ELEMENTS[8])
    expected = sum(host_digest(g, f"reduced/{name}") for name, g in leaves_of(grads).items())
    assert marks["gradients"] == expected % 2**64
    loss = plain.history.each("loss")[6:]
    assert marks["loss"] == host_digest(loss, "loss", first=6)
    each = [
        sum(host_row_digest(leaf, f"element[{i}]") for i, leaf in enumerate(one)) % 2**64
        for one in ELEMENTS[6:9]
    ]
    assert marks["elements"] == mixed_with(np.array(each, np.uint64), 6 + np.arange(3), "elements")


def test_the_chain_depends_on_everything_before(plain):
    marks, chain = plain.history.fingerprints, 0
    for row in range(3):
        chain = chained(chain, {group: int(marks[group][row]) for group in GROUPS})
        assert int(marks["chain"][row]) == chain


# How XLA rounds the update of Lion depends on whether the gradients are written to memory.
@pytest.mark.parametrize("update", [optimizer, lambda: optax.lion(0.05, weight_decay=0.1)])
def test_training_is_the_same_without(update):
    marked, other = (
        tr.Trainer(mlp_loss, update(), mlp(), steps_per_execution=3, fingerprint=fingerprint)
        for fingerprint in (True, False)
    )
    for trainer in (marked, other):
        trainer.fit(ELEMENTS[:9], steps=9)
    assert_bits_equal(marked.state, other.state)
    assert_bits_equal(marked.history.loss, other.history.loss)
    assert not len(other.history.fingerprints["chain"])


MIX = "2246822507"
"""A constant of digests (0x85EBCA6B), as it is written in a program."""


@pytest.mark.parametrize("taps", [(), [tr.Tap("grad/*", mode=tr.every(2), reduce="norm")]])
def test_one_program_and_only_the_last_step_digests(taps, compilations):
    trainer = trainer_of(observe=taps)
    trainer.fit(ELEMENTS[:9], steps=9)
    assert (len(compilations), len(trainer.engine.digests.programs)) == (1, 0)
    text = compilations[0].as_text()
    assert MIX in text
    # The loop over silent steps is inside the loop over looks, and comes before the loud step.
    silent = text[text.index("stablehlo.while", text.index("stablehlo.while") + 1) :]
    inner = silent[: silent.index("stablehlo.return", silent.index("} do {"))]
    assert "dot_general" in inner
    assert MIX not in inner


def test_periodic_taps_have_no_row_of_the_last_step():
    taps = [tr.Tap("grad/*", mode=tr.every(4), reduce="tensor")]
    marked, other = (trainer_of(observe=taps, fingerprint=flag) for flag in (True, False))
    alone = trainer_of()
    # Executions of three steps, of which some have a look, some end with it, and some have none.
    for trainer in (marked, other, alone):
        trainer.fit(ELEMENTS[:26], steps=26)
    for name in ("grad/hidden/kernel", "grad/out"):
        found, expected = marked.records[name], other.records[name]
        assert list(found.steps) == list(expected.steps) == [3, 7, 11, 15, 19, 23]
        assert_bits_equal(found.values, expected.values)
    for group, values in alone.history.fingerprints.items():
        assert_bits_equal(marked.history.fingerprints[group], values)


def test_the_program_and_a_separate_one_agree(monkeypatch):
    inside, apart = trainer_of(replicas=2), trainer_of(replicas=2)
    inside.fit(ELEMENTS[:16], steps=8)
    # As with state in host memory, which the training program does not read back.
    monkeypatch.setattr(ReplicaLayout, "on_devices", False)
    apart.fit(ELEMENTS[:16], steps=8)
    assert [len(one.engine.digests.programs) for one in (inside, apart)] == [0, 1]
    for group, values in inside.history.fingerprints.items():
        assert_bits_equal(apart.history.fingerprints[group], values)


def test_executions_of_other_lengths_end_alike(plain):
    other = trainer_of(steps_per_execution=4)
    other.fit(ELEMENTS[:9], steps=9)
    for group in ("parameters", "optimizer", "model_state", "gradients"):
        assert last(other)[group] == last(plain)[group]


# Small integers and powers of two: every sum is exact, so its order does not matter.
EXACT = [
    (np.random.default_rng(i).integers(-2, 3, (2, 1301)).astype(np.float32),) for i in range(16)
]
STAGES = [lambda p, x: x * p["scale"], lambda p, h: h * p]
SCALES = [{"scale": np.ones(1301, np.float32)}, np.ones(1301, np.float32)]


def exact_loss(h):
    return h.sum() * 0.25


def whole_loss(params, x):
    return exact_loss(STAGES[1](params[1], STAGES[0](params[0], x)))


FORMS = {
    "accumulation": {"accumulation": 4},
    "replicas": {"accumulation": 2, "replicas": 2},
    "shares": {"replicas": 2, "shard_optimizer_state": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_state_that_is_spread_has_the_digest_of_the_whole(form):
    # Large enough to be shared out, and not even; parameters are even, and must not be divided.
    params = mlp(features=4, hidden=401)
    trainer = trainer_of(params=params, **FORMS[form])
    trainer.fit(regression(16, features=4), steps=4)
    for group, expected in by_numpy(trainer.state).items():
        assert last(trainer)[group] == expected, group


def test_replicas_keep_what_is_their_own():
    def loss_fn(w, state, x, y):
        return ((x @ w - y) ** 2).mean(), ({"seen": state["seen"] + x.mean()}, None)

    trainer = trainer_of(
        loss_fn,
        np.zeros(3, np.float32),
        model_state={"seen": np.float32(0)},
        replicas=2,
        replica_state="each",
    )
    trainer.fit(ELEMENTS[:12], steps=6)
    assert last(trainer)["model_state"] == by_numpy(trainer.state)["model_state"] != 0


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "shard_optimizer_state": True}])
def test_a_pipeline_has_the_fingerprints_of_the_plain_program(options):
    pipeline = tr.Pipeline(STAGES, exact_loss, accumulation=4)
    replicas = options.get("replicas", 1)
    plain = trainer_of(whole_loss, SCALES, accumulation=4, replicas=replicas)
    trainer = trainer_of(pipeline, SCALES, **options)
    for one in (trainer, plain):
        one.fit(EXACT, steps=2)
    assert_bits_equal(trainer.state.params, plain.state.params)
    for group, expected in by_numpy(trainer.state).items():
        assert last(trainer)[group] == expected, group
    assert last(trainer) == last(plain)


def test_they_are_in_the_run_directory_and_in_checkpoints(tmp_path):
    def fit(steps, directory="kept"):
        trainer = trainer_of(run_dir=tmp_path / "run" if steps == 9 else None)
        trainer.fit(ELEMENTS[:18], steps=steps, checkpoint=tmp_path / directory)
        return trainer

    marks = fit(9).history.fingerprints
    run = tr.open_run(tmp_path / "run")
    for name, values in marks.items():
        assert_bits_equal(run.executions[name], values)
    assert run.elements.shape == (9, 1, 1)
    assert run.info["options"]["fingerprint"] is True
    assert list(run.executions["first_element"]) == [0, 3, 6]
    longer = fit(18).history.fingerprints
    assert len(longer["chain"]) == 6
    assert_bits_equal(longer["chain"][:3], marks["chain"])
    assert_bits_equal(fit(18, "other").history.fingerprints["chain"], longer["chain"])


def test_a_switch():
    with pytest.raises(
        OptionError, match=r"fingerprint is True or False\. Received: fingerprint=1"
    ):
        tr.Trainer(mlp_loss, optimizer(), mlp(), fingerprint=1)


def test_many_tensors_have_the_digests_of_each():
    rng = np.random.default_rng(4)
    shapes = [(3,), (), (0, 4), (40, 50), (5, 3), (130, 130), (7,), (2000,), (2100,)]
    values = [jnp.asarray(rng.normal(size=shape), np.float32) for shape in shapes]
    values += [jnp.asarray(rng.normal(size=9), jnp.bfloat16), jnp.arange(9)]
    # More of one size than share a kernel, of other dtypes and shapes, and one with padding.
    large = [(np.float32, (130, 130))] * 13 + [(jnp.bfloat16, (16900,)), (np.float32, (65, 260))]
    values += [jnp.asarray(rng.normal(size=shape), dtype) for dtype, shape in large]
    names = [f"leaf/{number}" for number in range(len(values))]
    sizes = [None] * 6 + [5, 1999, None, None, None] + [None] * 14 + [16890]
    found = joined(jax.jit(lambda v: digest_many(v, names, sizes))(values))
    for value, name, size, one in zip(values, names, sizes, found, strict=True):
        assert int(one) == host_digest(np.asarray(value).reshape(-1)[:size], name), name
