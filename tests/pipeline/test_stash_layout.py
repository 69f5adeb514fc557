"""The stash: what forwards write is what backwards read, in few operations and in the planned bytes."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.pipeline.lowering import stash_layout
from tailrace.pipeline.lowering.stash_layout import StashLayout

WHOSE = (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    aval: Any


def values_like(number):
    """Values of one microbatch: small and large, of several dtypes, a key among them."""
    rng = np.random.default_rng(number)
    return [
        jnp.asarray(rng.normal(size=(3, 40)), jnp.float32),
        jnp.asarray(rng.normal(size=4), jnp.float32),
        jnp.asarray(rng.normal(size=(2, 2)), jnp.float32),
        jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(60, 2)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 2, 7), bool),
        jax.random.key(number),
        jnp.float16(number),
    ]


def numbers(values):
    return [jax.random.key_data(v) if v.dtype == jax.random.key(0).dtype else v for v in values]


@pytest.mark.parametrize("depth", [1, 3])
def test_what_was_put_is_taken(monkeypatch, depth):
    monkeypatch.setattr(stash_layout, "SMALL", 64)
    names = [Variable(jax.typeof(value)) for value in values_like(0)]
    layout = StashLayout([{WHOSE: names}], {WHOSE: depth})
    buffers = layout.zeros()
    for slot in range(depth):
        known = dict(zip(names, values_like(slot), strict=True))
        layout.put(0, buffers, WHOSE, known, jnp.int32(slot))
    for slot in range(depth):
        found = layout.take(0, buffers, WHOSE, jnp.int32(slot))
        assert_bits_equal(numbers(found[name] for name in names), numbers(values_like(slot)))
    # Two large ones, and a row for each dtype: floats of 32 and 16 bits, flags, keys.
    sixteen_bits = 1 if depth > 1 else 2  # in slots they are integers of 16 bits, in one row
    assert len(layout.rows[WHOSE]) == 2 + 3 + sixteen_bits


# -- a program on one device ----------------------------------------------------------------------

WIDTH, BATCH, STAGES, COUNT = 16, 512, 3, 6


def loss_fn(params, x):
    for number, p in enumerate(params):
        h = (tr.stage_boundary(x) if number else x).astype(jnp.bfloat16)
        h = h - h.mean(-1, keepdims=True)
        h = jax.nn.gelu(h @ p["up"].astype(jnp.bfloat16)) @ p["down"].astype(jnp.bfloat16)
        x = x + h.astype(jnp.float32)
    return (x**2).mean()


@pytest.fixture(scope="module")
def on_one_device():
    """The plain trainer and the pipelined one, with what is explained of each."""
    rng = np.random.default_rng(0)
    params = [
        {
            "up": rng.normal(0, 0.2, (WIDTH, 4 * WIDTH)).astype(np.float32),
            "down": rng.normal(0, 0.1, (4 * WIDTH, WIDTH)).astype(np.float32),
        }
        for _ in range(STAGES)
    ]
    pipeline = tr.Pipeline(loss_fn, accumulation=COUNT, device_mapping=[0] * STAGES)
    # A boundary copies a sum, which has the shape of a buffer here.
    options = {"steps_per_execution": 2, "rewrites": {"boundaries": False}}
    trainers = [
        tr.Trainer(loss_fn, optax.sgd(0.1), params, accumulation=COUNT, **options),
        tr.Trainer(pipeline, optax.sgd(0.1), params, **options),
    ]
    example = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return [(trainer, trainer.explain(example, steps=2)) for trainer in trainers]


def program_of(trainer):
    executables = trainer.engine.runner.executables.values()
    return next(e.compiled.as_text() for e in executables if e.compiled is not None)


def test_memory_is_the_planned_stash_and_what_one_microbatch_needs(on_one_device):
    (_, plain), (_, pipelined) = on_one_device
    stash = sum(stage.stash for stage in pipelined.pipeline.stages)
    # A stage keeps its input, a mean, and its first product: not its weights, not what a GELU makes.
    mine = BATCH * (4 * WIDTH + 2 * WIDTH + 2 * 4 * WIDTH + 2)
    held = sum(stage.slots for stage in pipelined.pipeline.stages)
    assert stash <= held * mine
    assert pipelined.parts["temporaries"] <= plain.parts["temporaries"] + 1.1 * stash


def test_nothing_is_exchanged_or_copied_on_one_device(on_one_device):
    trainer = on_one_device[1][0]
    text = program_of(trainer)
    assert "collective-permute" not in text
    buffers = trainer.engine.runner.assembly.stash_layout.buffers
    assert len(buffers) == 4  # two in slots; those of the last stage, which has one slot
    for form in buffers:
        kind = {"float32": "f32", "uint16": "u16", "bfloat16": "bf16"}[form.dtype.name]
        shape = ",".join(map(str, form.shape))
        assert f"{kind}[{shape}]" in text
        # At most when the execution starts, out of all loops.
        assert len(re.findall(rf"= {kind}\[{shape}\]\S* copy\(", text)) <= 1


def test_it_equals_the_plain_step_on_one_device(on_one_device):
    (plain, _), (pipelined, _) = on_one_device
    rng = np.random.default_rng(1)
    data = [rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for _ in range(4 * COUNT)]
    histories = [trainer.fit(data, steps=4) for trainer in (pipelined, plain)]
    found, expected = (history.loss.astype(jnp.bfloat16) for history in histories)
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=1e-2)
