"""What is relied on of JAX beyond its documented interface: known in every version that is tried."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.base.seams import Package
from tailrace.cli import doctor
from tailrace.errors import VersionError
from tailrace.jaxprs import internals, jax_seams
from tailrace.jaxprs.marks import mark_p
from work import calls_of


@pytest.fixture
def unprobed(monkeypatch):
    """As at the start of a process, with every module loaded: none may keep what a test replaces."""
    assert tr.Trainer
    jax_seams.check.cache_clear()
    monkeypatch.setattr(internals, "PACKAGE", Package("JAX", "jax", "0.14.0", newest="0.12.0.1"))
    yield
    jax_seams.sample.cache_clear()


@pytest.mark.parametrize("seam", jax_seams.SEAMS, ids=lambda seam: seam.name)
def test_every_seam_is_as_known(seam):
    assert seam.probe()


def test_the_probes_are_quick(unprobed):
    jax_seams.check()  # the first time JAX fills its own caches
    jax_seams.check.cache_clear()
    assert calls_of(jax_seams.check) < 40_000  # of some hundred nanoseconds each


def lacks(*_, **__):
    raise AttributeError("gone")


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "text"),
    [
        (internals, "scan_sizes", lacks, "scan's parameters have changed"),
        (internals, "contents", lambda _: None, "checkpoint's parameters have changed"),
        (internals, "is_replay", lambda _: False, "the form of recomputations has changed"),
        (internals, "scopes_of", lambda _: [], "the form of name stacks has changed"),
        (internals, "function_name", lacks, "the form of custom derivatives has changed"),
        (internals, "bind_again", lacks, "the way to emit an equation again has changed"),
        (internals, "key_generator", lacks, "the type of random keys has changed"),
        (jax, "vmap", lacks, "the use of batching rules has changed"),
        (internals, "trace_level", lambda: 0, "the level of tracing has changed"),
    ],
)
def test_a_change_of_jax_is_one_sentence(unprobed, monkeypatch, owner, name, replacement, text):
    monkeypatch.setattr(owner, name, replacement)
    expected = f"does not know JAX 0.14.0: {text}; use jax<0.14 or a newer Tailrace."
    with pytest.raises(VersionError, match=expected):
        tr.compile(lambda x: x + 1.0)(jnp.ones(()))
    assert isinstance(VersionError(), tr.TailraceError)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (internals.pe.dce_rules, "the use of dead-code rules has changed"),
        (internals.ad.primitive_transposes, "the use of differentiation rules has changed"),
    ],
)
def test_rules_that_jax_no_longer_asks(unprobed, monkeypatch, rules, text):
    monkeypatch.delitem(rules, mark_p)
    with pytest.raises(VersionError, match=text):
        tr.compile(lambda x: x + 1.0)(jnp.ones(()))


def test_the_advice_names_a_version_that_works():
    text = functools.partial(Package, "JAX", "jax", newest="0.12.0.1")
    assert "use jax<1.0 or" in str(text(version="1.0.0").unknown("it"))
    assert "use jax==0.12.0.1 or" in str(text(version="0.9.1").unknown("it"))


def test_the_doctor_prints_the_seams(monkeypatch):
    shown = str(doctor.diagnose())
    assert "ok       scan's parameters (loops)" in shown
    assert "CHANGED" not in shown
    monkeypatch.setattr(internals, "scan_sizes", lacks)
    shown = str(doctor.diagnose())
    assert "CHANGED  scan's parameters (loops)" in shown
    assert "scan's parameters have changed; use" in shown


def test_scan3_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_scan3=True))
    with pytest.raises(
        VersionError, match="does not run under JAX_SCAN3: .* Leave JAX_SCAN3 unset"
    ):
        internals.refuse_scan3()


# -- JAX's upgrade flags ------------------------------------------------------------------------

FLAGS = [
    flag
    for flag in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    if hasattr(jax.config, flag)
]
W = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32) * 0.5
X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, back: (back * jnp.cos(x),))


def layer(w, x):
    with jax.named_scope("dense"):
        x = x @ w
    with jax.named_scope("act"):
        return ruled(jax.nn.relu(x) + jax.nn.silu(x))


def loss_fn(params, x):
    with jax.named_scope("first"):
        x = jax.checkpoint(layer)(params[0], x)
    with jax.named_scope("stack"):
        once = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
        x, _ = jax.lax.scan(lambda c, w: (once(w, c), None), x, params[1:])
    return (x**2).mean()


def observed():
    trainer = tr.Trainer(
        loss_fn, optax.sgd(0.1), jnp.asarray(W), observe=[tr.Tap("*", reduce="tensor")]
    )
    trainer.fit([(X,)] * 3, steps=3)
    return trainer


@pytest.mark.parametrize("flags", [*([flag] for flag in FLAGS), FLAGS], ids="+".join)
def test_upgrade_flags_change_no_name_and_no_value(flags):
    if not FLAGS:
        pytest.skip("this JAX has no upgrade flags")
    expected = observed()
    try:
        for flag in flags:
            jax.config.update(flag, True)
        found = observed()
    finally:
        for flag in flags:
            jax.config.update(flag, False)
    names = found.tensors().names
    assert names == expected.tensors().names
    assert {"activation/first/dense", "cotangent/first/act", "activation/stack/act"} <= set(names)
    assert_close(found.params, expected.params)
    for name in expected.records:
        assert_close(found.records[name].values, expected.records[name].values)
