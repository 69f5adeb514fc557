"""The runner of the originals' programs: imports by one table, data, and what became of a program."""

import doctest
import inspect
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.originals import blocks, contexts, imports, reports, squad
from benchmarks.originals.__main__ import Outcome, row
from benchmarks.originals.plain import anything
from benchmarks.originals.programs import Program, programs

PROGRAM = """\
import numpy as np
import tensorflow as tf, keras
from tensorflow.python import ipu, training
from tensorflow.keras.layers import (
    Dense,
    Flatten,
)


def later():
    import poptorch
    return poptorch, "import tensorflow"
"""

CHANGED = """\
import numpy as np
from tailrace.compat import tensorflow as tf; from tailrace.compat.tensorflow import keras
from tailrace.compat import ipu; from tailrace.compat.tensorflow.python import training
from tailrace.compat.tensorflow.keras.layers import Dense; \
from tailrace.compat.tensorflow.keras.layers import Flatten





def later():
    from tailrace.compat import poptorch
    return poptorch, "import tensorflow"
"""


def test_imports_are_changed_and_nothing_else():
    found = imports.changed(PROGRAM)
    assert found.text.splitlines() == CHANGED.splitlines()
    assert found.lines == 7
    assert len(found.text.splitlines()) == len(PROGRAM.splitlines())


MODULES = [imports, blocks, contexts, reports, anything]


@pytest.mark.parametrize("module", MODULES, ids=[m.__name__.rpartition(".")[2] for m in MODULES])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_blocks_of_a_document_in_their_order():
    text = "```python\na = 1\n```\n\n  ```python\n  b = 2\n  ```\n\n"
    text += ".. code-block:: python\n\n  c = 3\n\nend\n"
    assert blocks.blocks(text) == ["a = 1\n", "b = 2\n", "c = 3\n\n"]


def test_programs_are_found(tmp_path):
    home = tmp_path / "tutorials" / "tensorflow2" / "demo"
    (home / "tests").mkdir(parents=True)
    (home / "main.py").write_text("print(1)\n")
    (home / "model.py").write_text("def model():\n    return 1\n")
    (home / "tests" / "test_main.py").write_text("print(2)\n")
    (tmp_path / "other.py").write_text("print(3)\n")
    assert [str(found.path) for found in programs(tmp_path)] == [
        "tutorials/tensorflow2/demo/main.py"
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import tensorflow as tf", "import tensorflow as tf"),
        ("from tensorflow import keras", "import keras"),
        ("from tensorflow.keras.layers import Dense", "from keras.layers import Dense"),
        ("from tensorflow.python import ipu", "from benchmarks.originals.plain import ipu"),
        ("import poptorch", "from benchmarks.originals.plain import poptorch"),
    ],
)
def test_imports_of_a_plain_program(before, after):
    assert imports.changed(before, imports.PLAIN).text == after


def test_a_row_compares_with_the_plain_program():
    program = Program(pathlib.PurePosixPath("a/tensorflow2/b.py"), "tensorflow2")
    found = Outcome(2, None, 10.0, {"loss": 0.5, "accuracy": 0.9})
    same = Outcome(1, None, 5.0, {"loss": 0.51, "accuracy": 0.92})
    other = Outcome(1, None, 5.0, {"loss": 0.51, "accuracy": 0.5})
    start = "| `a/tensorflow2/b.py` | 2 | runs | 10 s | loss 0.5, accuracy 0.9 |"
    assert row(program, found, same) == f"{start} 0.51, 0.92 |"
    assert row(program, found, other) == f"{start} 0.51, 0.5 differs |"
    assert row(program, found, None) == f"{start}  |"
    failed = Outcome(1, "TypeError: no", 5.0, {})
    assert row(program, found, failed) == f"{start} no plain program: TypeError: no |"


def test_a_row_says_which_backend_the_plain_program_had():
    """Logits given to a loss of probabilities: Keras' backends disagree, so Keras on JAX compares."""
    path = pathlib.PurePosixPath("a/tensorflow2/training_pipelining.py")
    program = Program(path, "tensorflow2")
    found = Outcome(2, None, 10.0, {"loss": 8.059})
    assert program.plain_backend == "jax"
    assert row(program, found, found).endswith("| loss 8.059 | 8.059 (Keras on JAX) |")
    assert Program(path.with_name("other.py"), "tensorflow2").plain_backend == "tensorflow"


def test_logits_in_a_loss_of_probabilities_differ_between_backends_of_keras():
    """Why two programs are compared with Keras on JAX; if Keras changes this, they need not be."""
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    import numpy as np

    logits, label = np.float32([[4.0, -1.0, 0.5]]), np.array([2])
    here = keras.losses.sparse_categorical_crossentropy(label, logits)
    clipped = tf.clip_by_value(logits, 1e-7, 1 - 1e-7)
    there = tf.nn.sparse_softmax_cross_entropy_with_logits(label, tf.math.log(clipped))
    assert abs(float(here[0]) - float(there[0])) > 0.1
    odds = np.float32([[0.2, 0.5, 0.3]])  # probabilities: the same in both
    here = keras.losses.sparse_categorical_crossentropy(label, odds)
    assert abs(float(here[0]) + np.log(0.3)) < 1e-6


