"""Bad numbers: steps that are skipped, up to a limit, and bundles of the step that stopped."""

import json
import os
import random

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, regression
from tailrace.errors import CheckpointError, NonFiniteError, OptionError
from tailrace.trainer.observation.bundles import read_bundle

BAD = (3, 9)


def elements(bad=BAD):
    found = regression(16)
    for number in bad:
        x, y = found[number]
        found[number] = (np.full_like(x, np.nan), y)
    return found


def optimizer():
    return optax.sgd(0.05, momentum=0.5)


def trainer_of(**options):
    options = {"steps_per_execution": 4, "on_nonfinite": "skip", **options}
    return tr.Trainer(mlp_loss, optimizer(), mlp(), **options)


@jax.jit
def plain_step(params, state, batch):
    (loss, _), grads = jax.value_and_grad(mlp_loss, has_aux=True)(params, *batch)
    updates, state = optimizer().update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.fixture(scope="module")
def skipped():
    trainer = trainer_of()
    trainer.fit(elements(), steps=16)
    return trainer


def test_bad_steps_change_nothing_and_count_as_steps(skipped):
    params, state = mlp(), optimizer().init(mlp())
    for number, batch in enumerate(elements()):
        if number not in BAD:
            params, state, _ = plain_step(params, state, batch)
    assert_bits_equal(skipped.params, params)
    assert skipped.step == 16
    assert list(np.flatnonzero(skipped.history["skipped"])) == list(BAD)
    assert np.isnan(skipped.history.loss[list(BAD)]).all()


def test_a_replay_skips_them_too(tmp_path):
    trainer = trainer_of(fingerprint=True)
    trainer.fit(elements(), steps=16, checkpoint=tmp_path)
    for step in (9, 13):
        found = trainer.replay(step, elements(), checkpoint=tmp_path)
        assert found.proved is True, str(found)
    named = trainer.explain_step(9, elements(), checkpoint=tmp_path)
    assert np.isinf(named.rows["score"]).all()


def test_replicas_skip_together(skipped):
    trainer = trainer_of(replicas=2)
    trainer.fit(elements(), steps=8)
    assert list(np.flatnonzero(trainer.history["skipped"])) == [1, 4]
    assert np.isfinite(np.concatenate([p.ravel() for p in jax.tree.leaves(trainer.params)])).all()


def test_there_is_a_limit():
    guard = tr.stop_on_nonfinite(on_nonfinite="skip", limit=1)
    trainer = trainer_of(observe=[guard], on_nonfinite=None)
    with pytest.raises(NonFiniteError, match="2 steps .* were skipped .* more than limit=1") as e:
        trainer.fit(elements(), steps=16)
    assert e.value.step == 9
    assert "Look at their data" in str(e.value)
    trainer.fit(regression(4), steps=4)  # the state is fine


def test_bad_steps_in_a_row_may_come_from_the_state():
    guard = tr.stop_on_nonfinite(on_nonfinite="skip", limit=1)
    trainer = trainer_of(observe=[guard], on_nonfinite=None)
    state = trainer.state
    state.params["out"] = np.full_like(state.params["out"], np.nan)
    trainer.state = state
    with pytest.raises(NonFiniteError, match="They follow one another, so the state may hold"):
        trainer.fit(elements(bad=()), steps=16)


def test_several_guards_that_skip_have_the_smallest_limit():
    for limits, step in (((3, 0), 3), ((1, 9), 9), ((10, 2), None)):
        guards = [
            tr.stop_on_nonfinite(select, "skip", limit)
            for select, limit in zip(("loss", "grad/*"), limits, strict=True)
        ]
        trainer = trainer_of(observe=guards, on_nonfinite=None)
        if step is None:
            trainer.fit(elements(), steps=16)
            assert list(np.flatnonzero(trainer.history["skipped"])) == [3, 9]
            continue
        with pytest.raises(NonFiniteError, match=f"more than limit={min(limits)}") as error:
            trainer.fit(elements(), steps=16)
        assert error.value.step == step


