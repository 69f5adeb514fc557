"""Shares of values that narrow formats lose, compared with casting the values themselves."""

import ml_dtypes
import numpy as np
import pytest

import tailrace as tr
from tailrace.errors import OptionError
from tailrace.records.float_formats import FORMATS, format_shares
from tailrace.taps.reductions import NUM_BINS, histogram

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def wide_values(seed, exponents, count=4000):
    rng = np.random.default_rng(seed)
    size = rng.uniform(1, 2, count) * 2.0 ** rng.integers(*exponents, count)
    values = (size * rng.choice([-1, 1], count)).astype(np.float32)
    values[rng.integers(0, count, 40)] = 0
    return values


def cast(values, name):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(DTYPES[name]).astype(np.float32)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_limits_are_those_of_the_dtype(form):
    info = ml_dtypes.finfo(DTYPES[form.name])
    assert float(info.max) == form.largest
    assert float(info.smallest_normal) == form.smallest_normal
    assert float(info.smallest_subnormal) == form.smallest


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("exponents", [(-40, 20), (-140, 127), (-12, 12), (10, 18)])
@pytest.mark.parametrize("scale", [0, 6, -9])
def test_shares_of_random_values(name, exponents, scale):
    values = wide_values(abs(hash((name, exponents, scale))) % 1000, exponents)
    shares = format_shares(np.asarray(histogram(values)), scale)[name]
    scaled = values.astype(np.float64) * 2.0**scale  # exact, so that only the cast rounds
    form = next(f for f in FORMATS if f.name == name)
    with np.errstate(over="ignore", invalid="ignore"):
        after = scaled.astype(DTYPES[name]).astype(np.float64)
    vanished = ((after == 0) & (values != 0)).mean()
    beyond = (~np.isfinite(after)).mean()
    assert shares["underflow"] <= vanished + 1e-12
    assert vanished <= shares["underflow_most"] + 1e-12
    if name != "bfloat16":  # float32's own subnormal values are far below what survives
        assert shares["underflow"] == pytest.approx(vanished, abs=1e-12)
        size = np.abs(scaled)
        between = ((size >= form.smallest / 2) & (size < form.smallest_normal)).mean()
        assert shares["subnormal"] == pytest.approx(between, abs=1e-12)
    assert shares["overflow"] <= beyond + 1e-12
    assert beyond <= shares["overflow_most"] + 1e-12


def test_boundaries_are_where_the_text_says():
    for form in FORMATS[:1] + FORMATS[2:]:
        half = np.float32(form.smallest / 2)
        top = np.float32(2.0 ** (np.floor(np.log2(form.largest)) + 1))
        cases = {
            "underflow": np.nextafter(half, np.float32(0)),
            "subnormal": np.nextafter(half, np.float32(1)),
            "overflow": top,
            "overflow_most": np.nextafter(top, np.float32(0)),
        }
        for field, value in cases.items():
            shares = format_shares(np.asarray(histogram(np.float32([value]))))[form.name]
            assert shares[field] == 1, (form.name, field)
        tie = format_shares(np.asarray(histogram(np.float32([half]))))[form.name]
        assert tie["subnormal"] == 1
        assert cast(np.float32([half]), form.name)[0] == 0  # the one case that is counted wrongly


def test_subnormal_values_of_float32_are_bounded_for_bfloat16():
    tiny = np.float32([1e-40, 1e-45])
    shares = format_shares(np.asarray(histogram(tiny)))["bfloat16"]
    assert (shares["underflow"], shares["underflow_most"], shares["subnormal"]) == (0, 1, 1)
    assert (cast(tiny, "bfloat16") == 0).tolist() == [False, True]


def test_infinite_and_missing_values_neither_overflow_nor_vanish():
    shares = format_shares(np.asarray(histogram(np.float32([np.inf, np.nan, 0, 1]))))
    for share in shares.values():
        assert all(share[field] == 0 for field in share.dtype.names)


def test_leading_dims_are_kept_and_records_fit():
    def f(x):
        with jax_scope("scaled"):
            return x * 1e-6

    out = tr.observe(f, [tr.Tap("activation/scaled", reduce="histogram")])(np.float32([1, 1e6]))
    shares = format_shares(out[1]["activation/scaled"].values)["float16"]
    assert shares.shape == (1,)
    assert shares["subnormal"][0] == 0.5
    assert format_shares(np.zeros((2, 3, NUM_BINS)))["float16"].shape == (2, 3)
    assert format_shares(np.zeros(NUM_BINS))["float16"]["underflow"] == 0


def jax_scope(name):
    import jax

    return jax.named_scope(name)


def test_what_is_no_histogram_is_refused():
    with pytest.raises(OptionError, match=r"258 bins.*Received: shape \(3, 10\)"):
        format_shares(np.zeros((3, 10)))
    with pytest.raises(OptionError, match="scale_exponent is a whole number"):
        format_shares(np.zeros(NUM_BINS), scale_exponent=0.5)