def test_the_plain_program_has_the_replicas_of_the_original():
    """Each replica takes a batch of its own: without them, a plain program updates more often."""
    pytest.importorskip("tensorflow")
    from benchmarks.originals.plain import ipu

    config = ipu.config.IPUConfig()
    config.device_connection.type = ipu.config.DeviceConnectionType.ON_DEMAND
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    assert ipu.system.replicas(pipelined=False) == 4
    assert ipu.system.replicas(pipelined=True) == 1  # stages that it does not say here
    for number in (0, 1):
        with ipu.keras.PipelineStage(number):
            pass
    assert ipu.system.replicas(pipelined=True) == 2
    ipu.config.IPUConfig().configure_ipu_system()
    assert ipu.system.replicas(pipelined=False) == 1


def test_what_a_document_leaves_to_the_reader_is_supplied(tmp_path, monkeypatch):
    text = "# A title\n\n" + "".join(
        f"```python\n{block}\n```\n" for block in ("a = given", "b = later", "later = 2", "c = ...")
    )
    assert blocks.run(text, tmp_path) == (2, 4)
    context = contexts.Context(
        before={0: "given = 1\n"}, after={2: 0}, filled={3: "5; assert b == 2"}
    )
    monkeypatch.setitem(contexts.CONTEXTS, "# A title", context)
    assert blocks.run(text, tmp_path) == (4, 4)


def test_an_argument_that_is_gone_is_dropped_and_the_signature_stays():
    """Keras reads the names of a layer's arguments: without them no `Embedding` was made."""
    pytest.importorskip("tensorflow")
    from benchmarks.originals.plain import ipu

    class Layer:
        def __init__(self, size, scale=1):
            self.size, self.scale = size, scale

    ipu.without(Layer, "__init__", "input_length")
    assert Layer(3, scale=2, input_length=5).scale == 2
    assert inspect.getfullargspec(Layer.__init__).args == ["self", "size", "scale"]


def test_questions_in_the_form_of_squad():
    found = squad.load_dataset("squad")
    train = found["train"]
    row = train[10016]  # real data have more rows: these begin again
    assert row == train[10016 % len(train)]
    start = row["answers"]["answer_start"][0]
    assert row["context"][start:].startswith(row["answers"]["text"][0])
    twice = train.map(lambda rows: {"id": rows["id"] * 2, "n": [1] * (2 * len(rows["id"]))})
    assert (len(twice), twice.remove_columns(["n"]).column_names) == (2 * len(train), ["id"])
    right = [{"id": one["id"], "prediction_text": one["answers"]["text"][0]} for one in train]
    wrong = [{**one, "prediction_text": ""} for one in right]
    compute = squad.load_metric("squad").compute
    assert compute(predictions=right, references=list(train)) == {"exact_match": 100.0}
    assert compute(predictions=wrong, references=list(train)) == {"exact_match": 0.0}


def test_a_plain_loss_that_is_named_and_not_the_last_result():
    torch = pytest.importorskip("torch")
    from benchmarks.originals.plain import anything, poptorch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            loss = poptorch.identity_loss(self.weight * x, reduction="mean")
            return poptorch.recomputationCheckpoint(loss), x

    model = Model()
    training = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.5))
    training(torch.tensor([1.0, 3.0]))
    assert model.weight.item() == 1.0 - 0.5 * 2.0
    assert int(anything.SubgraphCopyingStrategy.JustInTime) == 0


def test_a_plain_optimizer_of_half_weights_keeps_its_state_in_float32():
    """PyTorch's own keeps it in half precision: squares of small gradients are zero there."""
    torch = pytest.importorskip("torch")
    from benchmarks.originals.plain import poptorch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float16))

        def forward(self, x):
            return poptorch.identity_loss(self.weight * x, reduction="sum")

    model = Model()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.25, loss_scaling=64.0, weight_decay=0)
    poptorch.trainingModel(model, None, optimizer)(torch.tensor([1e-4], dtype=torch.float16))
    assert abs(model.weight.item() - 0.75) < 1e-2  # a step of the size of the rate
    assert model.weight.dtype == torch.float16
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.float32


def test_the_plain_poptorch_trains_as_the_original_says():
    torch = pytest.importorskip("torch")
    from benchmarks.originals.plain import poptorch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x, (self.weight * x).mean()

    model = Model()
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.tensor([1.0, 3.0, 5.0, 7.0])
    out, loss = training(x)
    assert (out.tolist(), loss.tolist()) == ([7.0], [0.0])  # the last of four microbatches
    assert model.weight.item() == 1.0 - 0.5 * 2.0 - 0.5 * 6.0  # two updates, of two each
