"""What is observed inside stages is what is observed in the plain program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelined import SCHEDULES, elements, trained

import tailrace as tr
from oracles import assert_bits_equal, assert_close
from tailrace.errors import NonFiniteError

RNG = np.random.default_rng(6)
OUTSIDE = ("input/*", "param/*", "loss", "aux/*", "grad/*", "accumulated/*", "reduced/*")
UPDATE = ("update/*", "updated/*", "optimizer/*")


def normal(*shape):
    return (RNG.normal(size=shape) * 0.5).astype(np.float32)


PARAMS = {"a": normal(3, 4), "b": normal(4, 5), "c": normal(5)}


def loss_fn(p, x, y):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ p["a"])
    h = tr.stage_boundary(h)
    with jax.named_scope("second"):
        h = jnp.tanh(h @ p["b"])
    h = tr.stage_boundary(h)
    with jax.named_scope("third"):
        error = h @ p["c"] - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


def observed(pipelined, observe, *, replicas=1, schedule="grouped", steps=3, **options):
    data = elements(6 * replicas * steps, 3)
    optimizer = optax.sgd(0.05, momentum=0.9)
    options = {"replicas": replicas, "observe": observe, **options}
    if pipelined:
        pipeline = tr.Pipeline(loss_fn, accumulation=6, schedule=schedule)
        return trained(pipeline, optimizer, PARAMS, data, steps, **options)
    return trained(loss_fn, optimizer, PARAMS, data, steps, accumulation=6, **options)


def assert_same_records(found, expected):
    assert sorted(found.records.names) == sorted(expected.records.names)
    assert found.records.names
    for name in expected.records.names:
        mine, theirs = found.records[name], expected.records[name]
        if mine.values.dtype.names:  # statistics: each field
            for field in mine.values.dtype.names:
                # Merged in float64 from sums that the device makes in float32.
                one, other = (np.float32(r.values[field]) for r in (mine, theirs))
                assert_close(one, other)
        else:
            assert_close(mine.values, theirs.values)
        for tag in ("steps", "microbatches", "replicas"):
            np.testing.assert_array_equal(getattr(mine, tag), getattr(theirs, tag), name)


@pytest.mark.parametrize(("schedule", "replicas"), [*zip(SCHEDULES, (1, 2, 1), strict=True)])
def test_names_and_values_of_every_kind(schedule, replicas):
    taps = [tr.Tap([*OUTSIDE, *UPDATE], reduce="tensor")]
    found, expected = (
        observed(p, taps, replicas=replicas, schedule=schedule) for p in (True, False)
    )
    assert_same_records(found, expected)


def test_activations_and_their_gradients():
    taps = [tr.Tap(["activation/*", "cotangent/*"], reduce="tensor")]
    found, expected = (observed(p, taps) for p in (True, False))
    scopes = ("first", "second", "third")
    for name in [f"{kind}/{scope}" for kind in ("activation", "cotangent") for scope in scopes]:
        mine, theirs = found.records[name], expected.records[name]
        assert_close(mine.values, theirs.values)
        np.testing.assert_array_equal(mine.microbatches, theirs.microbatches)


@pytest.mark.parametrize("mode", ["sum", "final", tr.every(2)])
def test_modes_of_taps_equal_the_plain_step(mode):
    taps = [tr.Tap(["grad/*", "activation/second", "updated/*"], mode=mode, reduce="tensor")]
    found, expected = (observed(p, taps, steps=4) for p in (True, False))
    assert_same_records(found, expected)


@pytest.mark.parametrize("reduce", ["stats", "histogram", "norm", lambda x: x.max()])
def test_reductions_of_taps_equal_the_plain_step(reduce):
    taps = [tr.Tap(["grad/*", "cotangent/second"], reduce=reduce)]
    found, expected = (observed(p, taps) for p in (True, False))
    assert_same_records(found, expected)


def test_records_know_their_stage():
    taps = [tr.Tap(["activation/*", "cotangent/*", "grad/*", "updated/*"])]
    records = observed(True, taps).records
    for stage, (scope, param) in enumerate(zip(("first", "second", "third"), "abc", strict=True)):
        for name in (f"activation/{scope}", f"cotangent/{scope}", f"grad/{param}"):
            assert set(records[name].stages.tolist()) == {stage}, name


def test_taps_change_no_bit_of_the_result():
    everything = [tr.Tap("*", reduce="stats")]
    assert_bits_equal(observed(True, everything).state, observed(True, ()).state)


def test_the_catalogue_lists_what_can_be_observed():
    trainer = observed(True, ())
    names = [entry.name for entry in trainer.tensors()]
    for name in ("grad/a", "activation/second", "cotangent/first", "updated/c", "input/0", "loss"):
        assert name in names


def test_print_tensor_in_a_stage(capfd):
    def first(w, x, y):
        return tr.print_tensor(jnp.tanh(x @ w), "hidden"), y

    def second(w, h, y):
        return ((h @ w - y) ** 2).mean()

    data = elements(4, 3, batch=1)
    pipeline = tr.Pipeline([first, second], accumulation=4)
    trained(pipeline, optax.sgd(0.1), [normal(3, 2), normal(2)], data, 1)
    jax.effects_barrier()
    printed = capfd.readouterr().err
    assert printed.count("hidden_gradient:") == 4
    assert printed.count("hidden:") == 4


def test_outfeeds_inside_stages():
    outfeed, late = tr.OutfeedQueue(), tr.OutfeedQueue(mode="last")

    def first(w, x, y):
        h = jnp.tanh(x @ w)
        return outfeed.enqueue({"hidden": h, "number": tr.microbatch()})["hidden"], y

    def second(w, h, y):
        out = late.enqueue(h @ w)
        return ((out - y) ** 2).mean()

    w = normal(3, 2)
    data = elements(8, 3)
    for schedule in SCHEDULES:
        pipeline = tr.Pipeline([first, second], accumulation=4, schedule=schedule)
        trained(pipeline, optax.sgd(0.0), [w, normal(2)], data, 2)
        got = outfeed.dequeue()
        np.testing.assert_array_equal(got["number"], [0, 1, 2, 3] * 2)
        assert_close(got["hidden"], np.stack([np.tanh(x @ w) for x, _ in data]))
        assert late.dequeue().shape == (4,)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_bad_step_is_named_and_undone(schedule):
    data = elements(18, 3)
    good = pipeline_trainer(schedule)
    good.fit(data[:12], steps=2)
    data[13][0][1, 2] = np.nan  # row 1 of microbatch 1 of step 2
    trainer = pipeline_trainer(schedule, observe=[tr.stop_on_nonfinite("grad/*")])
    with pytest.raises(NonFiniteError, match="Not finite in step 2, microbatch 1: 'grad/") as found:
        trainer.fit(data, steps=3)
    assert (trainer.step, len(trainer.history), found.value.culprit.row) == (2, 2, 1)
    assert_bits_equal(trainer.params, good.params)


def pipeline_trainer(schedule, **options):
    pipeline = tr.Pipeline(loss_fn, accumulation=6, schedule=schedule)
    return tr.Trainer(pipeline, optax.sgd(0.05), PARAMS, steps_per_execution=3, **options)
