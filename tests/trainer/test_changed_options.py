"""Every option of `tr.Trainer` and `fit`, changed between a killed run and its restart.

It has effect, is refused by a sentence, or is noted: none is ignored in silence.
"""

import inspect
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal
from tailrace.trainer.showing.option_texts import option_texts

pytest.importorskip("orbax.checkpoint")

X = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
Y = np.tanh(X.sum(1))
STEPS, KILLED_AT = 20, 10


def loss_fn(p, state, x, y):
    error = ((jnp.tanh(x @ p["a"]) @ p["w"] - y) ** 2).mean()
    return error, ({"seen": state["seen"] + x.astype(np.float32).mean()}, {"error": error})


def params():
    grown = np.arange(24, dtype=np.float32).reshape(4, 6) / 50
    return {"a": 0.2 + grown, "w": np.full(6, 0.14, np.float32)}


def tokens(x, y):
    return (y > 0).sum()


def others(x, y):
    return (y < 0).sum() + 1


class Named(tr.Callback):
    pass


MADE = {
    "loss_fn": loss_fn,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "params": params(),
    "model_state": {"seen": np.float32(0)},
    "steps_per_execution": 2,
    "accumulation": 2,
    "replicas": 2,
    "seed": 3,
}
FITTED = {"steps": STEPS, "progress": False}


def data(**options):
    return tr.batches((X, Y), 4, shuffle=True, seed=1, repeat=True, **options)


