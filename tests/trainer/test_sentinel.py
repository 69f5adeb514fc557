"""Silent corruption: flipped bits are found, and the place is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import CorruptionError, OptionError
from tailrace.trainer.sentinel import flip
from tailrace.trainer.sentinel_faults import Fault, Faults

ELEMENTS = regression(40)


def trainer_of(**options):
    options = {"steps_per_execution": 4, "sentinel": 1.0, **options}
    return tr.Trainer(mlp_loss, optax.sgd(0.05, momentum=0.5), mlp(), **options)


def planted(trainer, leaf, index, bit, at):
    """Flip one bit of a leaf of the state, once, before the execution number `at`, behind its check."""
    count = iter(range(1000))

    def inject(state):
        if next(count) == at:
            var = trainer.engine.runner.traced.jaxpr.outvars[leaf]
            state.values[var] = flip(state.values[var], index, bit)

    trainer.engine.sentinel.injected = inject


def test_without_faults_nothing_changes():
    trainer, plain = trainer_of(), trainer_of(sentinel=None)
    for one in (trainer, plain):
        one.fit(ELEMENTS[:16], steps=16)
    assert_bits_equal(trainer.state, plain.state)
    assert_bits_equal(trainer.history.loss, plain.history.loss)
    assert trainer.executions == plain.executions == 4
    trainer.engine.state = jax.tree.map(np.asarray, plain.state)  # set from outside: no corruption
    trainer.fit(ELEMENTS[16:24], steps=8)


def corruption(trainer):
    try:
        trainer.fit(ELEMENTS[4:16], steps=12)
    except CorruptionError as error:
        return error
    return None


def test_every_flip_in_a_checked_execution_is_found():
    trainer = trainer_of()
    trainer.fit(ELEMENTS[:4], steps=4)
    start, leaves = trainer.state, jax.tree.leaves(trainer.state)
    rng = np.random.default_rng(0)
    clean = trainer_of(sentinel=None)
    clean.fit(ELEMENTS[:16], steps=16)
    found = 0
    for _ in range(30):
        leaf = int(rng.integers(len(leaves)))
        index, bit = int(rng.integers(leaves[leaf].size)), int(rng.integers(32))
        trainer.engine.state, trainer.engine.step = start, 4
        planted(trainer, leaf, index, bit, 1)
        error = corruption(trainer)
        if error is None:
            assert_bits_equal(trainer.state, clean.state)  # rounded away: nothing was corrupted
            continue
        found += 1
        assert "two runs of it differ" in str(error)
        assert 8 <= error.step < 12
        assert trainer.step == 12, "what came after it was never dispatched"
        assert len(trainer.history) == 4, "and it is not part of the history"
    assert found > 20


@pytest.fixture(scope="module")
def faulty():
    """A trainer whose program has a port for faults in each tensor, after its first execution."""
    trainer = trainer_of()
    trainer.engine.use(ELEMENTS[:4])
    faults = Faults(trainer.engine)
    trainer.fit(ELEMENTS[:4], steps=4)
    return trainer, faults, trainer.state


def test_the_tensor_that_a_fault_hit_is_named(faulty):
    trainer, faults, start = faulty
    trainer.engine.state, trainer.engine.step = start, 4
    assert corruption(trainer) is None
    clean = trainer.state
    rng = np.random.default_rng(0)
    kinds, changed = set(), 0
    for _ in range(40):
        entry = faults.entries[rng.integers(len(faults.entries))]
        size = int(np.prod(entry.shape))
        fault = Fault(
            entry.name, int(rng.integers(8, 12)), int(rng.integers(size)), int(rng.integers(32))
        )
        trainer.engine.state, trainer.engine.step = start, 4
        faults.arm(fault)
        error = corruption(trainer)
        assert faults.happened
        if error is None:
            assert_bits_equal(trainer.state, clean)  # it changed nothing that is kept
            continue
        changed += 1
        kinds.add(entry.kind)
        assert (error.step, error.names[0]) == (fault.step, fault.name), str(error)
    assert changed > 20
    assert {"param", "activation", "grad", "optimizer"} <= kinds


def test_in_a_pipeline_leaves_are_named():
    first = lambda p, x, y: (jnp.tanh(x @ p["kernel"] + p["bias"]), y)  # noqa: E731
    second = lambda p, h, y: ((h @ p - y) ** 2).mean()  # noqa: E731
    params = mlp()
    trainer = tr.Trainer(
        tr.Pipeline([first, second], accumulation=4),
        optax.sgd(0.05),
        [params["hidden"], params["out"]],
        steps_per_execution=2,
        sentinel=1.0,
    )
    trainer.fit(ELEMENTS[:8], steps=2)
    count = iter(range(9))

    def inject(state):
        if next(count) == 0:
            key = next(iter(k for k in state.values if getattr(k, "kind", "") == "held"))
            state.values[key] = flip(state.values[key], 0, 20)

    trainer.engine.sentinel.injected = inject
    with pytest.raises(CorruptionError, match="two runs of it differ") as caught:
        trainer.fit(ELEMENTS[8:16], steps=2)
    assert all("/" in name for name in caught.value.names)


def test_the_state_at_rest_is_watched_in_every_execution():
    trainer = trainer_of(sentinel=0.0)
    trainer.fit(ELEMENTS[:4], steps=4)
    engine = trainer.engine
    names = engine.sentinel.digests.names
    for leaf, name in enumerate(names):
        var = engine.runner.traced.jaxpr.outvars[leaf]
        values = engine.loop_state.values
        good = values[var]
        values[var] = flip(good, 0, 3)
        with pytest.raises(CorruptionError, match=f"between executions, before step .*{name}"):
            trainer.fit(ELEMENTS[4:8], steps=4)


def test_a_share_of_executions_is_chosen_by_the_seed():
    trainer = trainer_of(sentinel=0.1)
    chosen = [step for step in range(2000) if trainer.engine.sentinel.chooses(step)]
    assert 150 < len(chosen) < 250
    assert trainer.history.fingerprints["chain"].size == 0


def test_replicas(tmp_path):
    trainer = trainer_of(replicas=2, run_dir=tmp_path / "run")
    trainer.fit(ELEMENTS[:16], steps=8)
    assert tr.open_run(tmp_path / "run").info["options"]["sentinel"] == 1.0
    planted(trainer, 0, 1, 20, 0)
    with pytest.raises(CorruptionError, match="Silent corruption in step"):
        trainer.fit(ELEMENTS[16:32], steps=8)


def test_shares_are_from_0_to_1():
    with pytest.raises(OptionError, match=r"from 0 to 1, or None\. Received: sentinel=2"):
        trainer_of(sentinel=2)
