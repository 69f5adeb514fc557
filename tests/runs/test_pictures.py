"""Histograms and heat maps: what they count, what they say, and that they are pictures."""

import itertools
import sys
import xml.etree.ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import make_trainer, train

import tailrace as tr
from tailrace.records.curves import small_curve
from tailrace.records.exponents import count_exponents, format_sentences, small_svg
from tailrace.runs.export.figures import svg_text
from tailrace.runs.export.pictures import ExponentHistogram, Heatmap, heatmap, histogram
from tailrace.runs.export.ridges import ExponentRidges
from tailrace.taps import reductions
from tailrace.taps.reductions import INF_BIN, ZERO_BIN

pytest.importorskip("matplotlib")


@pytest.fixture
def run(finished):
    return tr.open_run(finished)


def test_counting_on_the_host_is_counting_on_the_device():
    values = np.array([0, -0.0, 1, 1.5, -3, 1e-42, 1e38, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(
        count_exponents(values), np.asarray(reductions.histogram(jnp.asarray(values)))
    )


def test_the_histogram_of_a_run(run):
    whole = run.histogram("grad/*")
    counts = sum(
        run.records[name, "histogram"].values.sum(axis=0) for name in ("grad/first", "grad/second")
    )
    np.testing.assert_array_equal(whole.counts, counts)
    assert whole.title == "Gradient histogram"
    assert repr(whole).startswith("140 values of 2 tensors, steps 4 to 19: ")
    assert "float16: 0.00 % would become zero" in repr(whole)
    last = run.histogram("grad/first", slice(-1, None))
    assert last.counts.sum() == 30
    assert repr(last).startswith("30 values of 1 tensor, step 19: ")
    assert run.histogram("grad/first", slice(0, 10)).counts.sum() == 60


def test_whole_tensors_are_counted_too():
    trainer = make_trainer(observe=[tr.Tap("grad/first", reduce="tensor")])
    train(trainer, 5)
    counted = make_trainer(observe=[tr.Tap("grad/first", reduce="histogram")])
    train(counted, 5)
    np.testing.assert_array_equal(histogram(trainer).counts, histogram(counted.records).counts)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_are_written(run, tmp_path, ending):
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for name, picture in (("h", run.histogram()), ("m", run.heatmap())):
        path = tmp_path / f"{name}.{ending}"
        picture.save(path)
        assert path.read_bytes().startswith(starts[ending])


def test_the_svg_has_the_limits_and_the_words(run):
    text = run.histogram()._repr_svg_()
    for word in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "would become zero"):
        assert word in text
    assert run.histogram()._repr_svg_() == text


def test_shares_in_words():
    counts = np.zeros(258, int)
    counts[127 - 40], counts[127 + 15], counts[127 + 20], counts[127 - 15] = 1, 1, 1, 1
    half, wide, *_ = format_sentences(counts)
    assert half == (
        "float16: 25.00 % would become zero, 25.00 % lose digits, 25.00 % exceed its largest "
        "value (50.00 % at most)."
    )
    assert wide.startswith("bfloat16: 0.00 % would become zero, 0.00 %")


def test_heatmap_values(run):
    found = run.heatmap("grad/*", "max")
    assert found.names == ("grad/first", "grad/second")
    np.testing.assert_array_equal(found.steps, np.arange(20))
    np.testing.assert_array_equal(
        found.values[1], run.records["grad/second", "stats"].values["max"]
    )


def test_heatmap_of_norms_of_many_steps_and_of_histograms(run):
    trainer = make_trainer(observe=[tr.Tap("grad/*", reduce="norm")], steps_per_execution=300)
    train(trainer, 900)
    found = heatmap(trainer)
    assert found.values.shape == (2, 400)
    norms = trainer.records["grad/first"].values
    assert found.values[0, 0] == pytest.approx(norms[:3].mean())
    histograms = tr.Records()
    for record in run.records.values():
        if record.kind == "histogram":
            histograms.add(record)
    counted = heatmap(histograms)
    assert counted.what == "mean magnitude, by exponent"
    assert (counted.values > 0).all()


def test_heatmap_draws_what_is_not_finite():
    values = np.array([[1.0, np.inf, np.nan], [-1.0, 2.0, 3.0]])
    for shown in (values, abs(values)):
        assert "<svg" in Heatmap(("a\x1b", "b"), np.arange(3), shown, "max")._repr_svg_()


def test_notebooks(run):
    record = run.records["grad/first", "histogram"]
    assert "<svg" in record._repr_html_()
    assert "float16: " in record._repr_html_()
    course = run.records["grad/first", "stats"]._repr_html_()  # a curve, and no histogram
    assert "polyline" in course
    assert "float16: " not in course
    assert "<table>" in run.records._repr_html_()
    assert small_svg(np.zeros(258, int)).startswith("<svg")
    assert "<table>" in run.catalogue._repr_html_()
    assert "<table>" in run.history._repr_html_()
    assert "<svg" in tr.plan(2, 4)._repr_svg_()


def test_errors(run, tmp_path, monkeypatch):
    with pytest.raises(tr.errors.SelectionError, match="No records match 'x'"):
        run.histogram("x")
    with pytest.raises(tr.errors.SelectionError, match="No records of 'grad/.' are in the steps"):
        run.histogram("grad/*", slice(500, None))
    with pytest.raises(tr.errors.OptionError, match="field is one of 'mean', 'std'.*'size'"):
        run.heatmap(field="size")
    with pytest.raises(tr.errors.OptionError, match="The suffix of a picture .* Received: 'a.xyz'"):
        run.histogram().save("a.xyz")
    with pytest.raises(
        tr.errors.RunError, match="The picture .* cannot be written: .* Make the folder"
    ):
        run.histogram().save(tmp_path / "no" / "a.png")
    train(make_trainer(tmp_path / "norms", [tr.Tap("grad/*", reduce="norm")]), 5)
    text = "needs taps with reduce='histogram' or reduce='tensor'. The records .* kind 'norm'"
    with pytest.raises(tr.errors.SelectionError, match=text):
        tr.open_run(tmp_path / "norms").histogram()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(tr.errors.MissingDependency, match=r"A picture needs .*tailrace\[pictures"):
        run.histogram().figure()


def test_zeros_are_not_taken_for_nothing():
    """A zero has no logarithm; what is black, red and grey is said below the picture."""
    values = np.array([[1.0, 2.0], [0.0, 0.0]])
    text = Heatmap(("a", "b"), np.arange(2), values, "std")._repr_svg_()
    assert "step (black: zero)" in text
    values[0] = [np.nan, np.inf]
    text = Heatmap(("a", "b"), np.arange(2), values, "std")._repr_svg_()
    assert "step (black: zero; red: infinite; grey: nothing, or NaN)" in text
    text = Heatmap(("a", "b"), np.arange(2), np.array([[-1.0, 1], [0, 1]]), "mean")._repr_svg_()
    assert "black" not in text


def test_many_tensors_have_few_labels():
    names = tuple(f"grad/{number}" for number in range(1000))
    figure = Heatmap(names, np.arange(2), np.ones((1000, 2)), "std").figure()
    labels = figure.axes[0].get_yticklabels()
    assert 100 < len(labels) <= 160
    assert (labels[0].get_text(), labels[1].get_text()) == ("grad/0", "grad/7")
    assert figure.get_size_inches()[1] < 40


@pytest.mark.parametrize("least", [-3, -20, -29, -30, -31, -120])
@pytest.mark.parametrize("rows", [False, True])
def test_labels_do_not_touch(least, rows):
    """Names of formats neither touch their own line nor each other; nor do the numbers below."""
    counts = np.zeros(258, int)
    counts[127 + least : 127 + 2] = 5
    one = ExponentHistogram(counts, ("grad/a",), np.arange(3))
    figure = (ExponentRidges((one, one)) if rows else one).figure()
    figure.canvas.draw()
    axes, strip = figure.axes
    low, high = axes.get_xlim()
    ticks = [
        label.get_window_extent()
        for label in axes.get_xticklabels()
        if low < label.get_position()[0] < high
    ]
    for left, right in itertools.pairwise(ticks):
        assert left.x1 < right.x0
    boxes = [text.get_window_extent() for text in strip.texts]
    assert len(boxes) == 4
    for box, text in zip(boxes, strip.texts, strict=True):
        _, line = strip.transData.transform(text.xy)
        assert box.y0 > line
    for upper, lower in itertools.pairwise(boxes):
        assert upper.y0 > lower.y1


@pytest.mark.parametrize(
    ("values", "lines", "marks"),
    [
        ([3.0, 2.0, 1.0], 1, 0),
        ([1.0, np.nan, 2.0, 3.0, np.inf], 2, 2),
        ([5.0], 1, 0),
        ([2.0, 2.0], 1, 0),
        ([np.nan, np.nan], 0, 2),
        (list(np.linspace(0, 1, 100_000)), 1, 0),
    ],
)
def test_curves(values, lines, marks):
    text = small_curve(np.array(values))
    assert (text.count("<polyline"), text.count("<rect")) == (lines, marks)
    root = xml.etree.ElementTree.fromstring(text)
    assert len(text) < 5000
    assert "nan" not in text
    assert root.tag.endswith("svg")


def test_a_history_shows_its_curves(run):
    text = run.history._repr_html_()
    assert text.count("<polyline") == len(list(run.history)) == 2
    assert "<svg" not in tr.History()._repr_html_()


def test_a_row_for_each_tensor(run):
    found = run.histograms("grad/*", slice(5, None))
    assert [row.names for row in found.rows] == [("grad/first",), ("grad/second",)]
    whole = run.histogram("grad/*", slice(5, None))
    np.testing.assert_array_equal(sum(row.counts for row in found.rows), whole.counts)
    text = found._repr_svg_()
    for word in ("grad/first", "grad/second", "% zero", "float8_e5m2", "steps 9 to 19"):
        assert word in text
    assert repr(found).startswith("Gradient histograms\n  grad/first: 90 values")


def test_rows_without_numbers_and_with_many(run):
    counts = np.zeros(258, np.int64)
    counts[INF_BIN], counts[ZERO_BIN] = 3, 2
    odd = ExponentHistogram(counts, ("x" * 200,), np.arange(1))
    rows = ExponentRidges((odd, *run.histograms().rows * 40))
    figure = rows.figure()
    assert "3 Inf" in svg_text(figure)
    axes = figure.axes[0]
    assert len(axes.get_yticklabels()) == 81  # nothing is left out
    left = min(label.get_window_extent().x0 for label in axes.get_yticklabels())
    assert left >= 0


def test_counts_are_logarithmic_and_zeros_apart(run):
    axes = run.histogram().figure().axes[0]
    assert axes.get_yscale() == "log"
    assert "zero" in [label.get_text() for label in axes.get_xticklabels()]


def test_colours_of_heat_maps_can_be_shared(run):
    found = run.heatmap("grad/*", "max")
    low, high = found.scale
    finite = found.values[found.values > 0]
    assert low <= finite.min() <= finite.max() <= high
    assert np.log10([low, high]).tolist() == np.round(np.log10([low, high])).tolist()
    other = run.heatmap("grad/first", "max", slice(5, 10), scale=found.scale)
    assert other.scale == found.scale
    assert other.steps.tolist() == [5, 6, 7, 8, 9]
    assert other.title == "max of grad, steps 5 to 9"
    norms = [one.figure().axes[0].images[0].norm for one in (found, other)]
    assert (norms[0].vmin, norms[0].vmax) == (norms[1].vmin, norms[1].vmax) == found.scale
    assert run.heatmap("grad/*", "mean").scale[0] < 0
    with pytest.raises(tr.errors.SelectionError, match="in the steps that were asked for"):
        run.heatmap("grad/*", steps=slice(500, None))


def test_ticks_of_a_heat_map_are_round(run):
    labels = [t.get_text() for t in run.heatmap("grad/*", "max").figure().axes[0].get_xticklabels()]
    assert labels == ["0", "5", "10", "15"]


def test_ticks_are_where_their_steps_are():
    """Of a periodic tap: several round numbers were drawn onto one column, of another step."""
    steps = np.arange(19, 80, 20)
    picture = Heatmap(("grad/w",), steps, np.ones((1, 4)), "norm", 79)
    axes = picture.figure().axes[0]
    found = {
        int(t.get_text()): x for t, x in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)
    }
    assert list(found) == [20, 30, 40, 50, 60, 70]
    for step, place in found.items():
        assert place == pytest.approx((step - 19) / 20)
