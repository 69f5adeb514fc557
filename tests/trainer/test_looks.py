"""How things show themselves: a few lines at a prompt, tables in a notebook, and why one waits."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.trainer.verify import Difference, Verification

ROWS = np.random.default_rng(0).normal(size=(24, 4, 3)).astype(np.float32)


def first(w, x):
    return jnp.tanh(x @ w)


def last(w, h):
    return jnp.mean((h - w) ** 2)


def loss_fn(w, x):
    return last(w["b"], first(w["a"], x))


def params():
    return {"a": np.full((3, 2), 0.3, np.float32), "b": np.ones(2, np.float32)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looks") / "run"
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        params(),
        observe=["grad/*", tr.Tap("loss", reduce="tensor")],
        run_dir=folder,
    )
    trainer.fit(lambda: iter(ROWS), epochs=2, validation_data=lambda: iter(ROWS[:3]))
    return trainer, folder


def test_a_trainer_is_a_line_or_two(trained):
    fresh = tr.Trainer(loss_fn, optax.sgd(0.1), params(), accumulation=2)
    assert repr(fresh) == "Trainer(loss_fn, 8 parameters, 0 steps done, 2 microbatches)"
    trainer, _ = trained
    lines = repr(trainer).splitlines()
    assert lines[0] == "Trainer(loss_fn, 8 parameters, 48 steps done, 3 tensors recorded)"
    assert lines[1].startswith("  last fit: 48 steps, loss 0.")
    page = trainer._repr_html_()
    for word in ("<table>", "<svg", "float32[3, 2]", "val_loss"):
        assert word in page


def test_the_summary(trained):
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1, momentum=0.9), params())
    before = trainer.summary()
    assert before.parameters == 8
    assert before.memory == {"parameters": 32, "optimizer state": 32, "model state": 0}
    assert before.flops_per_step is None
    assert "trainer.summary(example)" in str(before)
    after = trainer.summary(ROWS[0])
    # [4, 3] by [3, 2] forward, and once backward: the input needs no gradient.
    assert after.flops_per_step == 2 * 2 * 4 * 3 * 2
    assert [part.name for part in after.parts] == ["a", "b"]
    assert "float32[3, 2]" in str(after)
    assert "trace(decay=0.9" in str(after)
    assert "<table>" in after._repr_html_()


def test_a_summary_of_many_parameters_is_by_scope():
    deep = {
        f"layer{n}": {"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)} for n in range(30)
    }
    trainer = tr.Trainer(lambda w, x: x.sum() * w["layer0"]["w"].sum(), optax.sgd(0.1), deep)
    parts = trainer.summary().parts
    assert len(parts) == 30
    assert (parts[0].name, parts[0].count, parts[0].form) == ("layer0", 3, "2 parameters")


def test_records_and_catalogues_are_cut_short(trained):
    trainer, _ = trained
    assert repr(trainer.records).splitlines()[0] == "Records(3 tensors)"
    page = trainer.records._repr_html_()
    assert page.count("<svg") == 3
    assert "<svg" in trainer.records["grad/a"]._repr_html_()
    many = {f"w{n:02}": np.ones(1, np.float32) for n in range(25)}
    wide = tr.Trainer(lambda w, x: sum(v.sum() for v in w.values()) * x.sum(), optax.sgd(0.1), many)
    catalogue = wide.tensors(ROWS[0])
    lines = str(catalogue).splitlines()
    assert len(lines) == 32
    assert "to_text() has all" in lines[-1]
    assert "25 param" in lines[-1]
    assert len(catalogue.to_text().splitlines()) == len(catalogue) + 1
    assert "<details>" in catalogue._repr_html_()


def test_a_pipeline_shows_its_stages():
    pipeline = tr.Pipeline([first, last], accumulation=4, device_mapping=[0, 1])
    assert repr(pipeline) == "Pipeline(first | last; 4 microbatches, grouped, bubble 20.0 %)"
    assert "<svg" in pipeline._repr_html_()
    assert "cut at its boundaries" in repr(tr.Pipeline(loss_fn))


def test_verify_prints_what_differs():
    equal = [Difference(f"grad/{n}", 0.0, 0.0) for n in range(77)]
    assert repr(Verification(equal)) == "all 77 tensors are equal to the last bit"
    found = repr(Verification([*equal, Difference("loss", 1e-6, 2e-7)])).splitlines()
    assert len(found) == 3
    assert found[1].split() == ["loss", "1e-06", "2e-07"]
    assert found[2] == "1 of 78 tensors differ, by at most 2e-07"
    assert "loss" in Verification([Difference("loss", 1.0, 1.0)])._repr_html_()
    bad = Verification([Difference(f"g{n}", 1.0, 1.0) for n in range(50)])
    assert len(repr(bad).splitlines()) == 22
    assert "NaN" not in repr(bad)


def test_a_nan_differs():
    found = Verification([Difference("loss", float("nan"), float("nan"))])
    assert "1 of 1 tensors differ" in repr(found)


def test_compilations_say_why(trained, capsys):
    trainer, folder = trained
    purposes = [one.purpose for one in trainer.compilations]
    assert purposes == ["training", "evaluation of the loss"]
    assert trainer.compilations[0].cause == "the first program for elements of float32[4, 3]"
    rows = tr.open_run(folder).compilations
    assert [row["purpose"] for row in rows] == purposes
    assert all(row["seconds"] > 0 for row in rows)
    from tailrace.cli import main

    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "compilations" in shown
    assert "the first program for elements of float32[4, 3]" in " ".join(shown.split())


def test_other_shapes_lengths_and_equal_programs(monkeypatch):
    said = []
    from tailrace.trainer.fitting.progress_bar import ProgressBar

    monkeypatch.setattr(ProgressBar, "compiling", lambda self, text: said.append(text))
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params(), steps_per_execution=2)
    trainer.fit(iter(ROWS), steps=2)
    trainer.fit(iter(ROWS[:, :2]), steps=2)
    causes = [f"{one.purpose}: {one.cause}" for one in trainer.compilations]
    assert causes == [
        "training: the first program for elements of float32[4, 3]",
        "training, another form of elements: the first program for elements of float32[2, 3]",
    ]
    assert said == [causes[0], "", causes[1], ""]
    again = tr.Trainer(loss_fn, optax.sgd(0.3), params(), steps_per_execution=2)
    again.fit(iter(ROWS), steps=2)
    assert [one.shared for one in again.compilations] == [True]
    explained = str(again.explain(ROWS[0]))
    assert "compiled in" in explained
    assert "elements of float32[4, 3]" in explained
