"""The table of an epoch, in the layout of the original program."""

import io

import ml_dtypes
import numpy as np

from tailrace.records.table import print_summary, summary_table

ORIGINAL = [
    "Index Name                         Mean         Std          Minimum      Maximum      "
    "NaNs    infs   ",
    "0     Dense_128/bias:0_grad        -0.000663    0.021037     -0.108830    0.111534     "
    "False   False  ",
    "1     Dense_128/kernel:0_grad      -0.000120    0.012575     -0.186476    0.183576     "
    "False   False  ",
]


def with_statistics(mean, std, low, high):
    """Values with exactly these statistics: two extremes, and two that settle the moments."""
    rest = 4 * mean - low - high
    squares = 4 * (std**2 + mean**2) - low**2 - high**2
    apart = np.sqrt(max(2 * squares - rest**2, 0))
    return np.array([low, high, (rest + apart) / 2, (rest - apart) / 2])


def test_the_original_table_to_the_last_space():
    found = summary_table(
        {
            "Dense_128/bias:0_grad": with_statistics(-0.000663, 0.021037 * 4, -0.108830, 0.111534),
            "Dense_128/kernel:0_grad": with_statistics(-0.000120, 0.14, -0.186476, 0.183576),
        }
    ).splitlines()
    assert found[0] == ORIGINAL[0]
    for line, original in zip(found[1:], ORIGINAL[1:], strict=True):
        assert len(line) == len(original)
        cells, expected = line.split(), original.split()
        # The spread that the original shows belongs to more than four values.
        assert cells[:3] + cells[4:] == expected[:3] + expected[4:]
        assert [line.index(cell) for cell in cells] == [original.index(cell) for cell in expected]


def test_statistics_are_those_of_the_whole_array():
    values = np.random.default_rng(0).normal(2, 3, (5, 4, 3)).astype(np.float32)
    cells = summary_table({"x": values}).splitlines()[1].split()
    wide = values.astype(np.float64)
    expected = [wide.mean(), wide.std(), wide.min(), wide.max()]
    assert cells == ["0", "x", *(f"{v:.6f}" for v in expected), "False", "False"]


def test_nan_and_inf_are_flagged_and_numbers_that_are_too_wide_push_the_others():
    table = summary_table(
        {
            "nan": [1.0, np.nan],
            "inf": [1.0, np.inf],
            "low": [-np.inf, 0.0],
            "big": [1e12, 1e12],
            "whole": np.arange(3),
            "narrow": np.array([1.5, 2.5], ml_dtypes.bfloat16),
        }
    )
    rows = [line.split() for line in table.splitlines()[1:]]
    assert rows[0][2:] == ["nan", "nan", "nan", "nan", "True", "False"]
    assert rows[1][2:] == ["inf", "nan", "1.000000", "inf", "False", "True"]
    assert rows[2][-2:] == ["False", "True"]
    assert rows[3][2] == "1000000000000.000000"
    assert rows[4][2:6] == ["1.000000", "0.816497", "0.000000", "2.000000"]
    assert rows[5][2] == "2.000000"
    assert [row[0] for row in rows] == list("012345")


def test_empty_arrays_and_no_arrays():
    assert summary_table({"none": np.zeros((0, 3))}).splitlines()[1].split()[2] == "nan"
    assert len(summary_table({}).splitlines()) == 1


def test_what_is_printed_at_the_end_of_an_epoch():
    out = io.StringIO()
    data = {"bias": np.zeros((125, 128)), "kernel": np.ones((125, 256, 128))}
    print_summary("Gradients callback", data, epoch=2, file=out)
    lines = out.getvalue().splitlines()
    assert lines[:5] == [
        "",
        "Gradients callback",
        "key: bias shape: (125, 128)",
        "key: kernel shape: (125, 256, 128)",
        "Epoch 3 - Summary Stats",
    ]
    assert lines[5:] == summary_table(data).splitlines()


def test_nothing_was_sent(capsys):
    print_summary("Single layer activations callback", None, epoch=0)
    assert capsys.readouterr().out == "\nSingle layer activations callback\nNo data enqueued\n"
