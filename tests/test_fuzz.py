"""A short run of `python -m benchmarks.fuzz`: every answer to bad input is a sentence of ours."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("tailrace_fuzz", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sentences(found):
    return {key: kept[1] for key, kept in found.failures.items()}


def test_constructors_answer_with_sentences(fuzz, tmp_path):
    found = fuzz.Found()
    for name in fuzz.GOOD:
        fuzz.fuzz_one(name, 25, 0, tmp_path, found)
    assert not sentences(found)
    assert min(found.refused[name] for name in fuzz.GOOD) > 2  # it is bad input, and it is refused


NEEDED = {"saves": "torch", "options": "torch", "bundles": "safetensors"}


# Checkpoints are in the benchmark only: there their list of files is left out too, and threads of Orbax
# then report errors to a loop that is closed. With the list: trainer/test_damaged_checkpoints.py.
@pytest.mark.parametrize("name", ["runs", "bundles", "plans", "saves", "options"])
def test_load_paths_answer_with_sentences(fuzz, tmp_path, name):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    found = fuzz.Found()
    fuzz.fuzz_one(name, 60, 0, tmp_path, found)
    assert not sentences(found)
    assert 20 < found.refused[name] <= 60


def test_the_fuzzer_can_fail(fuzz, tmp_path, monkeypatch):
    monkeypatch.setitem(fuzz.GOOD, "careless", (lambda n: n + 1, {"n": 1}))
    found = fuzz.Found()
    fuzz.fuzz_one("careless", 30, 0, tmp_path, found)
    assert any(kind == "TypeError" for _, kind, _ in found.failures)
