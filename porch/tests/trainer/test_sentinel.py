"""Silent corruption: flipped bits are found, and the place is named."""

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import CorruptionError, OptionError
from tailrace.trainer.sentinel import flip

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
    chosen = [step for step in range(2000) if trainer.engine.sentinel._chooses(step)]
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
