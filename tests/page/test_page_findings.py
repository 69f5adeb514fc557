"""Findings: each is made where it should be, and nothing is found in a healthy run."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_runs import NAMES, MadeRun, add_report, falling, healthy_stats

import tailrace as tr
from tailrace.base.spans.device_times import ACTIVITIES
from tailrace.page.findings.findings import findings
from tailrace.page.followed import FollowedRun
from tailrace.page.summary import numbers, time_rows

STEPS = 120
GRADS = [NAMES.index(f"grad/layer{n}/w") for n in range(4)]


def found_in(tmp_path, change=None, *, loss=None, names=NAMES, shapes=None, seconds=None):
    """The findings of a healthy run in which something was changed."""
    run = MadeRun(tmp_path / "run", names, shapes=shapes)
    stats = {k: np.array(v) for k, v in healthy_stats(STEPS, names).items()}
    for field in ("nan", "inf"):
        stats[field] = np.zeros((STEPS, len(names)), np.int64)
    if change is not None:
        change(stats)
    values = falling(STEPS) if loss is None else loss
    parts = 60
    for number in range(parts):
        here = slice(number * STEPS // parts, (number + 1) * STEPS // parts)
        one = {field: array[here] for field, array in stats.items()}
        took = None if seconds is None else seconds[number]
        run.grow({"loss": values[here]}, stats=one, seconds=took)
    return findings(FollowedRun(run.directory))


def test_nothing_is_found_in_a_healthy_run(tmp_path):
    assert found_in(tmp_path) == []


def test_gradients_that_vanish_from_a_layer_on(tmp_path):
    def change(stats):
        for n in (0, 1):
            for part in ("w", "b"):
                stats["std"][:, NAMES.index(f"grad/layer{n}/{part}")] = 1e-9

    (one,) = found_in(tmp_path, change)
    assert (one.severity, one.topic) == ("bad", "vanishing gradients")
    assert one.text.startswith(
        "From 'layer1' on towards the input (2 of 4 layers) gradients vanish"
    )
    assert "rms 1e-09 against 0.01 in 'layer2'" in one.text
    assert one.tensor == "grad/layer1/w"


def test_gradients_that_explode_towards_the_input(tmp_path):
    def change(stats):
        stats["std"][:, GRADS[0]] = 100.0
        stats["std"][:, GRADS[1]] = 20.0

    texts = [one.text for one in found_in(tmp_path, change) if one.topic == "exploding gradients"]
    assert texts == [
        "From 'layer1' on towards the input (2 of 4 layers) gradients explode: rms 100 against 0.01 "
        "in the last layer. Clip gradients, or scale the initial weights down."
    ]


def test_gradients_that_explode_in_the_course_of_the_run(tmp_path):
    def change(stats):
        stats["std"][90, GRADS[2]] = 1e4

    (one,) = found_in(tmp_path, change)
    assert one.topic == "exploding gradients"
    assert "'grad/layer2/w' grows to 1e+06 times its median so far near step 90" in one.text
    assert one.step == 90


def test_gradients_that_were_large_at_first_do_not_explode(tmp_path):
    def change(stats):
        stats["std"][:5, GRADS[2]] = 1e4

    assert found_in(tmp_path, change) == []


def test_a_gradient_that_comes_back_to_life_does_not_explode(tmp_path):
    def change(stats):
        stats["std"][:90, GRADS[2]] = 1e-9

    assert [one for one in found_in(tmp_path, change) if "explod" in one.topic] == []


def test_parameters_without_a_gradient(tmp_path):
    def change(stats):
        stats["std"][:, GRADS[3]] = 0.0

    (one,) = found_in(tmp_path, change)
    assert one.topic == "no gradient"
    assert "'grad/layer3/w' is exactly zero" in one.text


def test_dead_units(tmp_path):
    def change(stats):
        stats["zero"][:, NAMES.index("activation/layer2")] = 0.99
        stats["zero"][:, NAMES.index("grad/layer1/b")] = 0.25

    shapes = {name: (4, 4) if name.endswith("w") else (4,) for name in NAMES}
    activation, bias = found_in(tmp_path, change, shapes=shapes)
    assert activation.topic == bias.topic == "dead units"
    assert "'activation/layer2' (99 %)" in activation.text
    assert "'grad/layer1/b' (25 %)" in bias.text


def test_masks_and_random_numbers_are_not_dead_units(tmp_path):
    silent = ["activation/a:relu", "activation/a"]
    usual = ["activation/drop:broadcast_in_dim", "activation/drop:bernoulli/uniform/max.1"]
    names = (*usual, *silent, *NAMES)

    def change(stats):
        stats["zero"][:, : len(usual) + len(silent)] = 1.0

    (one,) = found_in(tmp_path, change, names=names)
    assert "zero in 'activation/a' (100 %), 'activation/a:relu' (100 %): units" in one.text
    assert one.tensor == "activation/a"


def test_zeros_in_the_gradient_of_a_matrix_are_not_dead_units(tmp_path):
    """Rows of an embedding that a batch does not use are zero, as they should be."""

    def change(stats):
        stats["zero"][:, GRADS[0]] = 0.9

    shapes = {name: (4, 4) if name.endswith("w") else (4,) for name in NAMES}
    assert found_in(tmp_path, change, shapes=shapes) == []


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1e-2, "1 of 1 parameters move by more than 3 % of their size in a step; most 'w': 10 %"),
        (1e-9, "1 of 1 parameters hardly move; least 'w': 1e-08 of its size in a step"),
        (1e-4, None),
    ],
)
def test_update_to_weight_ratio(tmp_path, size, text):
    names = ["param/w", "update/w"]

    def change(stats):
        stats["std"][:, 0], stats["std"][:, 1] = 0.1, size

    found = found_in(tmp_path, change, names=names)
    assert [one.topic for one in found] == (["update to weight ratio"] if text else [])
    assert not text or text in found[0].text


def test_nan_in_a_tensor_names_the_first_of_the_step(tmp_path):
    def change(stats):
        stats["nan"][70, GRADS[2]] = 3
        stats["inf"][70, GRADS[1]] = 1
        stats["nan"][90, GRADS[0]] = 1

    (one,) = found_in(tmp_path, change)
    assert one.tensor == "grad/layer2/w", "the backward pass makes it first"
    assert one.step == 70
    assert "3 of 12 recorded tensors have some" in one.text


def test_nan_in_an_activation_comes_before_that_of_its_gradient(tmp_path):
    def change(stats):
        for name in ("grad/layer0/w", "activation/layer2", "activation/layer1"):
            stats["inf"][70, NAMES.index(name)] = 1

    (one,) = found_in(tmp_path, change)
    assert one.tensor == "activation/layer1"


@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"precision": "bfloat16"}], ids=str)
def test_layers_are_in_the_order_of_the_model_whatever_their_names(options, tmp_path):
    rng = np.random.default_rng(0)
    names = "hgfedcba"  # h is next to the input; as text it is the last

    def loss_fn(params, x):
        for name in names:
            x = 1 / (1 + jnp.exp(-x.astype(params[name].dtype) @ params[name]))
        return (x.mean() - 0.1) ** 2

    params = {name: rng.normal(size=(8, 8)).astype(np.float32) * 0.2 for name in names}
    run = tmp_path / "run"
    trainer = tr.Trainer(loss_fn, optax.sgd(0.01), params, observe="grad/*", run_dir=run, **options)
    trainer.fit(tr.batches(rng.normal(size=(256, 8)).astype(np.float32), 16), steps=8)
    texts = {one.topic: one.text for one in findings(FollowedRun(run))}
    assert "exploding gradients" not in texts
    assert "on towards the input" in texts["vanishing gradients"]
    assert "in 'a'" in texts["vanishing gradients"]
    assert tr.open_run(run).heatmap("grad/*").names == tuple(f"grad/{name}" for name in names)


def test_time_between_fits_is_not_training(tmp_path):
    run = MadeRun(tmp_path / "run", NAMES)
    for number in range(6):
        # The second fit begins a minute after the first.
        run.grow(
            {"loss": falling(10)}, seconds=60.0 if number == 3 else 1.0, fit=30 * (number // 3)
        )
    assert dict(numbers(FollowedRun(run.directory)))["speed"] == "10 steps/s"


def test_a_loss_that_is_not_finite(tmp_path):
    loss = falling(STEPS)
    loss[100:] = np.nan
    (one,) = found_in(tmp_path, loss=loss)
    assert "The loss is nan in step 100, and not finite in 20 of 120 steps" in one.text
    assert "observe=[tr.stop_on_nonfinite()] stops a run" in one.text


def test_steps_that_were_skipped(tmp_path):
    run, loss = MadeRun(tmp_path / "run", NAMES), falling(10)
    loss[4] = np.nan
    run.grow({"loss": loss, "skipped": np.float32(np.isnan(loss))})
    (one,) = (f for f in findings(FollowedRun(run.directory)) if f.topic == "not finite")
    assert "not finite in 1 of 10 steps. 1 step was skipped and changed nothing" in one.text
    assert "stop_on_nonfinite" not in one.text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (np.linspace(1, 2, STEPS), "The loss does not fall: 1.021 in the first twentieth"),
        (
            np.concatenate([np.linspace(2, 1, 60), np.linspace(1, 1.8, 60)]),
            "The loss was lowest near step 60 (1.034) and has risen to 1.766 since.",
        ),
    ],
)
def test_a_loss_that_does_not_fall(tmp_path, loss, text):
    (one,) = found_in(tmp_path, loss=loss)
    assert one.topic == "loss"
    assert one.text.startswith(text)


def test_a_run_that_becomes_slower(tmp_path):
    seconds = [0.1] * 45 + [0.3] * 15
    (one,) = found_in(tmp_path, seconds=seconds)
    assert one.topic == "speed"
    assert "became slower: 6.667 steps/s lately, 20 before" in one.text


def test_the_report_of_a_guard_is_the_first_finding(tmp_path):
    run = MadeRun(tmp_path / "run", NAMES)
    run.grow({"loss": falling(60)}, stats=healthy_stats(60))
    add_report(run.directory, text="Not finite in step 7: \x1b[31m'grad/w'.")
    (one,) = findings(FollowedRun(run.directory))
    assert one.text == "Not finite in step 7: \\x1b[31m'grad/w'."
    assert one.step == 7


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"text": 5}]', "null", '"x"'])
def test_damaged_reports_are_left_out(made, text):
    (made.directory / "nonfinite.json").write_text(text)
    assert FollowedRun(made.directory).readable().nonfinite_reports == []


def test_a_guard_leaves_its_report_in_the_run(tmp_path):
    def loss_fn(w, x):
        return jnp.log(w + x).mean()

    data = np.ones((40, 4), np.float32)
    data[30] = -5.0
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(1e-3),
        np.float32(1),
        observe=[tr.stop_on_nonfinite()],
        run_dir=tmp_path / "run",
        steps_per_execution=2,
    )
    with pytest.raises(tr.errors.NonFiniteError) as raised:
        trainer.fit(tr.batches(data, 4), progress=False)
    (report,) = tr.open_run(tmp_path / "run").nonfinite_reports
    assert report["text"] == str(raised.value)
    assert report["step"] == raised.value.step == 7
    assert report["culprit"]["operation"] == "log"
    followed = FollowedRun(tmp_path / "run")
    assert findings(followed)[0].text == report["text"]


def test_a_table_that_cannot_be_read_is_a_finding_and_others_are_judged(made):
    for chunk in (made.directory / "records" / "1" / "values").glob("c.*"):
        chunk.unlink()
    found = findings(FollowedRun(made.directory))
    assert [one.topic for one in found] == []  # statistics say all that is judged
    for chunk in (made.directory / "records" / "0" / "mean").glob("c.*"):
        chunk.unlink()
    found = findings(FollowedRun(made.directory))
    assert any("is truncated: the chunk" in one.text for one in found)


def waiting(tmp_path, **seconds):
    """A run of which each execution but the first spent these seconds."""
    run = MadeRun(tmp_path / "run")
    for number in range(4):
        spent = {"device": 1.0, "compilation": 30.0} if not number else seconds
        run.grow({"loss": falling(10)}, times=[spent.get(name, 0.0) for name in ACTIVITIES])
    return FollowedRun(run.directory)


def test_a_device_that_waits_for_data(tmp_path):
    followed = waiting(tmp_path, device=1.0, data=3.0)
    (finding,) = findings(followed)
    assert finding.topic == "waits for data"
    assert "75 % of the time (9.0 s of 12.0 s)" in finding.text
    assert "about 4.0 times as fast" in finding.text
    assert dict(numbers(followed))["bound by"] == "data: the device waits for it 75 % of the time"
    assert time_rows(followed) == [
        ("it waits for data", "9.0 s, 75.0 %; without it 4.00 times as fast"),
        ("the device computes", "3.0 s, 25.0 %"),
        ("before: the first execution of each fit", "31.0 s, of which the compiler 30.0 s"),
    ]


@pytest.mark.parametrize("cause", [name for name in ACTIVITIES if name != "device"])
def test_each_wait_has_its_finding_and_a_short_one_has_none(tmp_path, cause):
    (finding,) = findings(waiting(tmp_path / "long", device=1.0, **{cause: 1.0}))
    assert finding.topic == f"waits for {cause}"
    assert findings(waiting(tmp_path / "short", device=1.0, **{cause: 0.1})) == []


def test_a_device_that_computes_is_the_limit(tmp_path):
    followed = waiting(tmp_path, device=1.9, host=0.1)
    assert findings(followed) == []
    assert dict(numbers(followed))["bound by"] == "the device: it computes 95 % of the time"


def test_a_long_start_is_noted(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.grow({"loss": falling(10)}, times=[1.0, 0, 99.0, 0, 0, 0, 0])
    run.grow({"loss": falling(10)}, times=[50.0, 0, 0, 0, 0, 0, 0])
    (finding,) = findings(FollowedRun(run.directory))
    assert finding.text.startswith("The start took 1 min 40 s, of which the compiler 1 min 39 s.")


def test_times_of_another_form_are_damage(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.grow({"loss": falling(10)}, times=[1.0, 2.0])
    followed = FollowedRun(run.directory)
    with pytest.raises(tr.TailraceError, match="not seconds of each activity"), followed.reading():
        findings(followed)
