"""Every option of `tr.Trainer`, for a step of the user's own: it works, or is refused by name."""

import inspect
import json

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import OptionError

DATA = [np.full(4, number, np.float32) for number in range(8)]


def step(state, x):
    value, grad = jax.value_and_grad(lambda w: ((w - x) ** 2).mean())(state["w"])
    grad = tr.mark(tr.cross_replica_mean(grad), "grad/w")
    return {"w": state["w"] - 0.1 * grad}, {"loss": value, "drawn": jax.random.uniform(tr.key())}


def trainer_of(**options):
    return tr.Trainer.from_step(step, {"w": np.float32(0)}, **options)


def fitted(data=DATA, **options):
    trainer = trainer_of(**options)
    trainer.fit(data, epochs=1)
    return trainer


def same_state(trainer):
    assert_bits_equal(trainer.state, fitted().state)
    return trainer


# -- what works ---------------------------------------------------------------------------------


def steps_per_execution(folder):
    assert same_state(fitted(steps_per_execution=2)).executions == 4


def replicas(folder):
    assert fitted(replicas=2).history.each("loss").shape == (4, 1, 2)
    assert trainer_of(replicas=None).replicas == len(jax.devices())


def replica_state(folder):
    assert fitted(replicas=2, replica_state="each").state["w"].shape == (2,)
    with pytest.raises(
        OptionError, match="replica_state is None .* Received: replica_state='mean'"
    ):
        trainer_of(replica_state="mean")


def seed(folder):
    drawn = [fitted(seed=number).history["drawn"] for number in (0, 0, 1)]
    assert_bits_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def observe(folder):
    assert same_state(fitted(observe="state/*")).records.names == ["state/w"]


def observe_bytes(folder):
    with pytest.raises(OptionError, match="observe_bytes"):
        fitted(observe=[tr.Tap("*", reduce="tensor")], observe_bytes=1)


def fingerprint(folder):
    assert same_state(fitted(fingerprint=True)).history.fingerprints["model_state"].all()


def sentinel(folder):
    assert same_state(fitted(sentinel=1.0)).executions


def on_nonfinite(folder):
    data = [*DATA[:3], np.full(4, np.nan, np.float32), *DATA[4:]]
    assert fitted(data, on_nonfinite="skip").history["skipped"].sum() == 1
    with pytest.raises(tr.errors.NonFiniteError, match="step 3"):
        fitted(data, on_nonfinite="stop")


def run_dir(folder):
    trainer = same_state(fitted(run_dir=folder / "run"))
    assert_bits_equal(tr.open_run(folder / "run").history.loss, trainer.history.loss)


def eval_fn(folder):
    trainer = fitted(eval_fn=lambda state, x: {"far": abs(state["w"] - x).mean()})
    assert list(trainer.evaluate(DATA)) == ["far"]


def log(folder):
    trainer = fitted(log={"learning_rate": optax.linear_schedule(1.0, 0.0, 8), "mfu": 1e12})
    assert trainer.history["learning_rate"].tolist() == np.linspace(1, 0, 9)[:8].tolist()
    assert "mfu" in trainer.history.names
    history = rates_of_two_optimizers()
    assert set(history["learning_rate/d"]) == {0.5}
    assert set(history["learning_rate/g"]) == {0.25}
    with pytest.raises(OptionError, match="log='grad_norm'.*Return it as a metric"):
        trainer_of(log="grad_norm")
    with pytest.raises(OptionError, match="log='learning_rate' reads the rate"):
        trainer_of(log="learning_rate")


def rates_of_two_optimizers():
    opts = {n: optax.inject_hyperparams(optax.sgd)(rate) for n, rate in (("d", 0.5), ("g", 0.25))}
    state = {name: (np.float32(0), opt.init(np.float32(0))) for name, opt in opts.items()}

    def both(state, x):
        after = {
            name: (w + opts[name].update(x.mean() - w, opt)[0], opt)
            for name, (w, opt) in state.items()
        }
        return after, {"loss": x.mean()}

    trainer = tr.Trainer.from_step(both, state, log="learning_rate")
    trainer.fit(DATA, epochs=1)
    return trainer.history


