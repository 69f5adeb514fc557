"""The commands: what they print, what they write, and one sentence where they cannot."""

import ast
import json
import sys
from pathlib import Path

import pytest
from small_runs import make_trainer, train

import tailrace
from tailrace.cli import doctor
from tailrace.cli.command_line import main
from tailrace.cli.parsers import joined

MODULE = """
import numpy as np, optax, tailrace as tr
def loss(w, x): return ((w - x) ** 2).mean()
trainer = tr.Trainer(loss, optax.sgd(0.1), np.float32(0))
def make(): return trainer, np.zeros(3, np.float32)
data = tr.batches(np.zeros(6, np.float32), 3)
def with_data(): return trainer, data
def with_elements(): return trainer, [np.zeros(3, np.float32)] * 2
def broken(): raise OSError("gone")
number = 5
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    (tmp_path / "my_trainers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_trainers", raising=False)


def test_pictures(finished, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    select = ["--select", "grad/*"]
    assert main(["histogram", str(finished), *select, "-o", "a.png", "-o", "a.svg"]) == 0
    out = capsys.readouterr().out
    assert "140 values of 2 tensors" in out
    assert "float8_e5m2: " in out
    assert out.endswith("Saved a.png\nSaved a.svg\n")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert main(["histogram", str(finished), "--steps", "10:20"]) == 0
    assert main(["heatmap", str(finished), "--field", "max"]) == 0
    assert "2 tensors, 20 columns: max\nSaved heatmap.png\nSaved heatmap.svg" in (
        capsys.readouterr().out
    )
    for name in ("histogram", "heatmap"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()


def test_values_that_begin_with_a_minus(finished, capsys):
    pytest.importorskip("matplotlib")
    run = ["heatmap", str(finished), "-o", "a.svg"]
    assert main([*run, "--steps", "-3:", "--scale", "-1:1"]) == 0
    assert ", 3 columns: " in capsys.readouterr().out
    assert main([*run, "--steps", "-3:-2", "--scale", "-.5:-1e-3"]) == 0
    assert ", 1 columns: " in capsys.readouterr().out
    assert main([*run, "--steps", "-3"]) == 2
    assert "--steps is FIRST:STOP" in capsys.readouterr().err


def test_the_arguments_of_a_launched_script_stay_as_they_are():
    given = ["launch", "-n", "1", "train.py", "--steps", "-1:"]
    assert joined(given) == given
    assert joined(["heatmap", *given[3:]]) == ["heatmap", "train.py", "--steps=-1:"]


def test_tensorboard(finished, tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    assert main(["tensorboard", str(finished), "log", "--every", "10"]) == 0
    assert "Wrote 32 values to log" in capsys.readouterr().out
    assert list((tmp_path / "log").iterdir())


def test_diff(finished, tmp_path, capsys):
    train(make_trainer(tmp_path / "other", rate=0.02))
    assert main(["diff", str(finished), str(finished)]) == 0
    assert main(["diff", str(finished), "other"]) == 1
    assert "They first differ in step 1" in capsys.readouterr().out


def test_tensors(capsys):
    assert main(["tensors", "my_trainers:make", "--select", "grad/*"]) == 0
    assert capsys.readouterr().out.split()[4:7] == ["grad/params", "[]", "float32"]
    assert main(["tensors", "my_trainers:make", "--json"]) == 0
    assert "loss" in {row["name"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("name", ["with_data", "with_elements"])
def test_tensors_of_trainer_and_dataset(name, capsys):
    """The function that replay and audit take."""
    assert main(["tensors", f"my_trainers:{name}", "--select", "input/*"]) == 0
    assert capsys.readouterr().out.split()[4:7] == ["input/0", "[3]", "float32"]
    assert main(["tensors", f"my_trainers:{name}", "--select", "nothing"]) == 2
    assert "All names: tailrace tensors without --select." in capsys.readouterr().err


def test_plan(tmp_path, capsys):
    sizes = ["--stages", "4", "--microbatches", "16"]
    assert main(["plan", *sizes, "--schedule", "grouped", "--svg", "plan.svg"]) == 0
    assert "bubble 15.8 %" in capsys.readouterr().out
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert main(["plan", *sizes, "--inference"]) == 0
    assert "inference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device-mapping", "0+1,2"], "Received: 2 in '0+1,2', and --stages 3. Make them equal"),
        (["--device-mapping", "0,1"], "Received: 2 in '0,1', and --stages 3. Make them equal"),
        (["--forward", "1,a,1"], "--forward has a number for each stage"),
        (["--forward", "1,1"], "received 2 times for 3 stages"),
        (["--forward", "1,1,1", "--backward", "1,1"], "received 2 times for 3 stages"),
        (["--forward", "-1,1,1"], "`forward`"),
        (["--backward", "1,1,1"], "--backward goes with --forward"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_is_printed(options, text, capsys):
    assert main(["plan", "--stages", "3", "--microbatches", "6", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, text in err) == ("", True), err


@pytest.mark.cpu
def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("tailrace", "jax", "memory: device", "zarr", "what will not work"):
        assert word in out
    found = doctor.diagnose()
    assert len(found.devices) == 8
    wrong = dict(found.versions, jax="0.10.2", jaxlib="0.10.1")
    texts = doctor.version_problems(wrong)
    assert "computes wrong results on CPUs" in texts[0]
    assert "make them equal" in texts[1]


def test_doctor_without_devices(monkeypatch):
    def fails():
        raise RuntimeError("no\nbackend")

    monkeypatch.setattr(doctor, "available", fails)
    assert doctor.diagnose().problems[0] == "JAX finds no devices: no backend"


def test_doctor_sees_another_backend(monkeypatch):
    pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    text = "the front end for Keras: KERAS_BACKEND is 'tensorflow'. Set it to 'jax'."
    assert text in doctor.diagnose().problems


def test_doctor_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = str(doctor.diagnose())
    assert "zarr not installed: pip install 'tailrace[records]'" in found
    assert "tailrace histogram and heatmap: matplotlib is not installed." in found
    assert "the front end for PyTorch, which runs through it: torchax is not installed." in found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["histogram", "nowhere"], "There is no run directory at 'nowhere'"),
        (["heatmap", "nowhere"], "There is no run directory at"),
        (["tensorboard", "nowhere", "log"], "There is no run directory at"),
        (["diff", "nowhere", "there"], "There is no run directory at"),
        (["plan", "--stages", "4", "--microbatches", "3"], "must be a multiple of 8, but it is 3"),
        (
            ["plan", "--stages", "4", "--microbatches", "8", "--schedule", "x"],
            "--schedule is one of 'grouped', 'interleaved', 'sequential'. Received: 'x'",
        ),
        (
            ["plan", "--stages", "4", "--microbatches", "8", "--svg", "no/x.svg"],
            "'no/x.svg' cannot be written: No such file or directory. Make the folder first",
        ),
        (["tensors", "my_trainers"], "A trainer is named as MODULE:ATTRIBUTE"),
        (["tensors", "my_trainers:none"], "names no trainer: 'my_trainers' was imported"),
        (["tensors", "my_trainers:number"], "must be a tr.Trainer, or a function that returns"),
        (["tensors", "my_trainers:broken"], "was called and raised OSError: gone"),
        (["tensors", "my_trainers:trainer"], "trainer.tensors(example), or call it after a fit"),
        (["tensors", "my_trainers:make", "--select", "x"], "must match at least one tensor"),
    ],
)
def test_errors_are_one_line_and_code_2(arguments, text, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith(f"tailrace {arguments[0]}: ")
    assert len(err.splitlines()) == 1


def test_steps_that_are_no_range(finished, capsys):
    assert main(["histogram", str(finished), "--steps", "5"]) == 2
    assert "--steps is FIRST:STOP, such as 0:100, 500: or -1:. Received: '5'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "name", ["tensors", "plan", "doctor", "histogram", "heatmap", "tensorboard", "diff"]
)
def test_one_help_each(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: tailrace {name}" in capsys.readouterr().out


def test_several_selections_steps_and_a_scale(finished, capsys):
    pytest.importorskip("matplotlib")
    both = ["--select", "grad/first", "--select", "grad/second"]
    assert main(["histogram", str(finished), *both, "--together", "-o", "a.svg"]) == 0
    assert "140 values of 2 tensors" in capsys.readouterr().out
    options = [*both, "--steps", "5:15", "--scale", "1e-6:1", "--field", "max", "-o", "b.svg"]
    assert main(["heatmap", str(finished), *options]) == 0
    assert "2 tensors, 10 columns: max" in capsys.readouterr().out
    assert main(["heatmap", str(finished), "--scale", "1:0"]) == 2
    assert "--scale is LOW:HIGH" in capsys.readouterr().err
    assert main(["tensors", "my_trainers:make", "--select", "loss", "--select", "grad/*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_plan_with_devices_and_times(capsys):
    base = ["plan", "--stages", "3", "--microbatches", "4", "--schedule", "sequential"]
    mapping = ["--device-mapping", "0,1,0"]
    assert main([*base, *mapping, "--forward", "1,1,2", "--backward", "2,2,4"]) == 0
    out = capsys.readouterr().out
    assert "dev0" in out
    assert "dev2" not in out
    assert "bubble" in out.splitlines()[-1] or "bubble" in out
    assert (
        main(["plan", "--stages", "3", "--microbatches", "6", "--device-mapping", "0,1+2,3"]) == 0
    )
    assert "dev3" in capsys.readouterr().out
    assert main([*base, "--backward", "1,1,1"]) == 2
    assert "--backward goes with --forward" in capsys.readouterr().err
    assert main([*base, "--device-mapping", "0,x,1"]) == 2
    assert "--device-mapping has a number for each stage" in capsys.readouterr().err


def test_the_doctor_lists_the_seams_of_module_libraries():
    found = doctor.diagnose()
    assert "JAX" in found.seams
    for name, title in (("flax", "Flax"), ("equinox", "Equinox")):
        assert (title in found.seams) == bool(found.packages[name])


def test_the_doctor_lists_every_probe():
    pytest.importorskip("keras")
    pytest.importorskip("torch")
    here = Path(tailrace.__file__).parent
    written = {
        ast.literal_eval(node.args[0])
        for path in here.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Seam"
    }
    found = doctor.diagnose()
    assert written == {name for seams in found.seams.values() for name in seams}
    assert "seams to torchax" in str(found)


def test_the_doctor_does_not_import_tensorflow(monkeypatch):
    """Which would take as long as Keras itself: Keras asks it about every value it describes."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # read when Keras is imported
    keras = pytest.importorskip("keras")
    names, asked = keras.saving.serialize_keras_object.__globals__, []
    lazy = type(names["tf"])("tensorflow")  # one that has not been asked yet
    monkeypatch.setitem(names, "tf", lazy)
    monkeypatch.setattr(type(lazy), "initialize", lambda self: asked.append(self.name))
    assert all(holds for _, holds in doctor.diagnose().seams["Keras"].values())
    assert asked == []
    assert lazy.available  # Keras still asks when it has to
    assert asked == ["tensorflow"]


def test_a_front_end_that_cannot_be_imported_is_a_problem(monkeypatch):
    pytest.importorskip("keras")
    broken = (("tailrace.keras.absent_module", "keras"),)
    monkeypatch.setattr(doctor, "FRONT_ENDS", broken)
    found = doctor.diagnose()
    text = "the front end for Keras: No module named 'tailrace.keras.absent_module'"
    assert text in found.problems
    assert "Keras" not in found.seams
