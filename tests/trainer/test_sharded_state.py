"""Everything on top of a sharded model: checkpoints, taps, guards, fingerprints, evaluation, costs."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_models import STEPS, collectives, mesh_of, mlp

import tailrace as tr
from oracles import assert_bits_equal, assert_close

OPTIMIZER = optax.adam(1e-2)

PLACES = {
    "one device": {},
    "data": {"mesh": ((8,), ("data",))},
    "fsdp": {"mesh": ((8,), ("fsdp",)), "shard": "fsdp"},
    "fsdp of 4": {"mesh": ((4,), ("fsdp",)), "shard": "fsdp"},
    "2 x 4": {
        "mesh": ((2, 4), ("data", "model")),
        "shard": {"in/w": P(None, "model"), "out/w": P("model", "data")},
    },
}


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


def mesh_like(sizes, names):
    devices = jax.devices()[: int(np.prod(sizes))]
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


def trainer(place="2 x 4", loss=None, **options):
    where = dict(PLACES[place])
    if "mesh" in where:
        where["mesh"] = mesh_like(*where["mesh"])
    return tr.Trainer(loss or mlp().loss, OPTIMIZER, mlp().params, **where, **options)


def data(steps=STEPS):
    return tr.batches(tuple(array[: 16 * steps] for array in mlp().data), 16)


def fit(trainer, steps=STEPS, **options):
    return trainer.fit(data(), steps=steps, progress=False, **options)


@functools.cache
def plain(place):
    """The losses and the collectives of a training with nothing on top."""
    alone = trainer(place)
    losses = fit(alone).loss
    return losses, collectives(compiled_of(alone))


def compiled_of(trainer):
    executables = trainer.engine.runner.executables.values()
    return next(one.compiled for one in executables if one.compiled is not None)


def specs_of(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


# -- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of a few steps, by the place where they were trained, and the states in them."""
    found = {}
    for place in PLACES:
        with jax.numpy_dtype_promotion("standard"):
            path = tmp_path_factory.mktemp("saved") / "state"
            first = trainer(place)
            fit(first, 2)
            first.save(path)
            found[place] = path, jax.tree.map(np.asarray, first.state)
    return found


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", PLACES)
def test_a_checkpoint_is_restored_on_another_mesh(saved, there, here):
    path, state = saved[there]
    other = trainer(here)
    before = jax.tree.map(lambda leaf: leaf.sharding, other.state)
    other.restore(path)
    assert_bits_equal(other.state, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, other.state) == before
    assert other.step == 2


def test_a_restored_model_trains_on(saved):
    path, _ = saved["fsdp"]
    other = trainer("2 x 4")
    fit(other, 1)  # its program holds the state
    other.restore(path)
    rest = tr.batches(tuple(array[32:] for array in mlp().data), 16)
    losses = other.fit(rest, steps=STEPS - 2, progress=False).loss
    assert_close(losses, plain("one device")[0][2:])
    assert specs_of(other.params)["out"]["w"] == P("model", "data")


def test_a_resumed_fit_has_the_same_bits(tmp_path):
    fit(trainer(), 4, checkpoint=tmp_path)
    resumed = trainer()
    assert_bits_equal(fit(resumed, checkpoint=tmp_path).loss, plain("2 x 4")[0])
    assert specs_of(resumed.params)["out"]["w"] == P("model", "data")


def test_a_fit_resumes_on_another_mesh(tmp_path):
    fit(trainer("fsdp"), 4, checkpoint=tmp_path)
    assert_close(fit(trainer("fsdp of 4"), checkpoint=tmp_path).loss, plain("fsdp")[0])


def test_a_state_that_is_set_gets_the_shardings_of_the_trainer():
    sharded = trainer()
    for _ in range(2):  # before there is a program, and after
        state = jax.tree.map(np.asarray, sharded.state)
        changed = state._replace(params=jax.tree.map(lambda leaf: leaf + 1, state.params))
        sharded.state = changed
        assert_bits_equal(sharded.state, changed)
        assert specs_of(sharded.params)["out"]["w"] == P("model", "data")
        fit(sharded, 1)


def test_gather_is_whole_and_on_the_host():
    sharded = trainer()
    fit(sharded, 2)
    whole = sharded.gather()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(whole))
    assert_bits_equal(whole, sharded.params)
    assert specs_of(sharded.params)["out"]["w"] == P("model", "data")


# -- taps, guards, fingerprints -----------------------------------------------------------------


