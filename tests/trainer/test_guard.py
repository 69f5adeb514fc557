"""`tr.stop_on_nonfinite`: the first bad step is named, and nothing after it changes anything."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import NonFiniteError, OptionError

BAD_ROW = 101  # example 101 is row 5 of microbatch 12 (batches of 8)


@pytest.fixture(autouse=True)
def promoting():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def examples(value=-1.0):
    x = np.random.default_rng(0).uniform(0.1, 1, size=(320, 4)).astype(np.float32)
    x[BAD_ROW, 2] = value
    return x


def loss_fn(w, x):
    with jax.named_scope("logs"):
        logs = jnp.log(x)
    return ((logs @ w - 1) ** 2).mean()


def trainer_of(**options):
    options.setdefault("observe", [tr.stop_on_nonfinite("grad/*")])
    options.setdefault("steps_per_execution", 3)
    return tr.Trainer(loss_fn, optax.adam(0.01), jnp.ones(4), **options)


@pytest.mark.parametrize(
    ("microbatches", "replicas", "step"), [(1, 1, 12), (5, 1, 2), (1, 2, 6), (2, 2, 3)]
)
def test_the_first_bad_step_is_named_and_undone(microbatches, replicas, step):
    options = {"accumulation": microbatches, "replicas": replicas}
    trainer = trainer_of(**options)
    with pytest.raises(NonFiniteError, match=f"Not finite in step {step}") as caught:
        trainer.fit(tr.batches(examples(), 8))
    assert caught.value.step == trainer.step == len(trainer.history) == step
    culprit = caught.value.culprit
    assert (culprit.operation, culprit.scope, culprit.row, culprit.made) == (
        "log",
        "logs",
        5,
        "NaN",
    )
    assert culprit.low == -1.0
    assert "test_guard.py:" in culprit.source
    if microbatches > 1:
        assert f"microbatch {12 // replicas % microbatches}" in str(caught.value)
    if replicas > 1:
        assert f"replica {12 % replicas}" in str(caught.value)
    plain = trainer_of(observe=[], **options)
    plain.fit(tr.batches(examples(), 8), steps=step)
    assert_bits_equal(trainer.state, plain.state)


def test_going_back_repeats_keys_and_compiles_nothing(compilations):
    def noisy(w, x):
        return ((jnp.log(x) @ w - jax.random.normal(tr.key(), ())) ** 2).mean()

    def trained(observe, **fit):
        trainer = tr.Trainer(
            noisy, optax.adam(0.01), jnp.ones(4), observe=observe, steps_per_execution=5
        )
        trainer.fit(tr.batches(examples(0.5), 8), steps=5)
        compiled = len(compilations)
        with contextlib.suppress(NonFiniteError):
            trainer.fit(tr.batches(examples(), 8), **fit)
        assert len(compilations) == compiled
        return trainer

    guarded = trained([tr.stop_on_nonfinite()])  # in the third step of an execution
    assert guarded.step == 17
    assert_bits_equal(guarded.state, trained([], steps=12).state)


def test_a_bad_first_step_of_an_execution_is_undone():
    trainer = trainer_of(steps_per_execution=4)
    with pytest.raises(NonFiniteError, match="step 12"):
        trainer.fit(tr.batches(examples(), 8))
    plain = trainer_of(observe=[])
    plain.fit(tr.batches(examples(), 8), steps=12)
    assert_bits_equal(trainer.state, plain.state)


def test_training_goes_on_from_there():
    trainer = trainer_of()
    with pytest.raises(NonFiniteError):
        trainer.fit(tr.batches(examples(), 8))
    before = trainer.params
    trainer.fit(tr.batches(examples(0.5), 8), steps=4)
    assert trainer.step == 16
    assert not np.array_equal(before, trainer.params)
    assert np.isfinite(trainer.params).all()


def _pipelined():
    def logs(w, x):
        return jnp.log(x) * w

    return tr.Pipeline([logs, lambda w, h: ((h @ w - 1) ** 2).mean()], accumulation=4)


@pytest.mark.parametrize("where", ["one", "replicas", "pipeline"])
@pytest.mark.parametrize("length", [4, 3])
def test_what_is_recorded_ends_before_the_bad_step(tmp_path, where, length):
    """With executions in flight behind it: in memory, on disk, in outfeeds and fingerprints."""
    every = tr.Tap("param/*", mode=tr.every(2), reduce="tensor")
    taps = [tr.Tap("grad/*"), every, tr.Tap("loss", mode="sum", reduce="tensor")]
    taps.append(tr.Tap("updated/*", mode="final", reduce="tensor"))
    options = {"replicas": 2, "accumulation": 2} if where == "replicas" else {}

    def fitted(name, guards, **fit):
        pipelined = where == "pipeline"
        trainer = tr.Trainer(
            _pipelined() if pipelined else loss_fn,
            optax.adam(0.01),
            [jnp.ones(4), jnp.ones(4)] if pipelined else jnp.ones(4),
            observe=[*taps, *guards],
            steps_per_execution=length,
            fingerprint=True,
            run_dir=tmp_path / name if name == "stopped on disk" else None,
            **options,
        )
        with contextlib.suppress(NonFiniteError):
            trainer.fit(tr.batches(examples(), 8), **fit)
        return trainer

    for name in ("stopped", "stopped on disk"):
        stopped = fitted(name, [tr.stop_on_nonfinite()])
        assert stopped.step == {"one": 12, "replicas": 3, "pipeline": 3}[where]
        plain = fitted("plain", [], steps=stopped.step)
        assert list(stopped.records) == list(plain.records)
        for key in plain.records:
            found, expected = stopped.records[key], plain.records[key]
            assert found.steps.tolist() == expected.steps.tolist(), key
            assert_bits_equal(found.values, expected.values)
        for group, marks in plain.history.fingerprints.items():
            assert_bits_equal(stopped.history.fingerprints[group], marks)
    run = tr.open_run(tmp_path / "stopped on disk")
    assert run.history.steps.tolist() == list(range(stopped.step))
    assert run.executions["steps"].sum() == stopped.step


class BreaksAt(NamedTuple):
    """SGD whose update is NaN in one step, though loss and gradients are finite."""

    step: int

    def init(self, params):
        return jnp.zeros((), jnp.int32)

    def update(self, updates, state, params=None):
        factor = jnp.where(state == self.step, jnp.nan, -0.01)
        return jax.tree.map(lambda g: g * factor, updates), state + 1


def test_a_bad_update_is_not_called_a_finite_step():
    def broken(*observe):
        return tr.Trainer(loss_fn, BreaksAt(4), jnp.ones(4), observe=observe, steps_per_execution=3)

    clean = tr.batches(examples(value=0.5), 8)
    trainer = broken(tr.stop_on_nonfinite())
    with pytest.raises(NonFiniteError, match=r"'param/params'.* held it before the step") as caught:
        trainer.fit(clean)
    assert "an earlier update made it" in str(caught.value)
    assert "finite." not in str(caught.value).split("held it")[0]
    assert caught.value.step == 5
    # What the advice says: the update is seen in its own step, and is undone.
    trainer = broken(tr.stop_on_nonfinite(["loss", "grad/*", "update/*"]))
    with pytest.raises(NonFiniteError, match="Not finite in step 4: 'update/params'"):
        trainer.fit(clean)
    assert np.isfinite(trainer.params).all()


def test_a_constant_that_is_not_finite():
    nothing = np.float32([1, np.nan, 1, 1])
    trainer = tr.Trainer(
        lambda w, x: (x @ (w * nothing)).mean(),
        optax.sgd(0.01),
        jnp.ones(4),
        observe=[tr.stop_on_nonfinite("loss")],
    )
    with pytest.raises(NonFiniteError, match="A constant of the program holds it"):
        trainer.fit(tr.batches(examples(value=0.5), 8))


def test_bad_data_are_called_so():
    trainer = trainer_of(observe=[tr.stop_on_nonfinite("input/*")])
    with pytest.raises(NonFiniteError, match="element from the dataset itself holds the first Inf"):
        trainer.fit(tr.batches(examples(np.inf), 8))


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 1), (2, 2)])
def test_a_bad_row_is_named_as_the_dataset_numbers_it(microbatches, replicas):
    """In another order in each epoch, and without rows that were left out before."""
    options = {"accumulation": microbatches, "replicas": replicas}
    trainer = trainer_of(observe=[tr.stop_on_nonfinite("input/*")], **options)
    data = tr.batches(examples(), 8, shuffle=True, seed=3, repeat=True).without([5, 7])
    trainer.fit(data, steps=11)
    data.leaves[0][BAD_ROW, 2] = np.nan
    text = (
        rf"\(row {BAD_ROW} of the dataset\).* leave that row out: dataset.without\(\[{BAD_ROW}\]\)"
    )
    with pytest.raises(NonFiniteError, match=text) as caught:
        trainer.fit(data, steps=100)
    assert caught.value.culprit.dataset_row == BAD_ROW


def test_datasets_that_number_no_rows():
    trainer = trainer_of(observe=[tr.stop_on_nonfinite("input/*")])
    with pytest.raises(NonFiniteError, match=r"row 5 of the element\. .* leave that row out\.$"):
        trainer.fit(list(tr.batches(examples(np.nan), 8)))


def test_a_guard_changes_nothing_while_all_is_well():
    guarded, plain = trainer_of(), trainer_of(observe=[])
    for trainer in (guarded, plain):
        trainer.fit(tr.batches(examples(0.5), 8))
    assert_bits_equal(guarded.state, plain.state)
    assert_bits_equal(guarded.history.loss, plain.history.loss)


def test_activations_and_loops_can_be_watched():
    def layers(w, x):
        def layer(h, scale):
            with jax.named_scope("layer"):
                return jnp.sqrt(h * scale), None

        h, _ = jax.lax.scan(layer, x, w)
        return h.mean()

    trainer = tr.Trainer(
        layers,
        optax.sgd(0.1),
        jnp.ones(3),
        observe=[tr.stop_on_nonfinite("activation/layer")],
        steps_per_execution=5,
    )
    with pytest.raises(NonFiniteError, match="'sqrt' in 'layer'.*first in row 5"):
        trainer.fit(tr.batches(examples(), 8))
    assert trainer.step == 12


def test_programs_of_your_own_have_no_guard():
    with pytest.raises(OptionError, match=r"guards the steps of a tr\.Trainer"):
        tr.compile(lambda x: x, observe=[tr.stop_on_nonfinite()])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_branch_that_is_not_taken_is_not_bad(replicas):
    def branching(w, x):
        flag = tr.cross_replica_mean(x.sum()) > 0
        return jax.lax.cond(flag, lambda: (w**2).sum(), lambda: (jnp.exp(w) * x.mean()).sum())

    elements = [np.full(4, (-1) ** i, np.float32) for i in range(12)]
    watch = tr.stop_on_nonfinite("activation/*")
    trainer = tr.Trainer(
        branching, optax.sgd(0.01), jnp.ones(4), observe=[watch], replicas=replicas
    )
    assert len(trainer.fit(elements, steps=6).loss) == 6
    bad = elements[:4] + [np.full(4, -np.inf, np.float32)] * 2
    with pytest.raises(NonFiniteError):
        trainer.fit(bad, epochs=1)


def test_observe_refuses_a_guard():
    with pytest.raises(OptionError, match=r"guards the steps of a tr\.Trainer"):
        tr.observe(jnp.log, tr.stop_on_nonfinite("output/*"))
