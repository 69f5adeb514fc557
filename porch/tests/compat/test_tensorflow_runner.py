"""The runner of the originals' programs: imports by one table, data, and what became of a program."""

import doctest
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.originals import blocks, imports
from benchmarks.originals.programs import programs

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


@pytest.mark.parametrize("module", [imports, blocks], ids=["imports", "blocks"])
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