def extra_bytes(sharded, place):
    """The bytes that a program sends beyond those of the plain one, by kind."""
    found, base = collectives(compiled_of(sharded)), plain(place)[1]
    kinds = {key for key in {*found, *base} if isinstance(key, tuple)}
    return {key[0]: found[key] - base[key] for key in kinds}


@pytest.mark.parametrize(
    ("place", "reduce"),
    [("fsdp", "stats"), ("2 x 4", "stats"), ("2 x 4", "norm"), ("fsdp", "histogram")],
)
def test_taps_see_whole_tensors_and_change_no_bit(place, reduce):
    tap = tr.Tap("*", reduce=reduce)
    sharded, alone = trainer(place, observe=[tap]), trainer("one device", observe=[tap])
    assert_bits_equal(fit(sharded).loss, plain(place)[0])
    fit(alone)
    assert set(sharded.records) == set(alone.records)
    for key in alone.records:
        found, expected = sharded.records[key].values, alone.records[key].values
        for name in expected.dtype.names or [...]:
            if reduce == "histogram":  # a value may round into the next bin
                assert np.abs(found - expected).sum() <= 0.02 * expected.sum()
            else:
                np.testing.assert_allclose(found[name], expected[name], 1e-3, 1e-5, err_msg=key)
    # A few numbers of each tensor, and no tensor.
    more, count = extra_bytes(sharded, place), len(alone.records)
    assert more.get("all-gather", 0) <= 64 * count
    assert sum(more.values()) <= {"stats": 64, "norm": 64, "histogram": 1100}[reduce] * count


def test_taps_keep_whole_tensors():
    tap = tr.Tap("updated/*", reduce="tensor")
    sharded = trainer(observe=[tap])
    fit(sharded, 3)
    assert_bits_equal(sharded.records["updated/out/w"].values[-1], sharded.gather()["out"]["w"])
    assert "updated/out/w" in str(sharded.tensors(next(iter(data()))))


def test_statistics_of_special_numbers():
    def loss(params, x, y):
        special = x * np.float32(3e38)  # infinite where |x| > 1.13
        return mlp().loss(params, x, y) + 0 * jax.numpy.where(special > 0, 1.0, 0.0).sum()

    tap = tr.Tap("activation/*", reduce="stats")
    found = []
    for place in ("2 x 4", "one device"):
        one = trainer(place, loss, observe=[tap])
        fit(one, 2)
        found.append(one.records)
    for key in found[1]:
        a, b = found[0][key].values, found[1][key].values
        for name in ("nan", "inf", "zero", "min", "max"):
            np.testing.assert_allclose(a[name], b[name], 1e-4, 1e-6, err_msg=f"{key} {name}")


def test_a_guard_stops_before_the_bad_step():
    def loss(params, x, y):
        return mlp().loss(params, x, y) * jax.numpy.where(tr.step() == 6, jax.numpy.nan, 1.0)

    guarded = trainer(on_nonfinite="stop")
    assert_bits_equal(fit(guarded).loss, plain("2 x 4")[0])
    assert sum(extra_bytes(guarded, "2 x 4").values()) <= 256
    bad = trainer(loss=loss, on_nonfinite="stop")
    with pytest.raises(tr.errors.NonFiniteError):
        fit(bad)
    assert bad.step == 6
    skipping = trainer(loss=loss, on_nonfinite="skip")
    assert np.isnan(fit(skipping).loss).sum() == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(skipping.gather()))


def test_fingerprints_do_not_depend_on_the_mesh():
    # Integers in floats: every sum is exact in any order, so all meshes compute the same bits.
    x = np.random.default_rng(3).integers(-2, 3, (32, 16)).astype(np.float32)
    w = np.random.default_rng(4).integers(-2, 3, (16, 512)).astype(np.float32)

    def loss(w, x):
        return (x @ w).sum() / 16

    found = []
    for sizes in (None, (1,), (2,), (4,), (8,)):
        mesh = None if sizes is None else mesh_like(sizes, ("fsdp",))
        shard = None if sizes is None else "fsdp"
        options = {"mesh": mesh, "shard": shard, "fingerprint": True, "steps_per_execution": 2}
        one = tr.Trainer(loss, optax.sgd(0.5), w, **options)
        history = one.fit(tr.batches((x,), 16), steps=2, progress=False)
        if mesh is not None:
            assert one.params.sharding.spec == P(None, "fsdp")
        found.append(
            {name: np.asarray(value).tolist() for name, value in history.fingerprints.items()}
        )
    assert all(one == found[0] for one in found)
    assert found[0]["parameters"] != [0]


