"""The catalogue: names that are unique and stable, the user's lines, and how tensors are chosen."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_steps import elements, loss_fn, network

import tailrace as tr
from tailrace.errors import ProgramError, SelectionError
from tailrace.taps.catalogue import Catalogue, Entry, matches


def trainer_of(loss=loss_fn, params=None, **options):
    return tr.Trainer(loss, optax.sgd(0.1), network() if params is None else params, **options)


@pytest.fixture(scope="module")
def catalogue():
    return trainer_of(accumulation=2).tensors(elements(1)[0])


def test_every_kind_of_tensor_is_there(catalogue):
    assert {entry.kind for entry in catalogue} == {
        "input",
        "param",
        "activation",
        "cotangent",
        "loss",
        "aux",
        "grad",
        "accumulated",
        "reduced",
        "update",
        "updated",
    }
    for entry in catalogue:
        assert entry.name == "loss" or entry.name.startswith(f"{entry.kind}/")


def test_shapes_and_dtypes(catalogue):
    assert catalogue["grad/hidden/kernel"].shape == (3, 5)
    assert catalogue["activation/hidden"].shape == (4, 5)
    assert catalogue["loss"].shape == ()
    assert catalogue["activation/hidden"].dtype == jnp.float32
    assert catalogue["activation/hidden"].nbytes == 80
    assert catalogue["activation/hidden"].stage == -1


def test_names_are_unique_and_the_same_in_another_trace(catalogue):
    assert len(set(catalogue.names)) == len(catalogue) > 30
    assert trainer_of(accumulation=2).tensors(elements(1)[0]).names == catalogue.names


def test_names_are_the_same_in_another_process(catalogue):
    code = (
        "import optax, tailrace as tr; from plain_steps import *;"
        "t = tr.Trainer(loss_fn, optax.sgd(0.1), network(), accumulation=2);"
        "print('\\n'.join(t.tensors(elements(1)[0]).names))"
    )
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(paths), "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
    )
    assert found.stdout.splitlines() == catalogue.names


def test_everything_listed_can_be_tapped(catalogue):
    trainer = trainer_of(accumulation=2, observe=[tr.Tap("*", reduce="norm")])
    trainer.fit(elements(2), steps=1)
    assert sorted(trainer.records.names) == sorted(catalogue.names)


def test_the_source_is_the_line_of_the_user(catalogue):
    path, line = catalogue["activation/hidden"].source.rsplit(":", 1)
    assert path.endswith("plain_steps.py")
    assert "jnp.tanh" in Path(path).read_text().splitlines()[int(line) - 1]
    assert "/tailrace/tensors/" not in catalogue.to_text()


def test_a_folder_of_the_user_may_be_called_like_a_library(tmp_path, monkeypatch):
    folder = tmp_path / "tailrace" / "jax"
    folder.mkdir(parents=True)
    (folder / "model_of_a_user.py").write_text("def loss(w, x, y):\n    return (x * w).mean()\n")
    monkeypatch.syspath_prepend(str(folder))
    import model_of_a_user

    catalogue = trainer_of(model_of_a_user.loss, np.float32(1)).tensors(elements(1)[0])
    assert catalogue["activation/:mul"].source == f"{folder / 'model_of_a_user.py'}:2"


def test_after_a_fit_no_example_is_needed():
    trainer = trainer_of()
    with pytest.raises(ProgramError, match=r"trainer\.tensors\(example\), or call it after a fit"):
        trainer.tensors()
    before = trainer.tensors(elements(1)[0]).names
    trainer.fit(elements(2), steps=2)
    assert trainer.tensors().names == before
    assert trainer.step == 2


def test_a_catalogue_as_json(catalogue):
    rows = json.loads(catalogue.to_json())
    assert [row["name"] for row in rows] == catalogue.names
    row = next(row for row in rows if row["name"] == "grad/out/kernel")
    assert row == {
        "name": "grad/out/kernel",
        "kind": "grad",
        "shape": [5, 2],
        "dtype": "float32",
        "stage": -1,
        "source": "",
    }


def test_a_catalogue_as_a_table(catalogue):
    lines = catalogue.to_text().splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "source"]
    assert len(lines) == len(catalogue) + 1
    assert str(catalogue) == repr(catalogue)
    *shown, rest = str(catalogue).splitlines()
    assert shown == lines[: len(shown)]
    assert rest.startswith(
        f"… and {len(lines) - len(shown)} more; to_text() has all. Of each kind: "
    )
    assert "14 activation" in rest
    assert str(Catalogue(list(catalogue)[:5])) == Catalogue(list(catalogue)[:5]).to_text()
    assert catalogue._repr_html_().count("<tr>") == len(lines)
    staged = Catalogue([Entry("loss", "loss", (), np.dtype("f4"), stage=1)])
    assert str(staged).splitlines()[0].split() == ["name", "shape", "dtype", "stage", "source"]
    assert str(staged).splitlines()[1].split() == ["loss", "[]", "float32", "1"]


def test_it_is_a_sequence_with_names(catalogue):
    assert catalogue[0].name == catalogue.names[0]
    assert "loss" in catalogue
    assert "los" not in catalogue
    assert catalogue[0] in catalogue
    assert [entry.name for entry in catalogue[:2]] == catalogue.names[:2]
    with pytest.raises(SelectionError, match="'loss'"):
        catalogue["los"]


# -- selection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("loss", ["loss"]),
        ("grad/*", ["grad/hidden/bias", "grad/hidden/kernel", "grad/out/kernel"]),
        ("grad/*kernel", ["grad/hidden/kernel", "grad/out/kernel"]),
        ("grad/?ut/*", ["grad/out/kernel"]),
        (re.compile(r"^grad/.*bias$"), ["grad/hidden/bias"]),
        (re.compile("mae"), ["aux/mae"]),
        (["loss", "aux/*"], ["loss", "aux/mae"]),
        (("loss", re.compile("^aux/")), ["loss", "aux/mae"]),
        ({"loss"}, ["loss"]),
        (lambda e: e.kind == "grad" and len(e.shape) == 1, ["grad/hidden/bias"]),
        (lambda e: e.source.endswith(".py:0") or e.name == "loss", ["loss"]),
    ],
)
def test_what_a_selection_matches(catalogue, select, names):
    assert sorted(catalogue.select(select).names) == sorted(names)
    assert sorted(catalogue.filter(select).names) == sorted(names)


def test_a_glob_crosses_slashes_and_brackets_are_plain():
    entries = [
        Entry(name, name.split("/")[0], (), np.dtype("f4"))
        for name in ("activation/a[0]", "activation/a[1]", "activation/a/b", "activation/a[10]")
    ]
    catalogue = Catalogue(entries)
    assert catalogue.select("activation/a").names == [
        "activation/a[0]",
        "activation/a[1]",
        "activation/a[10]",
    ]
    assert catalogue.select("activation/a[1]").names == ["activation/a[1]"]
    assert catalogue.select("*a[1]*").names == ["activation/a[1]"]
    assert catalogue.select("activation/*").names == catalogue.names
    assert matches("activation/a[0]", entries[0])


@pytest.mark.parametrize(
    ("select", "text"),
    [
        ("grad/hiden/kernel", r"'grad/hiden/kernel'.*'grad/hidden/kernel'"),
        ("gradient/*", r"'gradient/\*'.*nearest names are: '"),
        (re.compile("^dense"), r"re\.compile\('\^dense'\)"),
        (["loss", "lss"], r"'lss'.*'loss'"),
        (lambda entry: False, r"the function '<lambda>'"),
    ],
)
def test_a_selection_of_nothing_lists_the_nearest_names(catalogue, select, text):
    with pytest.raises(SelectionError, match=f"(?s)must match at least one tensor.*{text}"):
        catalogue.select(select)
    if not isinstance(select, list):
        assert not len(catalogue.filter(select))


def test_what_is_no_selection(catalogue):
    with pytest.raises(SelectionError, match=r"A selection is a glob.*Received: 3"):
        catalogue.select(3)


def test_an_empty_catalogue():
    with pytest.raises(SelectionError, match="no tensors at all"):
        Catalogue([]).select("loss")


# -- names of single things ---------------------------------------------------------------------


def test_parameters_that_are_one_array():
    def loss(w, x, y):
        return (x.mean() * w - y.mean()) ** 2

    names = trainer_of(loss, np.float32(1)).tensors(elements(1)[0]).names
    assert {"param/params", "grad/params", "updated/params"} <= set(names)


def test_batches_that_are_dicts_and_params_that_are_lists():
    def loss(params, x, scale):
        return (x.mean() * params[0] * params[1][0] * scale).sum()

    trainer = trainer_of(loss, [np.float32(1), (np.ones(2, np.float32),)])
    names = trainer.tensors({"x": np.ones(3, np.float32), "scale": np.float32(2)}).names
    assert {"input/x", "input/scale", "grad/0", "grad/1/0"} <= set(names)


def test_library_functions_have_the_name_they_are_called_by():
    def loss(w, x, y):
        return jax.nn.softplus(jax.nn.relu(x * w)).mean() + jax.nn.silu(w)

    names = trainer_of(loss, np.float32(1)).tensors(elements(1)[0]).names
    assert {"activation/:relu", "activation/:softplus", "activation/:silu"} <= set(names)


def test_parameters_are_in_the_order_of_their_use():
    """Casts, jitted functions of a parameter alone, loops and branches on the way are no use."""

    def loss_fn(params, x):
        params = {name: jax.jit(lambda w: 2.0 * w.T)(w) for name, w in params.items()}
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ params["c"], lambda x: x, x)
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["a"]), None), x, length=2)
        return jnp.mean(x @ params["b"])

    params = {name: np.eye(3, dtype=np.float32) for name in "abc"}
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), params)
    tensors = trainer.tensors(np.ones((2, 3), np.float32))
    assert tensors.select("grad/*").use_order() == ["grad/c", "grad/a", "grad/b"]
    assert tensors.select("grad/*").names == ["grad/a", "grad/b", "grad/c"]
