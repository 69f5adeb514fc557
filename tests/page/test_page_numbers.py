"""What is summed up for a picture equals the plain computation over all rows."""

import itertools

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import NAMES, MadeRun, falling, healthy_stats

import tailrace as tr
from tailrace.page.cells import cell_records, grid
from tailrace.page.curves import curve, history_curves, speeds
from tailrace.page.findings.layer_order import layers
from tailrace.page.followed import FollowedRun
from tailrace.page.layers import layer_map, without_gaps
from tailrace.page.steps import MOST_COLUMNS, StepColumns
from tailrace.page.tensors import exponents, statistics


@given(st.integers(1, 3000), st.integers(0, 50), st.lists(st.integers(1, 3000), max_size=4))
def test_columns_hold_the_sums_of_their_steps_however_rows_come(steps, first, cuts):
    values = np.random.default_rng(steps).normal(size=steps)
    values[::7] = np.nan
    where = first + np.arange(steps)
    columns = StepColumns(first, ())
    for part in np.split(np.arange(steps), sorted(min(cut, steps) for cut in cuts)):
        columns.add(where[part], values[part])
    assert len(columns) <= MOST_COLUMNS
    groups = [values[i : i + columns.width] for i in range(0, steps, columns.width)]
    np.testing.assert_allclose(columns.total, [np.nansum(group) for group in groups], atol=1e-9)
    assert list(columns.count) == [int(np.isfinite(group).sum()) for group in groups]


@given(st.integers(1, 2000), st.integers(1, 300))
def test_a_curve_keeps_the_lowest_and_the_highest(steps, most):
    values = np.random.default_rng(steps).normal(size=steps)
    made = curve(np.arange(steps), values, most=most)
    assert len(made.steps) <= most
    assert made.low.min() == values.min()
    assert made.high.max() == values.max()
    assert (made.low <= made.mean + 1e-12).all()
    assert (made.mean <= made.high + 1e-12).all()
    assert made.is_exact == (len(made.steps) == steps)


def test_a_curve_of_some_steps():
    made = curve(np.arange(100), np.arange(100.0), first=10, last=19)
    assert list(made.steps) == list(range(10, 20))
    assert list(made.mean) == list(range(10, 20))
    assert len(curve(np.arange(0), np.zeros(0)).steps) == 0


