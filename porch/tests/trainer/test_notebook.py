"""In a notebook a fit shows itself in one output, which is redrawn while it runs."""

import sys
import types

import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.trainer.fitting import notebook_view


class Handle:
    def __init__(self):
        self.drawn = []

    def update(self, shown):
        self.drawn.append(shown._repr_html_())


@pytest.fixture
def notebook(monkeypatch):
    """An IPython with a kernel, as far as it is used."""
    handle = Handle()

    def display(shown, display_id):
        assert display_id is True
        handle.drawn.append(shown._repr_html_())
        return handle

    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    shown = types.ModuleType("IPython.display")
    shown.display = display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(notebook_view, "EVERY_S", 0.0)
    return handle


def fit(**options):
    x = np.linspace(0, 1, 64, dtype=np.float32)
    trainer = tr.Trainer(
        lambda w, x: ((x * w - 3 * x) ** 2).mean(),
        optax.sgd(0.5),
        np.float32(0),
        steps_per_execution=5,
    )
    return trainer.fit(tr.batches(x, 16, repeat=True), steps=20, **options)


def test_it_is_redrawn_with_every_execution(notebook):
    history = fit()
    assert len(notebook.drawn) == 1 + 4 + 1
    assert notebook.drawn[0].startswith('<div><progress value="0.0000"')
    assert "5 of 20 steps" in notebook.drawn[1]
    assert "20 of 20 steps" in notebook.drawn[-1]
    assert f"loss {history.loss[-1]:.4g}" in notebook.drawn[-1]
    assert "<svg" in notebook.drawn[-1]


def test_progress_false_shows_nothing(notebook):
    fit(progress=False)
    assert notebook.drawn == []


def test_a_terminal_s_ipython_is_no_notebook(notebook):
    sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace()
    fit()
    assert notebook.drawn == []
