"""Which programs there are in a checkout, and with which arguments they are run."""

from __future__ import annotations

import ast
import dataclasses
import pathlib

FOLDERS = {"tensorflow2": "tensorflow2", "tensorflow2_code": "tensorflow2", "pytorch": "pytorch"}
"""In which folders programs are, and for which of the originals."""

ARGUMENTS = {
    "recompute_lstm.py": ["--seq-len", "64"],
    "cifar10_ipu_estimator.py": ["--epochs", "1"],
    "cifar10_ipu_estimator_replica.py": ["--epochs", "1"],
    "cifar10_ipu_pipeline_estimator.py": ["--epochs", "2"],
    "completed_example/main.py": ["--use-ipu", "--pipelining"],
    "octconv_example.py": ["--epochs", "1"],
    "mnist_poptorch.py": ["--epochs", "2"],
    "mnist_poptorch_code_only.py": ["--epochs", "2"],
    "popdist_training.py": ["--epochs", "1", "--dataloader-workers", "0"],
    "mnist_pipeline.py": ["--epochs", "1"],
}
"""Arguments that the programs themselves take, so that a run is short, by the end of their path."""

IMAGES = {
    "tensorboard/demo.py": "20480 4096",
    "tensorboard/demo_code_only.py": "20480 4096",
    "pipelining/mnist_pipeline.py": "4096 16384",
    "pipelining/walkthrough.py": "8192 1600",
    "pipelining/walkthrough_code_only.py": "8192 1600",
    "octconv/octconv_example.py": "1200 4000",
    "mixed_precision/walkthrough.py": "480 320",
    "mixed_precision/walkthrough_code_only.py": "480 320",
}
"""How many images a program needs to train and to test, if not as many as others."""

ENVIRONMENT = {"Fine-tuning-BERT.py": {"NUM_AVAILABLE_IPU": "4"}}
"""What a program reads from its environment, by its name."""

FIRST = {"popdist_inference.py": "popdist_training.py"}
"""A program that must have run in the same folder before."""

ON_JAX = ("training_pipelining.py", "training_pipelining_sequential.py")
"""Programs that give logits to a loss of probabilities. For such values Keras' loss differs between its
backends: on TensorFlow it is clipped and then normalised, on JAX normalised and then clipped. The plain
program that says what is right here is Keras on JAX."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the checkout.

    Attributes:
        path: its path from the root of the checkout.
        folder: `tensorflow2` or `pytorch`.
    """

    path: pathlib.PurePosixPath
    folder: str

    @property
    def arguments(self) -> list[str]:
        """What it is run with."""
        if self.folder == "tensorflow2" and self.path.name == "popdist_training.py":
            return []
        ends = [end for end in ARGUMENTS if self.path.as_posix().endswith(f"/{end}")]
        return ARGUMENTS[ends[0]] if ends else []

    @property
    def images(self) -> str:
        """How many images it needs; an empty text for the usual number."""
        ends = [end for end in IMAGES if self.path.as_posix().endswith(f"/{end}")]
        return IMAGES[ends[0]] if ends else ""

    @property
    def environment(self) -> dict[str, str]:
        """What it finds in its environment."""
        return ENVIRONMENT.get(self.path.name, {})

    @property
    def plain_backend(self) -> str:
        """On which backend Keras runs in the plain program."""
        return "jax" if self.path.name in ON_JAX else "tensorflow"

    @property
    def before(self) -> str | None:
        """The name of the program that comes before it."""
        return FIRST.get(self.path.name)


def programs(root: pathlib.Path) -> list[Program]:
    """The programs under a root: those that do something when they are run."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = pathlib.PurePosixPath(path.relative_to(root).as_posix())
        folders = [part for part in relative.parts[:-1] if part in FOLDERS]
        if not folders or "tests" in relative.parts or path.name.startswith("test_"):
            continue
        if _does_something(path):
            found.append(Program(relative, FOLDERS[folders[0]]))
    return found


def _does_something(path: pathlib.Path) -> bool:
    """Whether a file is more than definitions: a module beside a program is none itself."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    return any(not isinstance(node, definitions) and not _is_text(node) for node in body)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
