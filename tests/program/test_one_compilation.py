"""One executable serves executions of every length; its results are those of the plain scan."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from plain_scan import ROWS, loss_fn, params, plain

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.taps.counted_loop import Looks, looks_between, run_counted
from tailrace.taps.frame import Emission, Emissions, Trip


@pytest.mark.parametrize("length", [10, "auto"])
def test_fits_of_every_length_share_one_executable(compilations, length):
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.05, momentum=0.9), params(), steps_per_execution=length
    )
    losses = [
        trainer.fit(iter(ROWS[a:b]), steps=b - a).loss for a, b in [(0, 1), (1, 65), (65, 96)]
    ]
    assert len(compilations) == 1
    w, expected, _ = plain(96)
    assert_bits_equal(np.concatenate(losses), expected)
    assert_bits_equal(trainer.params, w)


@pytest.mark.parametrize("period", [2, 7, 10])
def test_so_do_executions_that_periodic_taps_look_into(compilations, period):
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.05, momentum=0.9),
        params(),
        steps_per_execution=16,
        observe=[tr.Tap("grad/*", mode=tr.every(period), reduce="tensor"), tr.Tap("loss")],
    )
    seen = []
    for first, last in [(0, 5), (5, 61), (61, 96)]:
        trainer.fit(iter(ROWS[first:last]), steps=last - first)
        if "grad/a" in trainer.records:
            seen.append((trainer.records["grad/a"].steps, trainer.records["grad/a"].values))
    assert len(compilations) == 1
    w, _, grads = plain(96)
    assert_bits_equal(trainer.params, w)
    steps = np.concatenate([s for s, _ in seen])
    assert steps.tolist() == [s for s in range(96) if (s + 1) % period == 0]
    assert_bits_equal(np.concatenate([v for _, v in seen]), grads["a"][steps])


def test_epochs_of_unknown_length_and_validation_in_between(compilations):
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), params(), steps_per_execution=8)
    for _ in range(2):
        trainer.fit(lambda: iter(ROWS[:21]), epochs=1)
        trainer.evaluate(lambda: iter(ROWS[:13]))
        trainer.evaluate(lambda: iter(ROWS[:30]))
    assert len(compilations) == 2  # one to train, one to evaluate


def test_a_pipeline_too(compilations):
    def first(w, x):
        return jnp.tanh(x @ w)

    def second(w, h):
        return jnp.mean((h - w) ** 2)

    stages = [params()["a"], params()["b"]]
    trainer = tr.Trainer(
        tr.Pipeline([first, second], accumulation=4, device_mapping=[0, 1]),
        optax.sgd(0.05, momentum=0.9),
        stages,
        steps_per_execution=5,
        observe=[tr.Tap("grad/0", mode=tr.every(3), reduce="tensor")],
    )
    losses = [trainer.fit(iter(ROWS[a:b]), steps=(b - a) // 4).loss for a, b in [(0, 4), (4, 96)]]
    assert len(compilations) == 1
    whole = tr.Trainer(
        lambda w, x: second(w[1], first(w[0], x)),
        optax.sgd(0.05, momentum=0.9),
        stages,
        accumulation=4,
        steps_per_execution=24,
    )
    expected = whole.fit(iter(ROWS), steps=24).loss
    np.testing.assert_allclose(np.concatenate(losses), expected, rtol=1e-6)
    assert trainer.records["grad/0"].steps[::4].tolist() == [2, 5, 8, 11, 14, 17, 20, 23]


def test_programs_in_pieces_of_unequal_lengths(compilations):
    infeed, outfeed = tr.InfeedQueue(iter(ROWS)), tr.OutfeedQueue(live=True)

    def body(total, x):
        outfeed.enqueue(x.sum())
        return total + x.sum()

    program = tr.compile(lambda total: tr.repeat(96, body, total, infeed=infeed))
    total = program(jnp.float32(0))
    sums = outfeed.dequeue()
    assert len(sums) == 96
    assert_bits_equal(total, lax.scan(lambda c, x: (c + x, None), jnp.float32(0), sums)[0])
    assert len([one for one in compilations if "while" in one.as_text()]) == 1
    infeed.close()


def test_equal_functions_share_one_executable(compilations):
    trainer = tr.Trainer(loss_fn, optax.sgd(0.05), params())
    found = [
        trainer.evaluate(list(ROWS[:5]), lambda w, x: {"first": loss_fn(w, x)}),
        trainer.evaluate(list(ROWS[:9]), lambda w, x: {"first": loss_fn(w, x)}),
    ]
    assert len(compilations) == 1
    other = trainer.evaluate(list(ROWS[:9]), lambda w, x: {"second": loss_fn(w, x)})
    assert other == {"second": found[1]["first"]}
    assert trainer.evaluate(list(ROWS[:9]), lambda w, x: loss_fn(w, x) + 1)["loss"] > 1


def test_trainers_of_one_program_share_it_and_nothing_else(compilations):
    def run(seed):
        start = jax.tree.map(lambda v: v + np.float32(seed), params())
        trainer = tr.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), start, steps_per_execution=8)
        return trainer, trainer.fit(iter(ROWS[:20]), steps=20).loss

    (one, first), (two, second), (again, third) = run(0), run(1), run(0)
    assert len(compilations) == 1
    assert_bits_equal(first, third)
    assert_bits_equal(one.params, again.params)
    assert not np.array_equal(first, second)
    assert not np.array_equal(two.params["a"], one.params["a"])


def test_programs_are_kept_between_processes(tmp_path):
    script = (
        "import numpy as np, optax, tailrace as tr, jax, jax.numpy as jnp\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "t = tr.Trainer(lambda w, x: ((x * w) ** 2).sum(), optax.sgd(0.1), np.float32(1))\n"
        "t.fit([np.float32(1)] * 4, steps=4)\n"
    )
    settings = {"TAILRACE_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = [
        subprocess.run(
            [sys.executable, "-c", script], env={**kept, **settings}, check=True, timeout=600
        )
        and len(list(tmp_path.iterdir()))
        for _ in range(2)
    ]
    assert done[0] == done[1] > 0


@settings(max_examples=40, deadline=None)
@given(
    room=st.integers(1, 12),
    count=st.integers(0, 12),
    first=st.integers(0, 30),
    period=st.integers(1, 7),
    last=st.booleans(),
)
def test_counted_loops_make_the_rows_of_a_scan(room, count, first, period, last):
    count = min(count, room)
    xs = jnp.arange(room, dtype=jnp.int32)

    def one_pass(carry, x, observing):
        carry = carry * 3 + x
        emitted = Emissions(each=Emission(carry))
        if observing:
            emitted["look"] = Emission(carry)
        return carry, ([carry], emitted)

    def run(count, first):
        looks = Looks(period, last)
        return run_counted(one_pass, jnp.int32(1), xs, room, Trip(count, first), looks)

    carry, (ys,), each, looks = jax.jit(run)(count, first)
    expected, values = 1, []
    for x in range(count):
        expected = int(np.int32(expected * 3 + x))
        values.append(expected)
    assert int(carry) == expected
    assert ys[:count].tolist() == each["each"].value[:count].tolist() == values
    seen = [step - first for step in looks_between(first, count, period)]
    assert seen == [i for i in range(count) if (first + i + 1) % period == 0]
    rows = (looks or each)["look"].value
    assert rows[: len(seen)].tolist() == [values[i] for i in seen]


@pytest.mark.parametrize("room", [2, 5])
@pytest.mark.parametrize("counted", [True, False])
def test_only_the_last_pass_looks(room, counted):
    xs, traced = jnp.arange(room, dtype=jnp.int32), []

    def one_pass(carry, x, observing):
        traced.append(observing)
        total, looked = carry
        looked = looked + x + 1 if observing else looked
        return (total * 3 + x, looked), ([total], Emissions())

    def run(count):
        trip = Trip(count, jnp.int32(4)) if counted else None
        return run_counted(one_pass, (jnp.int32(1),) * 2, xs, room, trip, Looks(0, last=True))

    count = room - 1 if counted else room
    (total, looked), (before,), each, looks = jax.jit(run)(count)
    assert traced == [False, True]
    assert (int(looked), len(each), len(looks)) == (1 + count, 0, 0)
    expected = [1]
    for x in range(count):
        expected.append(int(np.int32(expected[-1] * 3 + x)))
    assert [*before[:count].tolist(), int(total)] == expected
