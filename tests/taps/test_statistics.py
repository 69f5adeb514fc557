"""Statistics, histograms and norms against numpy; parts merged against the whole."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_steps import exponents, statistics

import tailrace as tr
from tailrace.errors import NonFiniteError
from tailrace.records.exponents import count_exponents
from tailrace.records.parts import merge_statistics
from tailrace.taps import gpu_kernels
from tailrace.taps.reductions import (
    NAN_BIN,
    NUM_BINS,
    ZERO_BIN,
    StatsKey,
    all_finite,
    exact_statistics,
    histogram,
    histograms,
    norm,
    pack_statistics,
    padded_rows,
    quick_statistics,
    row_lengths,
    row_width,
)

DTYPES = ["float32", "float16", "bfloat16", "int32", "uint8"]
SIZES = [1, 7, 1024, 2050]


def as_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def described(values):
    """What a tap with `reduce="stats"` makes of one tensor, on the device and then on the host."""
    return merge_statistics(np.asarray(packed([values])), np.size(values))


def jitted(function):
    """Traced anew: what it computes depends on the platform, which tests change."""
    return jax.jit(lambda *given: function(*given))


packed = jitted(pack_statistics)


def assert_statistics(found, values):
    expected = statistics(values)
    for field in ("nan", "inf"):
        assert found[field] == expected[field], field
    assert found["zero"] == pytest.approx(expected["zero"], abs=1e-12)
    for field in ("min", "max"):
        assert found[field] == expected[field] or np.isnan(expected[field]), field
    if np.isnan(expected["mean"]):
        assert np.isnan(found["mean"])
        assert np.isnan(found["std"])
        return
    scale = max(abs(expected["mean"]), expected["std"])
    assert found["mean"] == pytest.approx(expected["mean"], abs=2e-6 * scale)
    # Each row is shifted by one of its values. Should that be an outlier, it adds to the spread as
    # much as it takes from the accuracy: the error stays below a few times 1024 roundings (half of
    # that in the root), whatever the mean.
    size = max(abs(expected["min"]), abs(expected["max"]))
    assert found["std"] == pytest.approx(expected["std"], rel=4e-4, abs=2e-7 * size)


@st.composite
def tensors(draw, dtypes=DTYPES, sizes=SIZES):
    dtype = as_dtype(draw(st.sampled_from(dtypes)))
    size = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        top = min(info.max, 2**20)
        return rng.integers(max(info.min, -top), top, size, endpoint=True).astype(dtype)
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    mean = draw(st.sampled_from([0.0, 1.0, 1000.0]))
    values = (mean + scale * rng.normal(size=size)).astype(dtype)
    for special in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0]), max_size=4)):
        values[rng.integers(0, size, draw(st.integers(1, 5)))] = special
    return values


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_statistics_equal_those_of_numpy(values):
    assert_statistics(described(values), values)


@pytest.mark.parametrize("mean", [1e4, -1e6, 3e7])
@pytest.mark.parametrize("size", [1000, 5000])
def test_a_large_mean_does_not_spoil_the_spread(mean, size):
    values = (mean + np.random.default_rng(0).normal(size=size) * abs(mean) * 1e-4).astype("f4")
    expected = statistics(values)
    found = described(values)
    assert found["std"] == pytest.approx(expected["std"], rel=1e-3)
    assert found["mean"] == pytest.approx(expected["mean"], rel=1e-6)


def ends(name):
    """Values from one end of a format's range to the other, in every form: name, values."""
    dtype, rng = as_dtype(name), np.random.default_rng(0)
    info = ml_dtypes.finfo(dtype)
    far = [
        info.minexp - info.nmant,
        info.minexp,
        -100,
        -64,
        -45,
        -39,
        30,
        41,
        62,
        100,
        info.maxexp - 2,
    ]
    exponents = sorted({max(info.minexp - info.nmant, min(e, info.maxexp - 2)) for e in far})
    forms = {
        "normal": lambda g: np.clip(g, -3.9, 3.9),
        "with a mean": lambda g: 3 + np.clip(g, -3, 3) * 1e-2,
        "equal": lambda g: np.full(len(g), 1.5),
        "zeros": lambda g: np.where(np.abs(g) > 0.5, 0.0, np.sign(g)),
        "not finite": lambda g: np.where(np.abs(g) > 1, [np.nan, np.inf] * (len(g) // 2), g),
    }
    for exponent, (form, make) in itertools.product(exponents, forms.items()):
        with np.errstate(all="ignore"):
            values = (make(rng.normal(size=1026)).astype("f8") * 2.0**exponent).astype(dtype)
        yield f"{form} of 2^{exponent}", values
    yield "both ends", np.array([info.max, -info.max, info.smallest_subnormal, 0, 1], dtype)


FORMATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"]


def in_longdouble(values):
    """Statistics and norm over the whole range: the finite values in units of the largest."""
    wide = np.asarray(values).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    unit = 2.0 ** float(np.frexp(np.abs(finite).max(initial=0))[1] - 1)
    found = statistics(wide / unit)
    found |= {field: found[field] * unit for field in ("mean", "std", "min", "max")}
    found["zero"] = (wide == 0).mean()
    with np.errstate(over="ignore"):
        return found, np.sqrt(((wide / unit) ** 2).sum()) * unit


@pytest.mark.parametrize("name", FORMATS)
def test_the_ends_of_the_range(name):
    """Squares that are infinite or vanish, and numbers that a CPU takes for zero."""
    with jax.enable_x64(name == "float64"):
        measure = jax.jit(lambda v: (pack_statistics([v]), norm(v), histogram(v)))
        for form, values in ends(name):
            partial, size, counts = map(np.asarray, measure(values))
            found = merge_statistics(partial, values.size)
            expected, right = in_longdouble(values)
            for field in ("nan", "inf", "zero", "min", "max"):
                np.testing.assert_equal(found[field], expected[field], f"{form}: {field}")
            largest = max(abs(expected["min"]), abs(expected["max"]))
            scale = max(abs(expected["mean"]), expected["std"])
            assert found["mean"] == pytest.approx(expected["mean"], abs=2e-6 * scale), form
            assert found["std"] == pytest.approx(expected["std"], rel=4e-4, abs=2e-7 * largest), (
                form
            )
            info = np.finfo(size.dtype)  # a norm has the range and the steps of its own format
            right = right if not right > info.max else np.inf
            step = float(info.smallest_subnormal)
            assert size == pytest.approx(right, rel=1e-5, abs=step, nan_ok=True), form
            np.testing.assert_array_equal(counts, count_exponents(values), form)


def test_packs_of_ordinary_values_and_those_at_the_ends():
    """One tensor does not decide how the others are read; a large one has rows of both kinds."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=3000).astype(np.float32)
    mixed[:1024] *= np.float32(1e-30)
    mixed[1500:1600] *= np.float32(1e36)
    values = [np.float32([3e38, 3e38, -3e38, 1e38]), np.float32([1e-30, 2e-30, 3e-30]), mixed]
    partial = np.asarray(packed(values))
    for number, size, rows in StatsKey((number, v.size) for number, v in enumerate(values)).parts():
        assert_statistics(merge_statistics(partial[rows], size), values[number])


def test_ordinary_values_are_read_once():
    """The other way is a branch: zeros of both signs, equal values and small ones do not take it."""
    rng = np.random.default_rng(0)
    rows = np.float32([rng.normal(size=1024), np.where(rng.normal(size=1024) > 0, 0.0, -0.0)])
    rows = np.concatenate(
        [rows, np.full((1, 1024), 1e-20, "f4"), np.float32(rng.normal(size=(1, 1024)) * 1e-13)]
    )
    lengths = np.full(4, 1024, np.int32)
    quick = np.asarray(quick_statistics(rows, lengths, rows[:, :1]))
    found = np.asarray(packed([rows]))
    assert not np.signbit(found[:, 1]).any()  # none was scaled
    np.testing.assert_allclose(found, quick, rtol=1e-6, atol=1e-30)
    found = jax.make_jaxpr(lambda v: pack_statistics([v]))(rows).jaxpr.eqns
    assert [eqn.primitive.name for eqn in found].count("cond") == 1


def test_integers_and_complex_numbers_at_the_ends():
    for values in [
        np.int32([2**31 - 1, -(2**31), 2**24 + 1, 0]),
        np.uint32([2**32 - 1, 2**31, 1]),
        np.int8([-128, 127, 0]),
        np.array([True, False, True]),
    ]:
        found, expected = described(values), statistics(values)
        for field in found.dtype.names:
            assert found[field] == pytest.approx(expected[field], rel=1e-6), field
        np.testing.assert_array_equal(np.asarray(histogram(values)), count_exponents(values))
    assert np.asarray(histogram(np.int32([2**31 - 1])))[127 + 30] == 1
    values = np.complex64([complex(0, np.inf), complex(np.nan, 1), 3e38 + 3e38j, 3 + 4j, 1e-30j, 0])
    found, counts = described(values), np.asarray(histogram(values))
    assert (found["inf"], found["nan"], found["zero"]) == (1, 1, 1 / 6)
    assert counts[[255, NAN_BIN, ZERO_BIN, 127 + 2]].tolist() == [1, 1, 1, 1]
    assert counts.sum() == 6
    assert jitted(norm)(np.complex64([3e30 + 4e30j])) == np.float32(5e30)
    assert jitted(all_finite)([np.complex64([3e38 + 3e38j])])


@pytest.mark.parametrize(
    "values",
    [
        [np.nan] * 5,
        [np.inf, -np.inf],
        [np.nan, 1.0, np.inf],
        [0.0, -0.0],
        [np.inf] + [1.0] * 1030,
        [1.0] * 1030 + [np.nan],
    ],
)
def test_special_values_are_counted_and_left_out(values):
    assert_statistics(described(np.float32(values)), np.float32(values))


def test_shapes_do_not_matter():
    values = np.random.default_rng(0).normal(size=(3, 50, 11)).astype(np.float32)
    flat = described(values.ravel())
    for shape in [(3, 50, 11), (1650, 1), (1, 1, 1650)]:
        assert described(values.reshape(shape)) == flat
    assert_statistics(described(np.float32(2.5)), np.float32(2.5))


def test_no_values_at_all():
    found = merge_statistics(np.zeros((0, 8), np.float32), 0)
    assert np.isnan(found["mean"])
    assert found["nan"] == 0


def test_complex_values_are_described_by_their_magnitude():
    found = described(np.complex64([3 + 4j, 0]))
    assert (found["max"], found["mean"], found["zero"]) == (5, 2.5, 0.5)


@settings(max_examples=12, deadline=None)
@given(st.tuples(tensors(["float32"], [7]), tensors(["bfloat16"]), tensors(["float32"], [1, 2050])))
def test_several_tensors_in_one_pack(values):
    partial = np.asarray(packed(list(values)))
    key = StatsKey((number, v.size) for number, v in enumerate(values))
    assert partial.shape == (sum(len(row_lengths(v.size)) for v in values), 8)
    for number, size, rows in key.parts():
        assert_statistics(merge_statistics(partial[rows], size), values[number])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, row_width()), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_rows_merged_equal_the_whole(lengths, seed):
    """Merging is exact: rows of any content, put together, have the statistics of the whole."""
    rng = np.random.default_rng(seed)
    whole = [row_width()] * (len(lengths) - 1) + lengths[-1:]
    parts = [rng.normal(rng.normal() * 5, rng.uniform(0.1, 9), n) for n in whole]
    values = np.concatenate(parts)
    shifts = [part[0] for part in parts]
    rows = [
        [
            (part - shift).sum(),
            ((part - shift) ** 2).sum(),
            part.min(),
            part.max(),
            0,
            0,
            (part == 0).sum(),
            shift,
        ]
        for part, shift in zip(parts, shifts, strict=True)
    ]
    found = merge_statistics(np.array(rows), values.size)
    for field, expected in statistics(values).items():
        np.testing.assert_allclose(found[field], expected, 1e-9, 1e-9, err_msg=field)


def test_leading_dims_are_kept():
    values = np.random.default_rng(0).normal(size=(2, 3, 1500)).astype(np.float32)
    partial = jax.vmap(jax.vmap(lambda v: pack_statistics([v])))(values)
    found = merge_statistics(np.asarray(partial), 1500)
    assert found.shape == (2, 3)
    assert_statistics(found[1, 2], values[1, 2])


@settings(max_examples=30, deadline=None)
@given(tensors(["float32"], [7, 2050]))
def test_the_quick_way_and_the_careful_way_agree(values):
    rows = padded_rows(jnp.asarray(values), row_width())
    lengths = jnp.asarray(row_lengths(values.size))
    if np.isfinite(values).all():
        quick = merge_statistics(
            np.asarray(quick_statistics(rows, lengths, rows[:, :1])), values.size
        )
        assert_statistics(quick, values)
    careful = merge_statistics(np.asarray(exact_statistics(rows, lengths)), values.size)
    assert_statistics(careful, values)


@pytest.fixture(params=["XLA's reductions", "kernels"])
def accelerator(monkeypatch, request):
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", request.param == "kernels")


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    "sizes",
    [
        [1, 4097],
        [1 << 18],
        [(1 << 18) - 1, 3, (1 << 20) + 5, 1 << 21],
    ],
)
def test_accelerators_join_rows(sizes):
    """Tensors with kernels of their own, ends of tensors, small ones: what is packed is joined."""
    rng = np.random.default_rng(len(sizes))
    values = [rng.normal(rng.normal() * 100, 2.0, size).astype(np.float32) for size in sizes]
    values[-1][::1000] = np.nan
    values[-1][1::1000] = 0
    values[0][0] = 1e6  # the first value, by which its row is shifted, is no measure of the others
    values[0][-1] = -np.inf
    partial = np.asarray(jitted(pack_statistics)(list(values)))
    key = StatsKey((number, v.size) for number, v in enumerate(values))
    assert len(partial) == sum(-(-size // (1 << 20)) for size in sizes)
    for number, size, rows in key.parts():
        assert_statistics(merge_statistics(partial[rows], size), values[number])


def read_together(monkeypatch, kernel):
    """The number of tensors in each call of a kernel of a GPU, from here on."""
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", True)
    found, plain = [], getattr(gpu_kernels, kernel)
    monkeypatch.setattr(
        f"tailrace.taps.gpu_kernels.{kernel}",
        lambda flats, size: found.append(len(flats)) or plain(flats, size),
    )
    return found


@pytest.mark.parametrize(
    "sizes", [[(1 << 18) + 1, 5, *[1 << 18, (1 << 18) + 1] * 3, 1 << 18], [1 << 18] * 10]
)
def test_one_kernel_reads_several_tensors_that_are_alike(monkeypatch, sizes):
    kernels = read_together(monkeypatch, "row_statistics")
    rng = np.random.default_rng(0)
    values = [
        rng.normal(number, 1 + number, n).astype(np.float32) for number, n in enumerate(sizes)
    ]
    values[2][7] = np.inf
    values[-1][:] = 3
    partial = np.asarray(jitted(pack_statistics)(values))
    assert sum(kernels) == len([size for size in sizes if size > 5])
    assert max(kernels) <= 8
    assert len(kernels) == 2
    for number, size, rows in StatsKey(enumerate(sizes)).parts():
        found = merge_statistics(partial[rows], size)
        assert_statistics(found, values[number])
    assert found["std"] == 0


ROWS = {
    "plain": lambda rng: rng.normal(0, 1, 4096),
    "positive": lambda rng: rng.uniform(0, 1, 4096),
    "a large mean": lambda rng: rng.normal(1000, 1, 4096),
    "neighbours": lambda rng: rng.choice([1000, np.nextafter(np.float32(1000), 2000)], 4096),
    "equal": lambda rng: np.full(4096, 0.1),
    "zeros": lambda rng: np.zeros(4096),
    "one value": lambda rng: np.eye(1, 4096)[0] * 7,
    "tiny": lambda rng: rng.normal(0, 1e-30, 4096),
    "NaN": lambda rng: np.full(4096, np.nan),
    "a mean beside NaN": lambda rng: np.where(
        np.arange(4096) < 1100, np.nan, rng.normal(1e4, 1, 4096)
    ),
    "Inf": lambda rng: np.where(np.arange(4096) % 7 == 0, -np.inf, rng.normal(0, 3, 4096)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("end", [4096, 1025])
@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_reads_every_kind_of_row(monkeypatch, name, end, dtype):
    """Most rows need sums only; others are read again, for distances to their mean."""
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", True)
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(3, 1, 4096), ROWS[name](rng)[:end]]).astype(dtype)
    rows = np.asarray(gpu_kernels.row_statistics([jnp.asarray(values)], 4096), np.float64)
    total, squares, low, high, nan, inf, zero, shift = rows[1]
    row = values[4096:].astype(np.float32).astype(np.float64)
    kept = row[np.isfinite(row)]
    assert (nan, inf, zero) == (np.isnan(row).sum(), np.isinf(row).sum(), (row == 0).sum())
    assert (low, high) == (kept.min(initial=np.inf), kept.max(initial=-np.inf))
    if squares < 0:
        factor = gpu_kernels.LIMITS[4].up
        total, squares = total / factor, -squares / factor**2
    if kept.size:
        variance = squares / kept.size - (total / kept.size) ** 2
        assert total / kept.size + shift == pytest.approx(
            kept.mean(), rel=2e-6, abs=1e-6 * kept.std()
        )
        assert variance == pytest.approx(kept.var(), rel=2e-5, abs=1e-80)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("bad", [None, 0, 3, 7, 10, 11])
def test_accelerators_test_many_tensors_at_once(bad):
    """Groups that are alike, one alone, small ones: a value at the end of any of them is found."""
    sizes = [1 << 18] * 10 + [(1 << 18) + 3, 5]
    values = [np.full(size, number, np.float32) for number, size in enumerate(sizes)]
    if bad is not None:
        values[bad][-1] = -np.inf
    assert jitted(all_finite)(values) == (bad is None)


def test_one_kernel_counts_exponents_of_several_tensors(monkeypatch):
    kernels = read_together(monkeypatch, "histograms")
    rng = np.random.default_rng(0)
    sizes = [1 << 18, 9, 1 << 18, (1 << 18) + 5, 1 << 18]
    values = [rng.normal(0, 2.0**number, n).astype(np.float32) for number, n in enumerate(sizes)]
    found = jitted(histograms)(values)
    assert kernels == [3, 1]
    for counts, own in zip(found, values, strict=True):
        np.testing.assert_array_equal(np.asarray(counts), exponents(own))


@pytest.mark.parametrize("reduce", [norm, lambda value: all_finite([value])])
def test_numbers_leave_an_accelerators_loop_by_an_operation(monkeypatch, reduce):
    """A copy would be asynchronous, and XLA would schedule the whole loop in another way."""
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    program = jax.make_jaxpr(reduce)(jnp.ones((4, 3))).jaxpr
    *_, barrier, last = [eqn.primitive.name for eqn in program.eqns]
    assert barrier == "optimization_barrier"
    assert last in ("sqrt", "is_finite")


@pytest.mark.parametrize("scale", [1e-30, 8e37])
def test_a_kernel_reads_the_ends_of_the_range(monkeypatch, scale):
    """Joined with a row of ordinary numbers."""
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", True)
    rng = np.random.default_rng(0)
    values = np.float32(np.clip(1 + rng.normal(size=(1 << 18) + 3), -4, 4) * scale)
    values[-4099:-3] = np.nan, 1.0, *values[:4094]
    found = merge_statistics(np.asarray(jitted(pack_statistics)([values])), values.size)
    expected, _ = in_longdouble(values)
    assert found["mean"] == pytest.approx(expected["mean"], abs=4e-6 * expected["std"])
    assert found["std"] == pytest.approx(expected["std"], rel=4e-4)


def test_the_spread_of_large_numbers_in_xlas_rows_is_infinite(monkeypatch):
    """An accelerator without kernels reads each row once: their squares are infinite there, not NaN."""
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    values = np.random.default_rng(0).normal(0, 1e30, 1 << 18).astype(np.float32)
    found = merge_statistics(np.asarray(jitted(pack_statistics)([values])), values.size)
    assert found["std"] == np.inf
    assert np.isfinite(found["mean"])


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_accelerators_reduce_large_tensors_of_every_width(dtype):
    rng = np.random.default_rng(0)
    values = rng.normal(3, 2, (2, 3, (1 << 18) + 4095)).astype(dtype)
    values[0, :, -1] = np.nan
    values[:, 1, 4096] = np.inf
    wide = values.astype(np.float32)
    partial = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda v: pack_statistics([v]))))(values))
    for place in np.ndindex(2, 3):
        assert_statistics(merge_statistics(partial[place], wide[place].size), wide[place])
    finite = jax.jit(jax.vmap(jax.vmap(lambda v: all_finite([v, v[:7]]))))(values)
    np.testing.assert_array_equal(finite, np.isfinite(wide).all(axis=-1))


def test_kernels_with_64_bits_enabled(monkeypatch):
    """Constants and counts of theirs stay 32 bits wide."""
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", True)
    values = np.random.default_rng(0).normal(size=(1 << 18) + 3).astype(np.float32)
    values[[1, 2]] = np.nan, 0
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(lambda v: pack_statistics([v]))(values))
        counts = np.asarray(jitted(histogram)(values))
    assert_statistics(merge_statistics(found, values.size), values)
    assert (counts.sum(), counts[NAN_BIN], counts[ZERO_BIN]) == (values.size, 1, 1)


def test_tensors_without_values(monkeypatch):
    monkeypatch.setattr("tailrace.taps.reductions.devices.platform", lambda: "gpu")
    assert pack_statistics([jnp.zeros((0, 3)), jnp.zeros(0)]).shape == (0, 8)


@pytest.mark.parametrize("mode", ["all", "sum"])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_statistics_of_a_cast_read_what_was_cast(monkeypatch, platform, mode):
    """On an accelerator: a float32 gradient that is a cast from bfloat16 need not be in memory.

    A sum over steps is one of float32 values.
    """
    monkeypatch.setattr("tailrace.devices.devices.platform", lambda: platform)
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    read = []
    monkeypatch.setattr(
        "tailrace.taps.wanted.pack_statistics",
        lambda values: read.extend(str(v.dtype) for v in values) or pack_statistics(values),
    )

    def loss_fn(w, x):
        return ((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    rows = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        w,
        steps_per_execution=4,
        observe=[tr.Tap("grad/*", mode=mode)],
    )
    trainer.fit(list(rows), steps=4)
    grads = []
    for x in rows:
        grads.append(np.asarray(jax.jit(jax.grad(loss_fn))(w, x)))
        w = w - np.float32(0.1) * grads[-1]
    expected = [sum(grads)] if mode == "sum" else grads
    (name,) = trainer.records
    for found, values in zip(trainer.records[name].values, expected, strict=True):
        assert found["mean"] == pytest.approx(values.mean(), rel=1e-5)
        assert found["max"] == pytest.approx(values.max(), rel=1e-6)
    narrow = platform == "gpu" and mode == "all"
    assert set(read) == {"bfloat16" if narrow else "float32"}


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_guards_of_a_cast_read_what_was_cast(monkeypatch, platform):
    monkeypatch.setattr("tailrace.devices.devices.platform", lambda: platform)
    monkeypatch.setattr("tailrace.taps.gpu_kernels.compiles", lambda _: False)
    read = []
    monkeypatch.setattr(
        "tailrace.taps.wanted.all_finite",
        lambda values: read.extend(str(v.dtype) for v in values) or all_finite(values),
    )

    def loss_fn(w, x):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()

    rows = np.ones((8, 5, 3), np.float32)
    rows[6, 2, 1] = np.inf
    guard = tr.stop_on_nonfinite("grad/*")
    w = np.ones((3, 2), np.float32)
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), w, steps_per_execution=4, observe=[guard])
    with pytest.raises(NonFiniteError, match="step 6"):
        trainer.fit(list(rows), steps=8)
    assert set(read) == {"bfloat16" if platform == "gpu" else "float32"}


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize(
    "kernel", [gpu_kernels.STATISTICS, gpu_kernels.HISTOGRAM, gpu_kernels.FINITENESS]
)
def test_kernels_are_tried_before_they_are_used(monkeypatch, works, kernel):
    """Also while a program is traced. Without a GPU they fail, as those of another JAX might."""
    monkeypatch.setattr("tailrace.taps.gpu_kernels.INTERPRET", works)
    gpu_kernels.compiles.cache_clear()
    found = []
    jax.jit(lambda x: found.append(gpu_kernels.compiles(kernel)) or x)(1.0)
    gpu_kernels.compiles.cache_clear()
    assert found == [works]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_accelerators_count_exponents_of_large_tensors(dtype):
    """Rows that fill one window of exponents, many, or none; NaN, Inf, zeros, and an end of a row."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1 << 18) + 77).astype(np.float32)
    values[:20_000] *= np.exp2(rng.integers(-120, 120, 20_000))
    values[30_000:40_000] = 0
    values[[5, 50_000, -1]] = np.nan, -np.inf, 0
    values = jnp.asarray(values).astype(dtype)
    found = np.asarray(jitted(histogram)(values))
    bits = np.asarray(values.astype(jnp.float32)).view(np.int32) & 0x7FFFFFFF
    bins = np.where(bits > 0xFF << 23, NAN_BIN, np.where(bits == 0, ZERO_BIN, bits >> 23))
    np.testing.assert_array_equal(found, np.bincount(bins, minlength=NUM_BINS))


# -- histograms and norms -----------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_histograms_equal_those_of_frexp(values):
    np.testing.assert_array_equal(np.asarray(histogram(jnp.asarray(values))), exponents(values))


def test_every_exponent_has_its_own_bin():
    powers = np.float32(2.0) ** np.arange(-126, 128, dtype=np.float32)
    counts = np.asarray(histogram(jnp.asarray(np.concatenate([powers, -powers]))))
    assert counts[1:255].tolist() == [2] * 254
    below = np.nextafter(powers[1:], np.float32(0))
    assert np.asarray(histogram(jnp.asarray(below)))[1:254].tolist() == [1] * 253


def test_special_values_have_bins_of_their_own():
    special = np.float32([0, -0.0, 1e-40, -1e-45, np.inf, -np.inf, np.nan])
    counts = np.asarray(histogram(jnp.asarray(special)))
    assert (counts[257], counts[0], counts[255], counts[256]) == (2, 2, 2, 1)
    assert counts.sum() == 7


@settings(max_examples=20, deadline=None)
@given(tensors())
def test_norms_equal_those_of_float64(values):
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = np.sqrt((wide**2).sum())
    np.testing.assert_allclose(np.asarray(norm(jnp.asarray(values))), expected, rtol=1e-5)


def test_the_norm_of_many_values_is_as_good_as_that_of_few():
    values = np.random.default_rng(0).normal(1, 1, 2_000_000).astype(np.float32)
    expected = np.sqrt((values.astype(np.float64) ** 2).sum())
    np.testing.assert_allclose(np.asarray(jax.jit(norm)(values)), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(size, dtype):
    tell = jax.jit(lambda *values: all_finite(values))
    fine = np.full(size, 3e38, as_dtype(dtype))  # their sum would not be finite
    other = np.ones((3, 2), np.float32)
    assert tell(fine, other)
    for place, bad in itertools.product({0, size // 2, size - 1}, [np.nan, np.inf, -np.inf]):
        values = fine.copy()
        values[place] = bad
        assert not tell(values, other), (place, bad)
