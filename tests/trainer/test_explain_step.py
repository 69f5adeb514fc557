"""A spike is followed to the row that made it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, assert_close, mlp, mlp_apply
from tailrace.errors import DataError, OptionError
from tailrace.runs.audit import audit
from tailrace.trainer.callbacks.callback import Execution
from tailrace.trainer.lookback import examples
from tailrace.trainer.lookback.explain_step import numbered

ROWS, BATCH = 640, 8


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    return x, np.sin(x.sum(-1)).astype(np.float32)


def loss_fn(params, x, y):
    with jax.named_scope("net"):
        out = mlp_apply(params, x)
    return ((out - y) ** 2).mean()


def trainer_of(**options):
    options = {"steps_per_execution": 10, "fingerprint": True, **options}
    return tr.Trainer(loss_fn, optax.sgd(0.02), mlp(), **options)


def spoilt(seed):
    """A dataset with one wrong label, and the step that reads it."""
    x, y = arrays(seed)
    row = int(np.random.default_rng(seed).integers(ROWS))
    y[row] += 40.0
    data = tr.batches((x, y), BATCH, shuffle=True, seed=seed)
    order = data.rows(0, ROWS // BATCH)
    return data, row, int(np.argwhere(order == row)[0, 0])


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spiked")
    data, row, step = spoilt(1)
    trainer = trainer_of()
    trainer.fit(data, epochs=1, checkpoint=tr.Checkpoint(folder, every=20, keep=9))
    assert int(trainer.history.loss.argmax()) == step
    return trainer, data, row, step, folder


def test_the_row_is_named(spiked):
    trainer, data, row, step, folder = spiked
    found = trainer.explain_step(step, data, checkpoint=folder)
    assert found.proved is True
    assert found.rows["row"][0] == row
    assert (found.rows["element"][0], len(found.rows)) == (step, BATCH)
    assert found.rows["score"][0] > 2 * found.rows["score"][1]
    assert found.grew_first == "reduced/hidden/bias" or found.grew_first.startswith("reduced/")
    assert f"row {row} of the dataset" in str(found)


def test_what_grew_is_known_at_a_checkpoint_too(spiked):
    trainer, data, _, _, folder = spiked
    found = trainer.explain_step(20, data, checkpoint=folder)  # there is a checkpoint of step 20
    assert found.proved is True
    assert "activation/net" in found.growth


def test_the_numbers_are_those_of_plain_jax(spiked):
    trainer, data, _, step, folder = spiked
    found = trainer.explain_step(step, data, checkpoint=folder)
    before = trainer_of()
    before.fit(data, steps=step)
    x, y = arrays(1)
    y = data.leaves[1]
    rows = data.rows(step, 1)[0]
    whole = jax.grad(loss_fn)(before.params, x[rows], y[rows])
    flat = lambda tree: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])  # noqa: E731
    for one in found.rows:
        place = one["row"]
        assert rows[one["position"]] == place
        single = (x[place : place + 1], y[place : place + 1])
        loss, grads = jax.value_and_grad(loss_fn)(before.params, *single)
        g, w = flat(grads), flat(whole)
        norm = jnp.linalg.norm(g)
        cosine = g @ w / (norm * jnp.linalg.norm(w))
        expected = np.float32([loss, norm, cosine])
        numbers = np.float32([one["loss"], one["gradient_norm"], one["alignment"]])
        assert_close(numbers, expected)


def test_rows_are_computed_in_chunks(spiked, monkeypatch):
    trainer, data, _, step, folder = spiked
    whole = trainer.explain_step(step, data, checkpoint=folder).rows
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.params))
    for rows in (3, 1):  # two at a time, because 8 rows are no multiple of 3; then one by one
        monkeypatch.setattr(examples, "CHUNK_BYTES", rows * size)
        found = trainer.explain_step(step, data, checkpoint=folder).rows
        for name in ("loss", "gradient_norm", "alignment"):
            assert_close(found[name], whole[name])
        np.testing.assert_array_equal(found["row"], whole["row"])


def test_operations_without_a_form_for_several_rows(tmp_path):
    def loss(params, x, y):
        same = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return loss_fn(params, x, same)

    data, row, step = spoilt(3)
    trainer = tr.Trainer(loss, optax.sgd(0.02), mlp(), steps_per_execution=10)
    trainer.fit(data, steps=step + 1, checkpoint=tmp_path)
    assert trainer.explain_step(step, data, checkpoint=tmp_path).rows["row"][0] == row


def test_with_accumulation_and_replicas(tmp_path):
    data, row, _ = spoilt(2)
    trainer = trainer_of(accumulation=2, replicas=2, steps_per_execution=5)
    trainer.fit(data, epochs=1, checkpoint=tmp_path)
    step = int(trainer.history.loss.argmax())
    found = trainer.explain_step(step, data, checkpoint=tmp_path)
    assert found.proved is True
    assert found.rows["row"][0] == row
    assert len(found.rows) == 4 * BATCH


def test_inputs_that_the_model_hides_are_named(tmp_path):
    x, y = arrays(2)
    x[77] *= 1000  # tanh makes of it what it makes of any other row: no spike
    y[77] = 0.0
    data = tr.batches((x, y), BATCH, shuffle=True, seed=2)
    step = int(np.argwhere(data.rows(0, ROWS // BATCH) == 77)[0, 0])
    trainer = trainer_of()
    trainer.fit(data, steps=step + 1, checkpoint=tmp_path)
    found = trainer.explain_step(step, data, checkpoint=tmp_path)
    assert found.rows["row"][0] == 77
    assert found.rows["input_norm"][0] > 100 * found.rows["input_norm"][1:].max()


def test_rows_that_are_alike_make_no_other_one_stand_out(tmp_path):
    """One-hot rows and weights of 1 have the same norm: a spread of zero is not a measure."""
    k = np.random.default_rng(0).integers(0, 8, 64)
    x, y, weight = np.eye(8, dtype=np.float32)[k], k.astype(np.int32), np.ones(64, np.float32)
    weight[40], y[33] = 3, (y[33] + 1) % 8

    def weighted(params, x, y, weight):
        return (optax.softmax_cross_entropy_with_integer_labels(x @ params, y) * weight).mean()

    data = tr.batches((x, y, weight), 64)
    trainer = tr.Trainer(weighted, optax.sgd(1.0), 8 * np.eye(8, dtype=np.float32))
    trainer.fit(data, epochs=1, checkpoint=tr.Checkpoint(tmp_path, every=1, keep=9))
    rows = trainer.explain_step(0, data, checkpoint=tmp_path).rows
    assert rows["row"][:2].tolist() == [33, 40]
    assert rows["score"].max() < 1000


def test_rows_without_loss_or_gradient_do_not_stand_out():
    """Padding, or a weight of 0: their logarithms are not finite."""
    found = np.zeros(8, examples.EXAMPLE)
    found["position"] = np.arange(8)
    found["loss"] = found["gradient_norm"] = [1.0, 0.9, 0.0, 1.1, 40.0, 0.0, 1.2, 0.8]
    rows = numbered([], (0, 0, 1), found)
    assert (rows["position"][0], set(rows["position"][-2:])) == (4, {2, 5})
    assert np.isfinite(rows["score"]).all()
    found["loss"] = found["gradient_norm"] = 0.0  # a loss that one row alone does not have
    assert (numbered([], (0, 0, 1), found)["score"] == 0).all()


def test_a_dataset_without_numbered_rows_names_the_element(spiked):
    trainer, data, row, step, folder = spiked
    found = trainer.explain_step(step, list(data), checkpoint=folder)
    first = found.rows[0]
    assert (first["row"], first["element"]) == (-1, step)
    assert data.rows(step, 1)[0, first["position"]] == row
    assert f"element {step}, position {first['position']}" in str(found)


def test_elements_without_rows(tmp_path):
    trainer = tr.Trainer(lambda w, x, s: (w * x).mean() * s, optax.sgd(0.1), np.ones(3, np.float32))
    data = [(np.ones((2, 3), np.float32), np.float32(2))] * 4
    trainer.fit(data, steps=4, checkpoint=tmp_path)
    with pytest.raises(DataError, match="all arrays of an element have one leading size"):
        trainer.explain_step(2, data, checkpoint=tmp_path)


# -- from the curve to the row, and back to training ----------------------------------------------


def test_on_spike_stops_where_the_loss_jumps(spiked):
    _, data, _, step, _ = spiked
    watch, called = tr.on_spike("stop"), []
    trainer = trainer_of()
    trainer.fit(data, epochs=1, callbacks=[watch, tr.on_spike(lambda t, s: called.append(s.step))])
    assert [spike.step for spike in watch.spikes] == called == [step]
    assert trainer.step == step // 10 * 10 + 10
    again = tr.on_spike()
    again.set_state(watch.get_state())
    assert again.spikes == watch.spikes


def test_a_loss_that_is_not_finite_is_one_spike():
    watch = tr.on_spike()
    for first, losses in ((0, [1.0, np.nan]), (2, [np.inf, np.nan, 1.0]), (5, [1.0, np.nan])):
        execution = Execution(first, len(losses), {"loss": np.array(losses)})
        watch.on_execution_end(None, execution)
    assert [spike.step for spike in watch.spikes] == [1, 6]
    assert str(watch.spikes[0]) == "step 1: loss nan, not finite"


def test_spikes_that_cannot_be():
    with pytest.raises(OptionError, match=r"least is at most window.*least=20, window=10"):
        tr.on_spike(window=10)
    with pytest.raises(OptionError, match="'note', 'stop', or calls a function"):
        tr.on_spike("explode")
    with pytest.raises(OptionError, match=r"score is a number greater than 0\. Received: score=0"):
        tr.on_spike(score=0)
    with pytest.raises(
        OptionError, match=r"window must be a whole number >= 1\. Received: window=0.5"
    ):
        tr.on_spike(window=0.5)


def test_rewind_goes_back_exactly_and_goes_on_with_other_data(tmp_path):
    data, row, step = spoilt(3)
    folder = tmp_path / "kept"
    trainer = trainer_of(run_dir=tmp_path / "run")
    trainer.fit(data, epochs=1, checkpoint=folder)
    assert trainer.rewind(step, data, checkpoint=folder, reason=f"row {row}") is True
    before = trainer_of()
    before.fit(data, steps=step)
    assert trainer.step == step
    assert_bits_equal(trainer.state, before.state)
    clean = data.without([row])
    for one in (trainer, before):
        one.fit(clean, steps=30)
    assert_bits_equal(trainer.state, before.state)
    run = tr.open_run(tmp_path / "run")
    assert list(run.history.steps) == list(range(step + 30))
    assert_bits_equal(run.history.loss[step:], before.history.loss)
    (said,) = run.interventions
    assert (said["kind"], said["step"], said["proved"]) == ("rewind", step, True)
    assert said["reason"] == f"row {row}"
    assert audit(run).is_clean


def test_a_rewind_that_is_not_proved_warns(tmp_path, caplog):
    data, _, step = spoilt(3)
    trainer = trainer_of()
    trainer.fit(data, epochs=1, checkpoint=tmp_path / "kept")
    other = tr.batches(arrays(4), BATCH, shuffle=True, seed=3)
    with pytest.raises(OptionError, match="reason is a text. Received: reason=5"):
        trainer.rewind(step, data, checkpoint=tmp_path / "kept", reason=5)
    assert trainer.rewind(step, other, checkpoint=tmp_path / "kept") is False
    assert f"The state before step {step} is not that of the training: " in caplog.text


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_without_rows(shuffle):
    data = tr.batches(np.arange(20), 3, shuffle=shuffle, seed=1)
    less = data.without([4, 7]).without(4)
    kept = np.concatenate(list(less))
    order = data.order(0)
    assert list(kept) == list(order[~np.isin(order, [4, 7])])[:18]
    assert list(less.rows(2, 3).reshape(-1)) == list(kept[6:15])
    stacked, count = iter(less).read(6)
    assert count == 6
    assert_bits_equal(stacked.reshape(-1), kept)
    with pytest.raises(DataError, match="numbers from 0 to 19"):
        data.without([20])
