"""The examples with modules run, each as the script it is, and say what they should."""

import re

import pytest

from test_examples import EXAMPLES, assert_kept, run

LEARNED = r"test accuracy 0\.[6-9]"
CASES = {
    "flax_nnx.py": (
        ["--epochs", "1"],
        rf"{LEARNED}.*grad/blocks/1/conv/kernel: norm .* at step 79.*predicted",
    ),
    "flax_linen.py": (
        ["--epochs", "1"],
        rf"{LEARNED}.*activation/hidden1: standard dev.*predicted",
    ),
    "equinox_gpt.py": (["--steps", "30"], r"test 0\.[2-6].*grad/blocks/0/norms/0/weight\n[ #]{28}"),
}


@pytest.mark.parametrize("name", CASES)
def test_example_runs(name, tmp_path):
    arguments, expected = CASES[name]
    printed = run(name, *arguments, "--folder", str(tmp_path))
    assert re.search(expected, printed, re.DOTALL), printed
    assert f"see {tmp_path}" in printed
    assert_kept(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_examples_stay_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