def script(folder, made=(), fitted=(), kill=False):
    """One start of a script, with some options of the trainer and of its fit."""
    trainer = tr.Trainer(**{**MADE, **dict(made)})
    call = {"dataset": data(), **FITTED, "checkpoint": tr.Checkpoint(folder / "kept", every=2)}
    call.update(fitted)
    if kill:
        call["callbacks"] = [*call.get("callbacks", ()), Kill(KILLED_AT // 2)]
        with pytest.raises(Killed):
            trainer.fit(**call)
    else:
        trainer.fit(**call)
    return trainer


class Starts:
    """Killed runs by the options of the first start; each restart gets a copy."""

    def __init__(self, factory):
        self.factory, self.made = factory, {}

    def restarted(self, first=(), second=(), fitted=(), again=()):
        key = repr((dict(first), dict(fitted)))
        if key not in self.made:
            self.made[key] = self.factory.mktemp("killed")
            script(self.made[key], first, fitted, kill=True)
        folder = self.factory.mktemp("again") / "folder"
        shutil.copytree(self.made[key], folder)
        return lambda: script(folder, second, again)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return Starts(tmp_path_factory)


@pytest.fixture(scope="module")
def unchanged(starts):
    """The end without any change, which is that of a script that is never killed."""
    trainer = starts.restarted()()
    assert len(trainer.history.loss) == STEPS
    return trainer


def differs(trainer, base):
    assert not np.array_equal(trainer.params["w"], base.params["w"])
    # Of the steps before the kill nothing changes.
    n = len(base.history.loss)
    assert len(trainer.history.loss) == n
    assert_bits_equal(trainer.history.loss[:KILLED_AT], base.history.loss[:KILLED_AT])
    assert np.isfinite(trainer.history.loss).all()


def same(trainer, base):
    assert_bits_equal(trainer.params, base.params)
    assert_bits_equal(trainer.history.loss, base.history.loss)


def weight(function):
    return {"accumulation": tr.Accumulation(2, weight=function)}


def scaled(trainer, base):
    same(trainer, base) if trainer.loss_scale == 128 else None
    assert trainer.loss_scale in (4.0, 3.0)


def column(name):
    """A column that earlier steps do not have: NaN there, values after."""

    def check(trainer, base):
        same(trainer, base)
        values = trainer.history[name]
        assert len(values) == STEPS
        assert np.isnan(values[:KILLED_AT]).all()
        assert np.isfinite(values[KILLED_AT:]).all()

    return check


def has(what):
    def check(trainer, base):
        same(trainer, base)
        assert what(trainer)

    return check


MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
PLAIN = {"rewrites": {"boundaries": False}}
ONE_PART = {"compiler_options": {"xla_cpu_parallel_codegen_split_count": 1}}


def said(trainer):
    """How the programs of a trainer are built, as its checkpoints say it."""
    return option_texts(trainer.engine)["build"]


REFUSED, NOTED = "refused", "noted"

# name, the trainer's options in the first start and in the second, what is said, and what is then so.
TRAINER = [
    (
        "loss_fn",
        {},
        {"loss_fn": lambda p, s, x, y: (loss_fn(p, s, x, 2 * y)[0], (s, {}))},
        None,
        None,
    ),
    (
        "optimizer",
        {},
        {"optimizer": optax.sgd(0.2, momentum=0.9)},
        (NOTED, "trained with optimizer: "),
        differs,
    ),
    ("optimizer", {}, {"optimizer": optax.sgd(0.1)}, (REFUSED, "does not have the form"), None),
    ("params", {}, {"params": {"a": params()["a"]}}, (REFUSED, "does not have the form"), None),
    (
        "params",
        {},
        {"params": jax.tree.map(lambda a: a + 1, params())},
        None,
        same,
    ),  # initial values
    ("steps_per_execution", {}, {"steps_per_execution": 5}, None, has(lambda t: t.executions == 2)),
    ("accumulation", {}, {"accumulation": 4}, (REFUSED, "elements of a step"), None),
    (
        "accumulation",
        {},
        {"accumulation": tr.Accumulation(2, "float16")},
        (REFUSED, "accumulation: "),
        None,
    ),
    ("accumulation", {}, weight(tokens), (NOTED, "weight: None, .*weight: tokens"), differs),
    ("accumulation", weight(tokens), {}, (NOTED, r"weight: tokens \(\w+\), .*weight: None"), None),
    (
        "accumulation",
        weight(tokens),
        weight(others),
        (NOTED, "weight: tokens .*weight: others"),
        None,
    ),
    (
        "accumulation",
        weight(lambda x, y: 1.0),
        weight(lambda x, y: y[0] + 2),
        (NOTED, "weight: <"),
        None,
    ),
    ("replicas", {}, {"replicas": 4}, (REFUSED, "elements of a step"), None),
    ("replicas", {}, {"replicas": 1, "accumulation": 4}, None, lambda t, base: t.replicas == 1),
    (
        "offload_optimizer_state",
        {},
        {"offload_optimizer_state": None},
        None,
        has(lambda t: t.decisions),
    ),
    (
        "shard_optimizer_state",
        {},
        {"shard_optimizer_state": True},
        None,
        has(lambda t: t.decisions),
    ),
    ("offload_activations", {}, {"offload_activations": True}, None, has(lambda t: t.decisions)),
    (
        "model_state",
        {},
        {"model_state": {"seen": np.int32(0)}},
        (REFUSED, "does not have the form"),
        None,
    ),
    ("replica_state", {}, {"replica_state": "each"}, (NOTED, "replica_state: mean, .*each"), None),
    ("seed", {}, {"seed": 4}, (REFUSED, "seed: 3 there, 4 here"), None),
    (
        "observe",
        {},
        {"observe": ["grad/w"]},
        None,
        has(lambda t: len(t.records["grad/w"].steps) > 0),
    ),
    ("observe_bytes", {}, {"observe_bytes": 1 << 20}, None, same),
    (
        "eval_fn",
        {},
        {"eval_fn": lambda p, s, x, y: 7.0},
        None,
        has(lambda t: t.evaluate([(X, Y)]) == {"loss": 7}),
    ),
    (
        "loss_scale",
        {},
        {"loss_scale": 128.0},
        (REFUSED, "loss_scale/scale: float32.. here, missing"),
        None,
    ),
    (
        "loss_scale",
        {"loss_scale": 128.0},
        {"loss_scale": 4.0},
        (NOTED, "initial=128.0.*initial=4.0"),
        scaled,
    ),
    (
        "loss_scale",
        {"loss_scale": "dynamic"},
        {"loss_scale": 3.0},
        (NOTED, "initial=32768.0"),
        scaled,
    ),
    (
        "loss_scale",
        {"loss_scale": 128.0},
        {"loss_scale": "dynamic"},
        (NOTED, "from its scale of 128"),
        None,
    ),
    (
        "precision",
        {},
        {"precision": "bfloat16"},
        (NOTED, "precision: None, .*precision: bfloat16"),
        differs,
    ),
    ("fingerprint", {}, {"fingerprint": True}, None, has(lambda t: t.history.fingerprints)),
    ("sentinel", {}, {"sentinel": 1.0}, None, has(lambda t: t.engine.sentinel is not None)),
    ("on_nonfinite", {}, {"on_nonfinite": "skip"}, None, column("skipped")),
    ("log", {}, {"log": "grad_norm"}, None, column("grad_norm")),
    ("ema", {}, {"ema": 0.9}, (REFUSED, "does not have the form"), None),
    ("mesh", {}, {"mesh": MESH}, (REFUSED, "has no replicas="), None),
    ("shard", {}, {"shard": "fsdp"}, (REFUSED, "shard= says how .* there is none"), None),
    (
        "batch_axes",
        {},
        {"batch_axes": "data"},
        (REFUSED, "batch_axes= says how .* there is none"),
        None,
    ),
    ("device", {}, {"device": jax.devices()[0]}, (REFUSED, "replicas=2 as well"), None),
    ("rewrites", PLAIN, {}, None, has(lambda t: said(t) == "rewrites convolutions")),
    ("rewrites", {}, PLAIN, (NOTED, "build: .*boundaries, .*build: rewrites conv"), same),
    ("compiler_options", ONE_PART, {}, None, has(lambda t: said(t).endswith("split_count=1"))),
    ("compiler_options", {}, ONE_PART, (NOTED, "build: .*split_count=1"), same),
]
# name, the arguments of fit in the second start, as above; `run_dir` and `config` are below.
FIT = [
    ("dataset", {"dataset": [(X[:4], Y[:4])] * 80}, (REFUSED, "begun with: tr.batches"), None),
    ("dataset", {"dataset": tr.batches((X, Y), 5, repeat=True)}, (REFUSED, "batch"), None),
    ("steps", {"steps": 24}, None, lambda t, base: len(t.history.loss) == 24),
    ("steps", {"steps": 6}, (NOTED, "holds a fit that went further"), None),
    (
        "epochs",
        {"steps": None, "epochs": 2},
        (REFUSED, "(what fit counts|repeats without end)"),
        None,
    ),
    (
        "validation_data",
        {"validation_data": [(X, Y)]},
        None,
        has(lambda t: "val_loss" in t.history),
    ),
    (
        "validation_every",
        {"validation_data": [(X, Y)], "validation_every": 4},
        None,
        has(lambda t: t.history.validated.tolist() == [12, 16, 20]),
    ),
    ("callbacks", {"callbacks": [Named()]}, None, same),
    ("progress", {"progress": True}, None, same),
    ("timeout_s", {"timeout_s": 60.0}, None, same),
    ("inputs", {"inputs": (1,)}, (REFUSED, "pipeline"), None),
]


def check(starts, base, options, says, holds, caplog):
    first, second, again = options
    restart = starts.restarted(first, second, (), again)
    kind, text = says or (None, None)
    if kind == REFUSED:
        with pytest.raises(tr.TailraceError, match=text):
            restart()
        return
    trainer = restart()
    found = " ".join(record.getMessage() for record in caplog.records)
    if kind == NOTED:
        assert re.search(text, found), found
    else:
        assert "trained with" not in found
    if holds is not None:
        holds(trainer, base)


@pytest.mark.parametrize("row", TRAINER, ids=lambda row: row[0])
def test_an_option_of_the_trainer(starts, unchanged, row, caplog):
    first, second, says, holds = row[1:]
    check(starts, unchanged, (first, second, ()), says, holds, caplog)


@pytest.mark.parametrize("row", FIT, ids=lambda row: row[0])
def test_an_argument_of_fit(starts, unchanged, row, caplog):
    again, says, holds = row[1:]
    check(starts, unchanged, ({}, {}, again), says, holds, caplog)


def test_no_option_is_missing():
    """A new one needs a row."""
    tested = {row[0] for row in TRAINER} | {"run_dir", "config"}
    assert tested == set(inspect.signature(tr.Trainer.__init__).parameters) - {"self"}
    apart = {"checkpoint", "trace"}  # test_what_is_best.py and below; a file of its own
    assert {row[0] for row in FIT} | apart == set(inspect.signature(tr.Trainer.fit).parameters) - {
        "self"
    }