def config(folder):
    fitted(config={"mine": 1}, run_dir=folder / "run")
    assert tr.open_run(folder / "run").info["config"] == {"mine": 1}


def rewrites(folder):
    same_state(fitted(rewrites={"boundaries": False}))


def compiler_options(folder):
    options = {"xla_cpu_enable_fast_math": False}
    trainer = same_state(fitted(compiler_options=options))
    assert "xla_cpu_enable_fast_math=False" in str(trainer.explain(DATA[0]))


WORKS = {
    made.__name__: made
    for made in (
        steps_per_execution,
        replicas,
        replica_state,
        seed,
        observe,
        observe_bytes,
        fingerprint,
        sentinel,
        on_nonfinite,
        run_dir,
        eval_fn,
        log,
        config,
        rewrites,
        compiler_options,
    )
}

REFUSED = {
    "loss_fn": (step, "call jax.value_and_grad in it"),
    "optimizer": (optax.sgd(0.1), "keep it in the state, and update in the step"),
    "params": (np.float32(0), "Put the parameters into the state"),
    "model_state": (np.float32(0), "Put it into the state"),
    "accumulation": (2, "optax.MultiSteps as its optimizer"),
    "loss_scale": ("dynamic", "keep the scale in the state"),
    "precision": ("bfloat16", r"x.astype\('bfloat16'\)"),
    "offload_optimizer_state": (True, "jax.device_put and a memory kind"),
    "shard_optimizer_state": (True, "an optimizer that keeps less"),
    "offload_activations": (True, "jax.checkpoint around layers"),
    "ema": (0.999, "optax.incremental_update"),
    "mesh": (None, r"replicas= and tr.cross_replica_mean"),
    "shard": ("fsdp", r"replicas= and tr.cross_replica_mean"),
    "batch_axes": ((), r"tr.Trainer\(..., mesh=, shard=\)"),
    "device": (None, "tr.configure chooses the devices"),
}


def test_no_option_is_forgotten():
    options = {*inspect.signature(tr.Trainer).parameters} - {"self"}
    assert options <= {*WORKS, *REFUSED}
    assert {*inspect.signature(tr.Trainer.from_step).parameters} == {"step_fn", "state", *WORKS}


@pytest.mark.parametrize("option", WORKS)
def test_an_option_works(option, tmp_path):
    WORKS[option](tmp_path)


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_is_refused_with_what_to_write(option):
    value, text = REFUSED[option]
    with pytest.raises(OptionError, match=f"from_step has no {option}=. Received: .*{text}"):
        trainer_of(**{option: value})


def test_an_option_that_nobody_has_is_not_known():
    with pytest.raises(TypeError, match="unexpected keyword argument 'seeds'. Is 'seed' meant"):
        trainer_of(seeds=1)
    with pytest.raises(TypeError, match="'learning_rate'. It belongs to the optimizer"):
        trainer_of(learning_rate=1)


def test_what_needs_a_loss_is_refused(tmp_path):
    trainer = trainer_of()
    trainer.fit(DATA, epochs=1, checkpoint=tmp_path / "kept")
    with pytest.raises(
        OptionError, match="explain_step calls the loss.*Received: a step of your own"
    ):
        trainer.explain_step(3, DATA, checkpoint=tmp_path / "kept")
    with pytest.raises(OptionError, match="inputs belong to a pipeline"):
        trainer.set_inputs([1])
    with pytest.raises(
        tr.errors.ProgramError, match="report says what the stages of a pipeline cost"
    ):
        trainer.report()
    assert trainer.loss_scale is None
    assert trainer.plan is None
    note = json.dumps(trainer.profile(DATA * 10).to_json())
    assert "forward" in note or "step" in note
