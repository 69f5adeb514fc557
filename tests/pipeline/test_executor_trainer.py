"""A trainer with a pipeline is a trainer: many steps to a dispatch, state in and out, more fits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import (
    SCHEDULES,
    assert_same_bits,
    check_pipeline,
    composed,
    dense_stages,
    elements,
    trained,
)

import tailrace as tr
from oracles import assert_bits_equal

STAGES, PARAMS, LOSS = dense_stages([3, 5, 4])


def pipeline(**options):
    return tr.Pipeline(STAGES, LOSS, accumulation=4, **options)


def momentum():
    return optax.sgd(0.05, momentum=0.9)


def test_many_steps_in_one_dispatch_equal_single_ones():
    data = elements(24, 3)
    many, single = (
        trained(pipeline(), momentum(), PARAMS, data, 6, steps_per_execution=n) for n in (6, 1)
    )
    assert (many.executions, single.executions) == (1, 6)
    assert_same_bits(many, single)


def test_a_shorter_last_execution():
    data = elements(20, 3)
    runs = [trained(pipeline(), momentum(), PARAMS, data, 5, steps_per_execution=n) for n in (5, 3)]
    assert runs[1].executions == 2
    assert_same_bits(*runs)


def test_a_second_fit_goes_on_where_the_first_ended():
    data = elements(16, 3)
    whole = trained(pipeline(), momentum(), PARAMS, data, 4, steps_per_execution=2)
    parts = tr.Trainer(pipeline(), momentum(), PARAMS, steps_per_execution=2)
    parts.fit(data[:8], steps=2)
    assert parts.step == 2
    parts.fit(data[8:], steps=2)
    assert parts.history.steps.tolist() == [2, 3]
    assert_bits_equal(parts.state, whole.state)


def test_another_form_of_batch_goes_on_too():
    small, large = elements(4, 3, batch=2), elements(4, 3, batch=5)
    runs = []
    plain = composed(STAGES, LOSS)
    for made, options in ((pipeline(), {}), (plain, {"accumulation": 4})):
        trainer = tr.Trainer(made, momentum(), PARAMS, **options)
        trainer.fit(small, steps=1)
        trainer.fit(large, steps=1)
        runs.append(trainer.params)
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)


def test_epochs_equal_one_long_fit():
    data = elements(8, 3)
    found = tr.Trainer(pipeline(), momentum(), PARAMS)
    history = found.fit(data, epochs=3)
    assert len(history) == 6
    assert_bits_equal(found.state, trained(pipeline(), momentum(), PARAMS, data * 3, 6).state)


def test_params_and_state_are_copies_of_the_tree_that_was_given():
    trainer = tr.Trainer(pipeline(), momentum(), PARAMS)
    assert_bits_equal(trainer.params, PARAMS)  # before anything ran
    assert jax.tree.structure(trainer.params) == jax.tree.structure(PARAMS)
    trainer.fit(elements(8, 3), steps=2)
    before = trainer.state
    kept = jax.tree.map(np.array, before)
    trainer.fit(elements(8, 3, seed=1), steps=2)
    assert_bits_equal(before, kept)  # not overwritten by more training


def test_the_callers_arrays_are_left_alone():
    mine = jax.tree.map(np.array, PARAMS)
    trainer = tr.Trainer(pipeline(), momentum(), mine)
    for leaf in jax.tree.leaves(mine):
        leaf[...] = np.nan  # changed after they were given
    trainer.fit(elements(4, 3), steps=1)
    assert np.isfinite(trainer.history.loss).all()


def test_leaves_of_the_state_can_be_replaced():
    data = elements(16, 3)
    donor = trained(pipeline(), momentum(), PARAMS, data[:8], 2)
    heir = tr.Trainer(pipeline(), momentum(), jax.tree.map(np.zeros_like, PARAMS))
    heir.engine.replace(dict(enumerate(jax.tree.leaves(donor.state))))  # before it has run
    assert_bits_equal(heir.state, donor.state)
    late = trained(pipeline(), momentum(), PARAMS, data[8:], 2)  # after it has
    late.engine.replace(dict(enumerate(jax.tree.leaves(donor.state))))
    assert_bits_equal(late.state, donor.state)
    for trainer in (donor, heir, late):
        trainer.fit(data[8:], steps=2)
    assert_bits_equal(heir.params, donor.params)
    assert_bits_equal(late.params, donor.params)


def test_callbacks_and_history():
    class Count(tr.Callback):
        ends = 0

        def on_execution_end(self, trainer, execution):
            self.ends += 1

    trainer = tr.Trainer(pipeline(), momentum(), PARAMS, steps_per_execution=2)
    count = Count()
    history = trainer.fit(elements(16, 3), steps=4, callbacks=[count])
    assert count.ends == 2
    assert history.each("loss").shape == (4, 4, 1)
    assert history["mae"].shape == (4,)


def test_an_infeed_may_be_any_dataset():
    data = elements(8, 3)
    x, y = (np.concatenate([element[i] for element in data]) for i in (0, 1))
    runs = [
        trained(pipeline(), momentum(), PARAMS, given, 2)
        for given in (data, tr.batches((x, y), 4), iter(data), lambda: iter(data))
    ]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("schedule", ["grouped", "sequential"])
def test_recomputation_with_checkpoints_keeps_what_they_name(schedule):
    def deep(p, x, y):
        h = jnp.tanh(x @ p["kernel"] + p["bias"])
        h = tr.recomputation_checkpoint(h)
        return jnp.tanh(jnp.sin(h) * 2.0), y

    check_pipeline(
        [deep, STAGES[1]],
        LOSS,
        PARAMS,
        elements(8, 3),
        schedule=schedule,
        recompute="interleaved",
    )


def stash_of(stages, params, recompute):
    trainer = tr.Trainer(
        tr.Pipeline(stages, LOSS, accumulation=4, recompute=recompute), optax.sgd(0.1), params
    )
    trainer.fit(elements(4, 3), steps=1)
    return trainer.engine.runner.assembly


def test_recomputation_stashes_inputs_instead_of_what_is_made_of_them():
    def deep(p, x, y):
        h = x @ p["kernel"] + p["bias"]
        for _ in range(5):
            h = jnp.sin(jnp.tanh(h) * 2.0)
        return h, y

    kept, again = (
        stash_of([deep, STAGES[1]], PARAMS, recompute).stash_layout.used(0)
        for recompute in (False, True)
    )
    assert again < kept / 3


def test_stash_has_the_slots_of_the_plan():
    assembly = stash_of(STAGES, PARAMS, False)
    plan = assembly.plan
    for device, slots in enumerate(assembly.stash_layout.slots):
        for (where, _), slot in slots.items():
            assert where[0] == device
            assert slot.form.depth == plan.slots(device)


# -- values that change from call to call ---------------------------------------------------------


def test_inputs_may_change_with_each_fit_without_compiling_again():
    def first(w, scale, x, y):
        return x @ w * scale, y

    def second(w, h, y):
        return ((h @ w - y) ** 2).mean()

    def trainer(scale):
        made = tr.Pipeline([first, second], accumulation=4, inputs=(np.float32(scale),))
        params = [PARAMS[0]["kernel"], PARAMS[0]["bias"]]
        return tr.Trainer(made, optax.sgd(0.05), params, steps_per_execution=1)

    data = elements(4, 3)
    changed = trainer(1.0)
    changed.fit(data, steps=1)
    runner = changed.engine.runner
    compiled = runner.compile_s
    changed.fit(data, steps=1, inputs=(np.float32(0.25),))
    assert runner.compile_s == compiled
    assert changed.engine.runner is runner
    other = trainer(0.25)
    other.fit(data, steps=0)
    one = trainer(1.0)
    one.fit(data, steps=1)
    other.engine.state = one.state
    other.fit(data, steps=1)
    assert_bits_equal(changed.params, other.params)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_stand_still_within_a_step(schedule):
    """Loss w*x + y with x = 1.5, y = 1, w = 2, rate 0.5, summed over 4 microbatches."""

    def first(w, x):
        return w * x

    def second(_, h):
        return (h + 1.0).mean()

    made = tr.Pipeline(
        [first, second],
        accumulation=tr.Accumulation(4, reduction="sum"),
        schedule=schedule,
    )
    data = [(np.full(2, 1.5, np.float32),)] * 8
    trainer = trained(made, optax.sgd(0.5), [np.float32(2.0), None], data, 2)
    assert float(trainer.params[0]) == 2.0 - 2 * (0.5 * 1.5 * 4)
    losses = trainer.history.each("loss")[..., 0]
    np.testing.assert_array_equal(losses, [[4.0] * 4, [(2.0 - 3.0) * 1.5 + 1.0] * 4])
