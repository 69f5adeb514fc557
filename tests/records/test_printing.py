"""Arrays as text: every example that the reference quotes, and cases between them."""

import ml_dtypes
import numpy as np
import pytest

from tailrace.errors import OptionError
from tailrace.records.array_text import FloatFormat, PrintOptions, format_tensor

TWO = np.array([[1.4962566, 1.7682219], [1.0884774, 1.1320305]])
SQUARE = {"open_bracket": "[", "close_bracket": "]"}
CURLY = {"open_bracket": "{", "close_bracket": "}"}


def lines(*args, **options):
    return format_tensor(*args, **options).split("\n")


# -- quoted examples ----------------------------------------------------------------------------


def test_one_dim():
    assert format_tensor(np.int32([5, 7, 9]), "Add:0", separator=" ", **SQUARE) == "Add:0: [5 7 9]"


def test_all_values_are_equally_wide_and_right_aligned():
    assert format_tensor(np.int32([6, 9, 12]), separator=" ", **SQUARE) == "[ 6  9 12]"


def test_two_dims():
    assert lines(TWO, "title", digits=8, separator=" ", **CURLY) == [
        "title: {",
        " {1.4962566 1.7682219}",
        " {1.0884774 1.1320305}",
        "}",
    ]


def test_other_separators_and_brackets():
    assert lines(TWO, "title", digits=8, separator=";")[1] == " (1.4962566;1.7682219)"


def test_a_row_that_is_too_long_goes_on_in_the_next_line():
    options = {"max_line_width": 15, "digits": 8, "float_format": "scientific", "separator": ","}
    assert lines(TWO, "title", **options, **SQUARE) == [
        "title: [",
        " [1.4962566e+00,",
        "   1.7682219e+00]",
        " [1.0884774e+00,",
        "   1.1320305e+00]",
        "]",
    ]


def test_digits_count_those_before_the_point():
    assert format_tensor(np.float64(0.4), digits=8) == "0.4000000"
    assert format_tensor(np.array([0.4, 123.25]), digits=5) == "(  0.40, 123.25)"


# -- between the examples -----------------------------------------------------------------------


def test_default_options():
    assert format_tensor(np.float32([[1, 2], [3, 4]]), "w") == (
        "w: (\n (1.000, 2.000)\n (3.000, 4.000)\n)"
    )


def test_no_dims_and_no_title():
    assert format_tensor(np.float32(2.5)) == "2.500"
    assert format_tensor(np.int32(7), "n") == "n: 7"


def test_three_dims_indent_by_one_each():
    values = np.arange(8).reshape(2, 2, 2)
    assert lines(values, "x", separator=" ") == [
        "x: (",
        " (",
        "  (0 1)",
        "  (2 3)",
        " )",
        " (",
        "  (4 5)",
        "  (6 7)",
        " )",
        ")",
    ]


def test_rows_are_filled_up_to_the_width_and_no_line_ends_in_a_space():
    found = lines(np.arange(10, 40), max_line_width=20)
    assert all(len(line) <= 20 and line == line.rstrip() for line in found)
    assert found[:2] == ["(10, 11, 12, 13, 14,", "  15, 16, 17, 18,"]
    assert "".join(found).replace(" ", "") == "(" + ",".join(map(str, range(10, 40))) + ")"


def test_the_title_counts_for_the_first_line():
    found = lines(np.arange(10, 16), "title", max_line_width=17)
    assert found == ["title: (10, 11,", "  12, 13, 14, 15)"]


def test_width_0_never_breaks_a_row():
    assert len(lines(np.arange(500), max_line_width=0)) == 1


def test_large_arrays_show_their_edges():
    found = format_tensor(np.arange(1001), edge_items=2)
    assert found == "(   0,    1, ...,  999, 1000)"
    assert "..." not in format_tensor(np.arange(1000))
    assert "..." not in format_tensor(np.arange(1001), summarise_threshold=0)


def test_each_dim_is_summarised_if_it_is_long():
    values = np.arange(2 * 9).reshape(2, 9)
    assert lines(values, summarise_threshold=5, edge_items=1) == [
        "(",
        " ( 0, ...,  8)",
        " ( 9, ..., 17)",
        ")",
    ]
    assert lines(values.T, summarise_threshold=5, edge_items=1) == [
        "(",
        " ( 0,  9)",
        " ...",
        " ( 8, 17)",
        ")",
    ]


def test_scientific_where_fixed_would_hide_the_digits():
    assert format_tensor(np.array([1e-3, 2e-5])) == "(1.000e-03, 2.000e-05)"
    assert format_tensor(np.array([12345.0, 1.0])) == "(1.234e+04, 1.000e+00)"
    assert format_tensor(np.array([9999.0, 1.0])) == "(9999,    1)"
    assert format_tensor(np.array([12345.0]), float_format="fixed") == "(12345)"
    assert format_tensor(np.array([0.0])) == "(0.000)"


def test_raw_formats_are_not_aligned():
    values = np.array([0.1, 100.0])
    assert format_tensor(values, float_format="none") == "(0.1, 100.0)"
    assert format_tensor(values, digits=0) == "(0.1, 100.0)"


def test_values_that_are_no_numbers():
    found = format_tensor(np.array([np.nan, np.inf, -np.inf, 1.0]), digits=3)
    assert found == "( nan,  inf, -inf, 1.00)"
    assert format_tensor(np.array([np.nan])) == "(nan)"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_floats(dtype):
    assert format_tensor(np.array([0.5, -2.0], dtype)) == "( 0.500, -2.000)"


def test_other_dtypes():
    assert format_tensor(np.array([True, False])) == "( True, False)"
    assert format_tensor(np.array([-1, 10], np.int8)) == "(-1, 10)"
    assert format_tensor(np.array([1 + 2j]), digits=2) == "(1.0+2.0j)"


def test_dims_without_values():
    assert format_tensor(np.zeros((0,))) == "()"
    assert lines(np.zeros((2, 0))) == ["(", " ()", " ()", ")"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"float_format": "hex"}, r"float_format is one of 'auto'.*Received: float_format='hex'"),
        ({"digits": -1}, r"digits is a whole number of at least 0\. Received: digits=-1"),
        ({"edge_items": 0}, "edge_items is a whole number of at least 1"),
        ({"max_line_width": 2.5}, "max_line_width is a whole number"),
        ({"summarise_threshold": True}, "summarise_threshold is a whole number"),
        ({"separator": ""}, "separator is a string of at least one character"),
        ({"open_bracket": "(\n"}, "without a line break"),
        ({"close_bracket": 3}, "close_bracket is a string"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(OptionError, match=text):
        PrintOptions(**options)


def test_options_compare_and_parse():
    assert PrintOptions(float_format="fixed").float_format is FloatFormat.FIXED
    assert PrintOptions() == PrintOptions(float_format="auto")
    assert len({PrintOptions(), PrintOptions(digits=4)}) == 1
