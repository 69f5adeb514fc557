"""`rewrites=` and `compiler_options=` of Keras models: in every program of theirs."""

import jax
import keras
import numpy as np
import pytest

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_bits_equal, assert_close
from tailrace.errors import OptionError
from tailrace.jaxprs.boundaries import keeps_barriers
from tailrace.program.compiling.compiled_programs import forget_programs

L = keras.layers
NAME = "xla_cpu_parallel_codegen_split_count"
X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
OFF = {"boundaries": False}

pytestmark = pytest.mark.cpu


def residual():
    """Five residual layers."""
    keras.utils.set_random_seed(0)
    first = x = keras.Input((32,))
    for _ in range(5):
        x = L.Add()([x, L.Dense(32, use_bias=False)(L.Activation("tanh")(x))])
    return keras.Model(first, x)


def compiled(model):
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=2)
    return model


def in_scope(**options):
    with tk.Strategy(**options).scope():
        return compiled(residual())


def adopted(**options):
    return compiled(tk.adopt(residual(), **options))


@pytest.fixture
def programs(monkeypatch):
    """The text and the options of what was compiled since the last look."""
    keeps_barriers()
    found = []
    plain = jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **kwargs):
        found.append((self.as_text(), dict(compiler_options or {})))
        return plain(self, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)

    def look(run):
        forget_programs()
        found.clear()
        result = run()
        text = "".join(text for text, _ in found)
        count = text.count("stablehlo.case") + text.count("stablehlo.optimization_barrier")
        return result, count, [options for _, options in found]

    return look


USES = {
    "fit": lambda model: model.fit(X, X, batch_size=32, epochs=1, verbose=0).history["loss"],
    "evaluate": lambda model: model.evaluate(X, X, batch_size=32, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=32, verbose=0),
}


@pytest.mark.parametrize("make", [in_scope, adopted])
@pytest.mark.parametrize("use", USES)
def test_in_every_program_of_a_model(make, use, programs):
    run = USES[use]
    on, more, _ = programs(lambda: run(make()))
    off, fewer, passed_on = programs(lambda: run(make(rewrites=OFF, compiler_options={NAME: 2})))
    assert_close(np.asarray(on, np.float32), np.asarray(off, np.float32))
    assert more > fewer
    assert passed_on
    assert all(options[NAME] == "2" for options in passed_on)


def test_functions_of_a_strategy(programs):
    strategy = tk.Strategy(compiler_options={NAME: 2})
    _, _, passed_on = programs(lambda: strategy.run(lambda x: x * 2, (X,)))
    assert any(options.get(NAME) == "2" for options in passed_on)


@pytest.mark.parametrize("make", [tk.Strategy, lambda **options: tk.adopt(residual(), **options)])
def test_what_there_is_not_is_refused(make):
    with pytest.raises(OptionError, match="rewrites= has the names 'boundaries'"):
        make(rewrites={"boundary": True})
    with pytest.raises(OptionError, match="options that this XLA has.*xla_nothing"):
        make(compiler_options={"xla_nothing": 1})


def test_a_resumed_fit_is_built_as_the_first_one(tmp_path, programs):
    pytest.importorskip("orbax.checkpoint")

    kept = tr.Checkpoint(tmp_path / "kept")
    first = {"rewrites": OFF, "compiler_options": {NAME: 2}}

    def fit(epochs, checkpoint=None, **options):
        model = adopted(**options)
        model.fit(
            X, X, batch_size=32, epochs=epochs, shuffle=False, verbose=0, checkpoint=checkpoint
        )
        return np.asarray(model.get_weights())

    fit(1, kept, **first)
    again, without, passed_on = programs(lambda: fit(2, kept))
    assert any(options.get(NAME) == "2" for options in passed_on)
    # The bits of the fit that was not stopped, whose sums XLA computes again.
    assert_bits_equal(again, fit(2, **first))
    _, with_them, _ = programs(lambda: fit(2))
    assert with_them > without