def test_guards_that_disagree_are_refused():
    """Before anything trains, whichever comes first, and also with the short form."""
    stop, skip = tr.stop_on_nonfinite("param/*"), tr.stop_on_nonfinite("loss", "skip")
    for observe, on_nonfinite in (([stop, skip], None), ([skip, stop], None), ([stop], "skip")):
        with pytest.raises(
            OptionError, match="all skip or all stop. Received: .*'param/.*: 'stop'"
        ):
            trainer_of(observe=observe, on_nonfinite=on_nonfinite)
    with pytest.raises(
        OptionError, match="'stop' stops at the first. Received: limit=3 with 'stop'"
    ):
        tr.stop_on_nonfinite(limit=3)
    bundles = [tr.stop_on_nonfinite(select, bundle=select) for select in ("loss", "param/*")]
    with pytest.raises(
        OptionError, match=r"one bundle. Received: bundle='loss' and bundle='param/"
    ):
        trainer_of(observe=bundles, on_nonfinite=None)


def test_several_guards_that_stop(tmp_path):
    """The first bad step of any of them; the bundle of whichever asks for one."""
    pytest.importorskip("safetensors")
    bundle = tmp_path / "bundle"
    guards = [tr.stop_on_nonfinite("param/*"), tr.stop_on_nonfinite("loss", bundle=bundle)]
    trainer = trainer_of(observe=guards, on_nonfinite="stop")
    with pytest.raises(NonFiniteError, match="Not finite in step 3"):
        trainer.fit(elements(), steps=16)
    assert read_bundle(bundle)[1]["step"] == trainer.step == 3


