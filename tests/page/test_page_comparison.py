"""`tailrace compare A B`: largest difference first."""

import dataclasses

import pytest

import tailrace as tr
from tailrace.cli import main
from tailrace.page.comparison import compare
from tailrace.profiling.profile.profile import Profile, Row


def profile(**seconds):
    rows = [
        Row(name.split("_")[0], name.partition("_")[2], value, 1.0, 1.0, 0.5, 1, {})
        for name, value in seconds.items()
    ]
    return Profile(
        tuple(rows), 10, 1, sum(seconds.values()), 1.0, "cpu", 1.0, 1.0, {"parameters": 8}
    )


@pytest.fixture
def files(tmp_path):
    first = profile(forward_a=1.0, backward_a=2.0, optimizer=0.5)
    second = profile(forward_a=1.1, backward_a=4.0, taps=0.1)
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    first.save(paths[0])
    second.save(paths[1])
    return paths


def test_profiles_by_difference(files, capsys):
    found = compare(*files)
    lines = found.tables["time a step"]
    assert [line.what for line in lines] == [
        "the whole step",
        "backward a",
        "optimizer",
        "forward a",
        "taps",
    ]
    assert (lines[1].first, lines[1].second, lines[1].difference) == ("200 ms", "400 ms", "+100.0%")
    assert (lines[2].second, lines[2].difference) == ("-", "only here")
    assert lines[4].difference == "new"
    assert main(["compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["time", "a", "step", "first.json", "second.json", "difference"]
    assert printed[2].startswith("backward a")


def test_runs_by_difference(made_runs):
    slow, quick = made_runs
    found = compare(slow, quick)
    numbers = {line.what: line for line in found.tables["numbers"]}
    assert {"steps", "loss"} <= numbers.keys()
    sizes = [line.size for line in found.tables["numbers"]]
    assert sizes == sorted(sizes, reverse=True)
    assert any(line.what == "options: seed" for line in found.tables["what ran"])
    assert not any("directory" in line.what for line in found.tables["what ran"])


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory):
    import numpy as np
    import optax

    folder = tmp_path_factory.mktemp("compared")
    x = np.ones((8, 4), np.float32)
    for name, seed in (("one", 0), ("two", 1)):
        trainer = tr.Trainer(
            lambda w, x: ((x @ w) ** 2).mean(),
            optax.sgd(0.1),
            np.full((4, 1), 0.1 + seed, np.float32),
            run_dir=folder / name,
            seed=seed,
            steps_per_execution=4,
        )
        trainer.fit(tr.batches(x, 4, repeat=True), steps=8 + 4 * seed, progress=False)
    return folder / "one", folder / "two"


def test_a_name_of_a_scope_is_text(tmp_path):
    strange = profile(forward_a=1.0)
    strange = dataclasses.replace(
        strange, rows=(dataclasses.replace(strange.rows[0], scope="a\x1b[2J"),)
    )
    for name in ("a", "b"):
        strange.save(tmp_path / name)
    assert "\x1b" not in str(compare(tmp_path / "a", tmp_path / "b"))


def test_a_path_without_a_run(tmp_path, capsys):
    (tmp_path / "x").write_text("{}")
    assert main(["compare", str(tmp_path / "x"), str(tmp_path / "x")]) == 2
    assert "A profile is what trainer.profile" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "nowhere"), str(tmp_path)]) == 2
