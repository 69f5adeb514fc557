"""Every public name of the originals works, is noted, or is refused by a sentence of its own."""

import importlib
import importlib.util
import inspect
import pathlib
import re
from types import SimpleNamespace

import pytest

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.originals.lookup import look_up
from tailrace.compat.originals.missing import RefusedImport, RefusedName, UnknownImport, UnknownName
from tailrace.compat.originals.names import VERDICTS, all_names

pytest.importorskip("keras")

ROOT = pathlib.Path(__file__).parents[2]
TORCH = importlib.util.find_spec("torch") is not None
NAMES = {full: e for full, e in all_names().items() if TORCH or not full.startswith("poptorch")}


def is_module(holder):
    """Whether a holder of names is a module that is here, and not a class or refused."""
    try:
        importlib.import_module(f"tailrace.compat.{holder}")
    except ImportError:
        return False
    return True


MODULES = [holder for holder in {e.holder: None for e in NAMES.values()} if is_module(holder)]


def found_or_refused(entry):
    """What a name leads to, or the refusal."""
    try:
        return look_up(entry)
    except (RefusedName, RefusedImport) as refused:
        return refused


@pytest.mark.parametrize("full", NAMES)
def test_every_name_leads_to_something_or_to_a_sentence(full):
    entry = NAMES[full]
    assert entry.verdict in VERDICTS
    assert bool(entry.sentence) == (entry.verdict != "works")
    found = found_or_refused(entry)
    if isinstance(found, RefusedName | RefusedImport):
        assert entry.verdict == "refused"
        assert entry.sentence in str(found)
    elif entry.verdict == "refused":  # it is here, and refuses to be called
        with pytest.raises(tr.TailraceError):
            call(found)


def call(function):
    """Call it with something for each argument it must have."""
    stub = SimpleNamespace(_given=SimpleNamespace(log_cycle_count=True))
    needed = [
        stub
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return function(*needed)


@pytest.mark.parametrize("holder", MODULES)
def test_an_unknown_name_of_a_module_names_the_nearest(holder):
    module = importlib.import_module(f"tailrace.compat.{holder}")
    known = next(n for n, e in NAMES.items() if e.holder == holder).rpartition(".")[2]
    with pytest.raises(UnknownName, match=re.escape(f"has no attribute '{known}s'")) as caught:
        getattr(module, f"{known}s")
    assert re.search(f"Did you mean .*{known}", str(caught.value))
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, tr.TailraceError)
    assert not hasattr(module, "nothing_like_it")
    assert getattr(module, "nothing_like_it", 5) == 5


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("from tailrace.compat.ipu import horovod", "tr.distributed.initialize"),
        ("import tailrace.compat.ipu.horovod", "tr.distributed.initialize"),
        ("from tailrace.compat.ipu.ipu_estimator import IPUEstimator", "removed estimators"),
        ("from tailrace.compat.ipu.ops.rnn_ops import PopnnLSTM", "keras.layers.LSTM"),
        ("import tailrace.compat.ipu.keras.extensions as x", "have them"),
        ("from tailrace.compat.ipu.utils import create_ipu_config", "IPUConfig"),
        ("from tailrace.compat.poptorch import autocast", "module.half"),
        ("import tailrace.compat.poptorch.eager", "inferenceModel"),
    ],
)
def test_imports_show_the_sentence(statement, sentence):
    if "poptorch" in statement:
        pytest.importorskip("torch")
    with pytest.raises(RefusedImport, match=sentence) as caught:
        exec(statement, {})
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("statement", "near"),
    [
        ("from tailrace.compat.ipu.loops import repeats", "repeat"),
        ("from tailrace.compat.ipu.utils import reset_seed", "reset_ipu_seed"),
        ("from tailrace.compat.poptorch import training_model", "trainingModel"),
    ],
)
def test_imports_name_the_nearest(statement, near):
    if "poptorch" in statement:
        pytest.importorskip("torch")
    with pytest.raises(UnknownImport, match=f"Did you mean {near}"):
        exec(statement, {})


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tailrace.compat.ipu.nothing_like_it")


def test_names_at_the_top_are_those_of_the_modules():
    assert ipu.internal_ops is ipu.ops.internal_ops
    assert ipu.cross_replica_optimizer is ipu.optimizers.cross_replica_optimizer
    assert ipu.outlined_function is ipu.ops.functional_ops.outlined_function
    assert "internal_ops" in dir(ipu)


def test_the_page_is_what_the_script_writes():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("names", ROOT / "scripts" / "originals_names.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run python scripts/originals_names.py"