def test_fingerprints_change_no_bit_and_gather_nothing():
    sharded = trainer("fsdp", fingerprint=True)
    assert_bits_equal(fit(sharded).loss, plain("fsdp")[0])
    # The last step of an execution, whose gradients are digested, is in the program a second time.
    step = plain("fsdp")[1]["all-gather", "bytes"]
    assert extra_bytes(sharded, "fsdp")["all-gather"] <= step + 1024


def test_steps_are_replayed_and_explained(tmp_path):
    sharded = trainer(fingerprint=True, sentinel=0.5)
    fit(sharded, checkpoint=tmp_path)
    found = sharded.replay(7, data(), observe=["grad/*"], checkpoint=tmp_path)
    assert found.proved is True
    assert {name for name, _ in found} >= {"grad/in/w", "grad/out/w"}
    assert "proved" in str(sharded.explain_step(7, data(), checkpoint=tmp_path))


def test_arrays_with_shardings_are_replayed_with_them(tmp_path):
    sharding = NamedSharding(mesh_of((2, 4), ("data", "model")), P(None, "model"))
    w = jax.device_put(np.ones((16, 8), np.float32), sharding)
    sharded = tr.Trainer(lambda w, x: ((x @ w) ** 2).mean(), OPTIMIZER, w, fingerprint=True)
    rows = tr.batches(mlp().x, 16)
    sharded.fit(rows, steps=6, progress=False, checkpoint=tmp_path)
    assert sharded.replay(4, rows, checkpoint=tmp_path).proved is True


# -- using the model ----------------------------------------------------------------------------


def test_evaluation_and_prediction_with_a_last_batch_that_does_not_divide():
    rows = tuple(array[:43] for array in mlp().data)
    sharded, alone = trainer(), trainer("one device")
    for one in (sharded, alone):
        fit(one, 3)

    def predicted(params, x, y):
        return jax.nn.relu(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"]["w"]

    batches = tr.batches(rows, 16, drop_remainder=False)
    assert_close(
        np.float32(sharded.evaluate(batches)["loss"]), np.float32(alone.evaluate(batches)["loss"])
    )
    found = sharded.predict(batches, predicted)
    assert found.shape == (43, 8)
    assert_close(found, alone.predict(batches, predicted))
    live = list(sharded.predict(tr.batches(rows, 16), predicted, live=True))
    assert_close(np.concatenate(live), found)


def test_numbers_of_other_precisions():
    for options in ({"precision": "bfloat16"}, {"precision": "float16", "loss_scale": "dynamic"}):
        found = [fit(trainer(place, **options)).loss for place in ("2 x 4", "one device")]
        np.testing.assert_allclose(*found, 3e-2, 3e-3)


def test_explain_says_what_a_device_holds_and_what_is_whole():
    sharded = trainer("fsdp")
    explained = sharded.explain(next(iter(data())))
    small = 512 * 4  # "in/b" is whole
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp().params))
    assert explained.parts["parameters"] == (total - small) // 8 + small
    assert explained.parts["optimizer state"] == 2 * explained.parts["parameters"] + 4
    assert "2 of 3 parameters sharded over a mesh of 'fsdp' (8)" in str(explained)
    assert "on every device whole: in/b (2.0 kB)" in str(explained)


def test_a_run_directory_is_written(tmp_path):
    sharded = trainer(run_dir=tmp_path / "run")
    losses = fit(sharded).loss
    run = tr.open_run(tmp_path / "run")
    assert_bits_equal(run.history.loss, losses)
    assert run.info["options"]["mesh"] == {"data": 2, "model": 4}
    assert len(run.info["devices"]) == 8


def test_with_the_mesh_of_jax_around_it(tmp_path):
    """With explicit axes, as `jax.make_mesh` makes them: what Tailrace runs beside the program, too."""
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        one = tr.Trainer(mlp().loss, OPTIMIZER, mlp().params, fingerprint=True, sentinel=0.5)
        fit(one, checkpoint=tmp_path)
        one.save(tmp_path / "saved")
        one.restore(tmp_path / "saved")
        one.evaluate(data())
        assert one.replay(7, data(), observe=["grad/*"], checkpoint=tmp_path).proved is True
        assert "a mesh of 'data' (8)" in repr(one)
        assert jax.numpy.square(one.params["in"]["b"]).sharding.mesh.shape == {"data": 8}
