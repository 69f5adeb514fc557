"""`rewrites=` and `compiler_options=`: what reaches XLA, what is recorded, and what is used again."""

import json

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import NonFiniteError, OptionError
from tailrace.program.compiling.compiled_programs import forget_programs

NAME = "xla_cpu_parallel_codegen_split_count"
W = np.eye(3, dtype=np.float32)
X = list(np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32))


def loss_fn(w, x):
    return ((x @ w - 1.0) ** 2).mean()


def trainer_of(**options):
    return tr.Trainer(loss_fn, optax.sgd(0.1), W, steps_per_execution=2, **options)


@pytest.fixture
def passed_on(monkeypatch):
    """The options of each compilation since the last look."""
    forget_programs()
    found = []
    plain = jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **kwargs):
        found.append(dict(compiler_options or {}))
        return plain(self, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)

    def look():
        seen = found.copy()
        found.clear()
        forget_programs()
        return seen

    return look


def uses(passed_on, run, value="2"):
    """Whether all programs that `run` compiles are compiled with the option."""
    passed_on()
    run()
    found = passed_on()
    assert found
    assert {options.get(NAME) for options in found} <= {value, None}
    return all(options.get(NAME) == value for options in found)


def test_options_reach_the_compiler(passed_on):
    options = {"compiler_options": {NAME: 2}}
    trainer = trainer_of(**options)
    assert uses(passed_on, lambda: trainer.fit(X, steps=4))
    assert uses(passed_on, lambda: trainer.evaluate(X))
    assert uses(passed_on, lambda: [*trainer.predict(X, lambda w, x: x @ w)])
    assert uses(passed_on, lambda: tr.compile(lambda x: x @ x, **options)(W))
    assert not uses(passed_on, lambda: trainer_of().fit(X, steps=4))


def test_options_are_said_by_explain():
    explanation = trainer_of(compiler_options={NAME: 2}).explain(X[0], 2)
    assert explanation.compiler_options == {NAME: 2}
    assert f"compiled with {NAME}=2" in str(explanation)
    assert "compiled with" not in str(trainer_of().explain(X[0], 2))


WRONG = {
    "a name": (
        {"xla_cpu_fastest": True},
        r"options that this XLA has.*XLA says: .*xla_cpu_fastest",
    ),
    "a value": ({NAME: "many"}, r"options that this XLA has.*'many'"),
    "dashes": ({f"--{NAME}": 2}, r"by their names in XLA_FLAGS without the dashes"),
    "no dict": ("a", r"compiler_options= is a dict of XLA's options.*Received: 'a'"),
    "no plain value": ({NAME: [2]}, r"texts, numbers and flags as values.*Received"),
}


@pytest.mark.parametrize("what", WRONG)
def test_options_that_there_are_not_are_refused_at_once(what):
    options, text = WRONG[what]
    with pytest.raises(OptionError, match=text):
        tr.compile(lambda x: x, compiler_options=options)


NO_REWRITES = {
    "a name": ({"boundary": False}, r"has the names 'boundaries', 'convolutions'.*'boundary'"),
    "a value": ({"boundaries": "off"}, r"rewrites\['boundaries'\].*'off'"),
    "no dict": (["boundaries"], r"rewrites= is a dict from the name of a rewrite.*True or False"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_REWRITES)
def test_rewrites_that_there_are_not_are_refused(what):
    rewrites, text = NO_REWRITES[what]
    with pytest.raises(OptionError, match=text):
        trainer_of(rewrites=rewrites)


# -- options that are chosen ----------------------------------------------------------------------


@pytest.fixture
def suited(monkeypatch):
    """A table that has an option for every program."""
    monkeypatch.setattr(
        "tailrace.program.running.segments.suited_options", lambda *given: {NAME: 2}
    )


def chosen(**options):
    return trainer_of(**options).explain(X[0], 2).compiler_options


def test_what_suits_a_program_is_chosen_unless_the_user_has(suited, monkeypatch):
    assert chosen() == {NAME: 2}
    assert chosen(compiler_options={NAME: 3}) == {NAME: 3}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_nothing=1 --{NAME}=4")
    assert chosen() == {}


def test_a_resumed_fit_has_the_options_that_were_chosen_then(tmp_path, suited, monkeypatch):
    fit(tmp_path, 4)
    monkeypatch.setattr("tailrace.program.running.segments.suited_options", lambda *given: {})
    trainer = fit(tmp_path, 8)
    assert trainer.explain(X[0], 2).compiler_options == {NAME: 2}


# -- recorded, and used again ---------------------------------------------------------------------


def fit(folder, steps, fitted=None, **options):
    pytest.importorskip("orbax.checkpoint")
    trainer = trainer_of(**options)
    checkpoint = tr.Checkpoint(folder / "kept", every=2)
    trainer.fit(X, steps=steps, checkpoint=checkpoint, **(fitted or {}))
    return trainer


def recorded(trainer):
    """What the next checkpoint says."""
    return trainer.engine.built


OPTIONS = {"rewrites": {"boundaries": False}, "compiler_options": {NAME: 2}}


def test_a_resumed_fit_is_built_as_the_first_one(tmp_path):
    first = fit(tmp_path, 4, **OPTIONS)
    expected = {"rewrites": ["convolutions"], "options": {NAME: 2}}
    assert recorded(first) == expected
    again = fit(tmp_path, 8)
    assert recorded(again) == expected
    # And one that resumes that one.
    assert recorded(fit(tmp_path, 8)) == expected
    whole = trainer_of()
    whole.fit(X, steps=8)
    assert_bits_equal(again.params, whole.params)


def test_what_is_given_wins_over_what_is_recorded(tmp_path):
    fit(tmp_path, 4, **OPTIONS)
    options = {"rewrites": {"boundaries": True}, "compiler_options": {NAME: 3}}
    again = fit(tmp_path, 8, **options)
    both = ["boundaries", "convolutions"]
    assert recorded(again) == {"rewrites": both, "options": {NAME: 3}}


def test_the_evaluation_follows_a_fit_that_is_taken_up(tmp_path, passed_on):
    fit(tmp_path, 4, **OPTIONS)
    trainer = trainer_of()
    trainer.evaluate(X)
    trainer.fit(X, steps=8, checkpoint=tr.Checkpoint(tmp_path / "kept", every=2))
    assert uses(passed_on, lambda: trainer.evaluate(X))


def test_a_replay_is_built_as_the_fit_was(tmp_path, passed_on):
    fit(tmp_path, 4, fingerprint=True, **OPTIONS)
    other = trainer_of(fingerprint=True)
    passed_on()
    replay = other.replay(3, X, checkpoint=tmp_path / "kept")
    assert replay.proved is True, replay.differences
    assert "2" in {options.get(NAME) for options in passed_on()}


def test_a_bundle_is_replayed_as_the_step_was_built(tmp_path, passed_on):
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite(bundle=tmp_path / "bundle")
    trainer = trainer_of(observe=[guard], **OPTIONS)
    with pytest.raises(NonFiniteError):
        trainer.fit([X[0], X[1] * np.inf], steps=2)
    assert uses(passed_on, lambda: trainer_of().replay_bundle(tmp_path / "bundle", X[0]))


def test_a_run_says_how_its_program_was_built(tmp_path):
    trainer_of(run_dir=tmp_path / "run", **OPTIONS).fit(X, steps=4)
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    assert json.dumps({"options": {NAME: 2}, "rewrites": ["convolutions"]}) in json.dumps(
        note, sort_keys=True
    )