def test_values_that_are_not_finite_are_counted_and_leave_gaps():
    values = np.ones(10)
    values[3:5] = [np.nan, np.inf]
    made = curve(np.arange(10), values)
    assert (made.nonfinite, made.first_nonfinite) == (2, 3)
    assert np.isnan(made.mean[3:5]).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run: every kind of record of the same gradients."""
    from small_page_run import train

    return train(tmp_path_factory.mktemp("trained") / "run")


@pytest.mark.parametrize("measure", ["rms", "zero", "nonfinite"])
def test_every_kind_of_record_has_the_same_measure(trained, measure):
    """Statistics and norms say what whole tensors say; histograms nearly so."""
    whole = trained.records["grad/first", "tensor"].values
    plain = {
        "rms": np.sqrt((whole.astype(np.float64) ** 2).mean(axis=(1, 2))),
        "zero": (whole == 0).mean(axis=(1, 2)),
        "nonfinite": np.zeros(len(whole)),
    }[measure]
    for kind in ("stats", "norm", "tensor", "histogram"):
        followed = FollowedRun(trained.run_dir)
        tables = [table for table in followed.readable().tables if table.kind == kind]
        assert tables
        if kind == "norm" and measure != "rms":
            continue
        followed.run = _only(followed.run, tables)
        found = layer_map(followed, measure, "grad/first")
        assert found.names == ["grad/first"]
        exact = kind != "histogram" or measure != "rms"
        np.testing.assert_allclose(found.values[0], plain, rtol=1e-5 if exact else 0.5, atol=1e-12)


def _only(run, tables):
    class Only(type(run)):
        pass

    Only.tables = property(lambda self: tables)
    run.__class__ = Only
    return run


def test_a_real_run_has_speed_curves_and_statistics(trained):
    followed = FollowedRun(trained.run_dir)
    curves = history_curves(followed)
    assert list(curves) == ["loss", "mae", "steps/s"]
    np.testing.assert_array_equal(curves["loss"].mean, trained.history.loss.astype(np.float64))
    steps, speed = speeds(followed)
    assert len(steps)
    assert (speed > 0).all()
    found = statistics(followed, "grad/first")
    record = trained.records["grad/first", "stats"]
    for field in ("mean", "std", "min", "max", "zero"):
        np.testing.assert_array_equal(found[field].mean, record.values[field])
    np.testing.assert_allclose(
        found["norm"].mean, trained.records["grad/first", "norm"].values, rtol=1e-6
    )
    counts = exponents(followed, "grad/first").counts
    np.testing.assert_array_equal(counts, trained.records["grad/first", "histogram"].values)


def test_executions_are_kept_with_the_steps_they_had(trained):
    rows = FollowedRun(trained.run_dir).readable().executions
    assert rows["steps"].sum() == len(trained.history)
    assert list(rows["first_step"]) == list(np.cumsum(rows["steps"]) - rows["steps"])
    assert (np.diff(rows["ended"]) >= 0).all()


def test_a_run_without_executions_has_no_speed(made):
    zarr_json = made.directory / "zarr.json"
    zarr_json.write_text(zarr_json.read_text().replace('"executions"', '"other"'))
    followed = FollowedRun(made.directory)
    assert len(speeds(followed)[0]) == 0
    assert "steps/s" not in history_curves(followed)


def test_following_reads_what_is_new_and_ends_where_one_look_does(tmp_path):
    run = MadeRun(tmp_path / "run", NAMES)
    followed = FollowedRun(run.directory)
    rng = np.random.default_rng(0)
    for steps in (3, 700, 1, 500):
        stats = {"mean": rng.normal(size=(steps, len(NAMES))), "std": 1.0}
        run.grow({"loss": np.ones(steps)}, stats=stats)
        assert followed.look()
        assert not followed.look()
        grown = layer_map(followed, "rms")
    again = layer_map(FollowedRun(run.directory), "rms")
    assert grown.width == again.width == 4
    np.testing.assert_allclose(grown.values, again.values, rtol=1e-12)
    assert grown.values.shape == (len(NAMES), -(-1204 // 4))


def test_tensors_of_two_tables_share_one_axis(tmp_path):
    """One tensor is recorded in every step, another has histograms only."""
    run = MadeRun(tmp_path / "run", ["grad/a"], ["grad/b"])
    counts = np.zeros((1, 1, 258), np.int32)
    counts[..., 127] = 10
    run.grow(
        {"loss": np.ones(600)},
        stats={"std": np.ones((600, 1))},
        histograms=np.broadcast_to(counts, (600, 1, 258)),
    )
    found = layer_map(FollowedRun(run.directory), "rms")
    assert found.names == ["grad/a", "grad/b"]
    np.testing.assert_allclose(found.values[0], 1.0)
    np.testing.assert_allclose(found.values[1], np.sqrt(7 / 3))


def test_layers_of_a_scan_are_rows_of_their_own(tmp_path):
    stack = np.zeros((3, 4, 4), np.float32)

    def loss_fn(params, x):
        def layer(h, w):
            with jax.named_scope("layer"):
                return jax.numpy.tanh(h @ w + h), None

        return jax.lax.scan(layer, x, params["stack"])[0].mean()

    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        {"stack": stack},
        observe=["activation/layer"],
        run_dir=tmp_path / "run",
        steps_per_execution=2,
    )
    trainer.fit(tr.batches(np.ones((16, 4), np.float32), 4), progress=False)
    found = layer_map(FollowedRun(tmp_path / "run"), "rms")
    assert found.names == [f"activation/layer [{n}]" for n in range(3)]
    assert np.isfinite(found.values).all()


def test_layers_come_in_the_order_of_their_numbers_where_names_were_sorted_as_text():
    names = ["grad/embed/w", *(f"grad/l{n}/w" for n in (0, 1, 10, 11, 2, 3)), "grad/out/w"]
    assert list(layers(names)) == ["embed", "l0", "l1", "l2", "l3", "l10", "l11", "out"]


def test_what_is_too_much_to_sum_up_is_said(made, monkeypatch):
    monkeypatch.setattr("tailrace.page.measures.MOST_BYTES", 10)
    found = layer_map(FollowedRun(made.directory), "rms")
    assert found.names == []
    assert "too much to sum up. Taps with reduce='stats'" in found.problems[0]


def test_a_run_that_is_cut_back_is_summed_up_anew(tmp_path):
    run = MadeRun(tmp_path / "run", NAMES)
    run.grow({"loss": falling(50)}, stats=healthy_stats(50))
    followed = FollowedRun(run.directory)
    assert layer_map(followed, "rms").values.shape[1] == 50
    committed = {"history": 20, "records": [20], "executions": 1}
    run.root.attrs.put({"format": 1, "writing": True, "committed": committed})
    assert followed.look()
    assert layer_map(followed, "rms").values.shape[1] == 20


def test_kept_digests_are_bounded(made, monkeypatch):
    monkeypatch.setattr("tailrace.page.followed.MOST_KEPT", 3)
    followed = FollowedRun(made.directory)
    assert [followed.kept(n, lambda n=n: n) for n in range(9)] == list(range(9))
    assert followed.kept(8, lambda: "made again") == 8
    assert followed.kept(0, lambda: "made again") == "made again"


def test_a_tensor_whose_records_are_in_two_tables_is_one_row(tmp_path):
    """As after a fit in which the same tensors were recorded in another form."""
    run = MadeRun(tmp_path / "run", ["grad/a"], ["grad/b"])
    counts = np.zeros((10, 1, 258), np.int32)
    counts[..., 127] = 10
    run.grow({"loss": np.ones(10)}, stats={"std": np.ones((10, 1))}, histograms=counts)
    second = run.table("stats", ["grad/a"])
    run.tables.append(second)
    tags = {"step": np.arange(10, 20), "microbatch": np.zeros(10), "replica": np.full(10, -1)}
    fields = {name: np.zeros((10, 1)) for name in ("mean", "min", "max", "nan", "inf", "zero")}
    second.append(10, {**tags, **fields, "std": np.full((10, 1), 3.0)})
    run.commit(writing=True)
    followed = FollowedRun(run.directory)
    found = layer_map(followed, "rms", "grad/a")
    np.testing.assert_allclose(found.values, [[1.0] * 10 + [3.0] * 10])
    np.testing.assert_array_equal(
        statistics(followed, "grad/a")["std"].mean, [1.0] * 10 + [3.0] * 10
    )


def test_a_real_pipeline_has_records_behind_its_cells(tmp_path):
    rng = np.random.default_rng(0)
    weights = [{"w": rng.normal(size=(4, 4)).astype(np.float32)} for _ in range(2)]

    def stage(params, x):
        with jax.named_scope("layer"):
            return jax.numpy.tanh(x @ params["w"])

    pipeline = tr.Pipeline([stage, stage], lambda h: (h**2).mean(), accumulation=4)
    trainer = tr.Trainer(
        pipeline,
        optax.sgd(0.1),
        weights,
        observe=["activation/*layer", "grad/*"],
        run_dir=tmp_path / "run",
        steps_per_execution=1,
    )
    data = tr.batches(rng.normal(size=(48, 4)).astype(np.float32), 4)
    trainer.fit(data, steps=3, progress=False)
    followed = FollowedRun(tmp_path / "run")
    assert grid(followed)["ticks"] == [[list(unit) for unit in tick] for tick in trainer.plan.ticks]
    for unit in itertools.chain(*trainer.plan.ticks):
        found = cell_records(followed, unit.kind, unit.stage, unit.microbatch)
        assert found, unit
        for row in found:
            record = trainer.records[row["name"]]
            assert set(record.stages) == {unit.stage}
            at = (record.steps == row["step"]) & (record.microbatches == unit.microbatch)
            assert row["step"] == 2
            assert row["std"] == pytest.approx(float(record.values["std"][at][0]), rel=1e-12)


@pytest.mark.parametrize("period", [1, 2, 10, 16, 100])
@pytest.mark.parametrize("together", [1, 7, 10_000])
def test_records_of_every_nth_step_leave_no_column_empty(period, together):
    columns = StepColumns(0, ())
    steps = np.repeat(np.arange(period - 1, 3000, period), 2)  # two microbatches
    for start in range(0, len(steps), together):
        part = steps[start : start + together]
        columns.close_gaps(part)
        columns.add(part, np.ones(len(part)))
    assert columns.count.sum() == len(steps)
    assert (columns.count > 0).all()


def test_a_longer_gap_of_a_resumed_run_does_not_widen_columns():
    columns = StepColumns(0, ())
    columns.close_gaps(np.array([0, 1, 2, 50, 51]))
    assert columns.width == 1


def test_rows_are_drawn_without_the_gaps_of_their_taps():
    values = np.full((4, 40), np.nan)
    values[0] = 1  # every step
    values[1, 9::10] = [1, 2, 3, 4]
    values[2, [4, 9, 14, 29, 34]] = 5  # two records are missing
    values[3, 20] = 7  # a single record is not periodic
    drawn = without_gaps(values)
    assert drawn[0].tolist() == [1] * 40
    assert drawn[1].tolist() == [1] * 10 + [2] * 10 + [3] * 10 + [4] * 10
    assert np.isnan(drawn[2]).tolist() == [False] * 15 + [True] * 10 + [False] * 10 + [True] * 5
    assert np.isfinite(drawn[3]).sum() == 1
    assert np.isfinite(values).sum() == 40 + 4 + 5 + 1  # the values themselves stay