def test_what_cannot_be():
    with pytest.raises(OptionError, match="on_nonfinite is 'stop' or 'skip'"):
        trainer_of(on_nonfinite="ignore")
    with pytest.raises(OptionError, match="A bundle is of the step that stops the training"):
        tr.stop_on_nonfinite(on_nonfinite="skip", bundle="bundle")
    with pytest.raises(OptionError, match="limit must be a whole number >= 0 .steps."):
        tr.stop_on_nonfinite(limit=-1)


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "replicas": 2}])
def test_a_bundle_is_the_bad_step(tmp_path, options):
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    trainer = trainer_of(observe=[guard], on_nonfinite=None, **options)
    with pytest.raises(NonFiniteError):
        trainer.fit(elements(), steps=16 // trainer.elements_per_step)
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == [
        "arrays.safetensors",
        "bundle.json",
    ]
    note = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert note["step"] == trainer.step == 3 // trainer.elements_per_step
    other = trainer_of(on_nonfinite=None, **options)  # of another machine
    taps = [
        tr.Tap("loss", reduce="tensor"),
        tr.Tap("param/out", reduce="tensor", mode=tr.every(9)),
    ]
    found = other.replay_bundle(tmp_path / "bundle", regression(1)[0], observe=taps)
    assert np.isnan(found["loss"].values).any()
    assert_bits_equal(found["param/out"].values[0], np.asarray(trainer.params["out"]))
    assert set(found["param/out"].steps) == {found.step}
    assert (found.step, found.proved) == (trainer.step, None)
    assert f"from the bundle of {found.step}" in str(found)
    assert other.step == 0
    assert "a bundle has no results to compare with" in str(found)
    with pytest.raises(CheckpointError, match=r"is not a bundle, .*: it has no bundle.json"):
        other.replay_bundle(tmp_path, regression(1)[0])
    with pytest.raises(CheckpointError, match=r"is not a bundle, .*: nothing is there"):
        other.replay_bundle(tmp_path / "none", regression(1)[0])
    with pytest.raises(CheckpointError, match=r"has 2 arrays. Received: an example with 1"):
        other.replay_bundle(tmp_path / "bundle", regression(1)[0][0])
    wrong = trainer_of(accumulation=7)
    with pytest.raises(CheckpointError, match="this trainer takes 7"):
        wrong.replay_bundle(tmp_path / "bundle", regression(1)[0])
    of_another = tr.Trainer(
        lambda w, x, y: w["a"] @ x, optax.sgd(0.1), {"a": np.ones(3)}, **options
    )
    with pytest.raises(CheckpointError, match="params/a: .* here, missing in the checkpoint"):
        of_another.replay_bundle(tmp_path / "bundle", regression(1)[0])


def test_a_second_bundle_is_written_beside_the_first(tmp_path, caplog):
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    for name in ("bundle", "bundle-2", "bundle-3"):
        with pytest.raises(NonFiniteError):
            trainer_of(observe=[guard], on_nonfinite=None).fit(elements(), steps=16)
        assert read_bundle(tmp_path / name)[1]["step"] == 3
        assert f"The bundle of step 3 is in '{tmp_path / name}'" in caplog.text


def test_a_damaged_bundle(tmp_path):
    """Each bit that is flipped in either file, and each file that is cut or gone, is found."""
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    trainer = trainer_of(observe=[guard], on_nonfinite=None)
    with pytest.raises(NonFiniteError):
        trainer.fit(elements(), steps=8)
    expected = read_bundle(tmp_path / "bundle")
    chance, whole = random.Random(0), 0
    for file in (tmp_path / "bundle").iterdir():
        content = file.read_bytes()
        flips = [chance.randrange(8 * len(content)) for _ in range(40)]
        for at in (*flips, None):
            changed = bytearray(content[: len(content) // 2] if at is None else content)
            if at is not None:
                changed[at // 8] ^= 1 << at % 8
            file.write_bytes(changed)
            try:
                found = read_bundle(tmp_path / "bundle")
            except CheckpointError:
                continue
            whole += 1  # spaces between the values of JSON, say
            assert_bits_equal(found[0], expected[0])
            assert found[1] == expected[1]
        file.write_bytes(content)
    assert whole < 20


def test_a_pipe_in_a_bundle_is_not_waited_for(tmp_path):
    pytest.importorskip("safetensors")
    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    with pytest.raises(NonFiniteError):
        trainer_of(observe=[guard], on_nonfinite=None).fit(elements(), steps=16)
    arrays = tmp_path / "bundle" / "arrays.safetensors"
    arrays.unlink()
    os.mkfifo(arrays)
    with pytest.raises(CheckpointError, match="is a pipe, a socket or a device"):
        read_bundle(tmp_path / "bundle")


def test_bfloat16_survives_a_bundle(tmp_path):
    pytest.importorskip("safetensors")
    import jax.numpy as jnp

    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    make = lambda **o: tr.Trainer(  # noqa: E731
        lambda w, x: (x.astype(jnp.bfloat16) * w).mean(),
        optax.sgd(0.5),
        jnp.ones(3, jnp.bfloat16),
        **o,
    )
    trainer = make(observe=[guard])
    rows = [np.ones((2, 3), np.float32), np.full((2, 3), np.nan, np.float32)]
    with pytest.raises(NonFiniteError):
        trainer.fit(rows, steps=2)
    found = make().replay_bundle(
        tmp_path / "bundle", rows[0], observe=[tr.Tap("param/*", reduce="tensor")]
    )
    assert_bits_equal(found["param/params"].values[0], np.asarray(trainer.params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scalars_survive_a_bundle(tmp_path, dtype):
    """A parameter without dims, and a count such as Adam's."""
    pytest.importorskip("safetensors")
    import jax.numpy as jnp

    guard = tr.stop_on_nonfinite("loss", bundle=tmp_path / "bundle")
    make = lambda **o: tr.Trainer(  # noqa: E731
        lambda w, x: (x.astype(w.dtype) * w).mean(),
        optax.chain(optax.sgd(0.5), optax.scale_by_schedule(lambda count: 1.0)),
        jnp.asarray(2, dtype),
        **o,
    )
    trainer = make(observe=[guard])
    rows = [np.ones(2, np.float32), np.full(2, np.nan, np.float32)]
    with pytest.raises(NonFiniteError):
        trainer.fit(rows, steps=2)
    observe = [tr.Tap(["param/*", "optimizer/*count"], reduce="tensor")]
    found = make().replay_bundle(tmp_path / "bundle", rows[0], observe=observe)
    assert_bits_equal(found["param/params"].values[0], np.asarray(trainer.params))
    (count,) = [found[name].values for name, _ in found if name.startswith("optimizer")]
    assert count.tolist() == [2]  # after the step of the bundle
