"""Options of the wrong type: each is refused by its name, before anything is traced or trained."""

import numpy as np
import optax
import pytest

import tailrace as tr

X = np.ones((8, 2), np.float32)


class Odd:
    """Nothing in particular."""


ODD = Odd()
NO_NUMBER = ("a", ODD, [], 1j, None)
NO_COUNT = (*NO_NUMBER, 1.5, -1)
NO_FLAG = ("a", ODD, 2, [1])
NO_PATH = (3, ODD, b"x", "", "a\0b")
NO_TEXT = (3, ODD, "")


def loss_fn(w, x):
    return ((x - w) ** 2).mean()


def trainer_of(**options):
    given = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "params": np.float32(0), **options}
    return tr.Trainer(**given)


def fit(**options):
    trainer = trainer_of()
    try:
        trainer.fit(**{"dataset": [X, X], "progress": False, **options})
    except Exception:
        assert trainer.executions == 0, "it is refused before it trains"
        raise


def method(name, **good):
    return lambda **options: getattr(trainer_of(), name)(**{**good, **options})


def made(function, **good):
    return lambda **options: function(**{**good, **options})


LOOKING = {"step": 0, "dataset": [X], "checkpoint": "none"}
STEPS = (*NO_COUNT[:-2], -1)

CASES = {
    "Trainer": (
        trainer_of,
        {
            "loss_fn": (3, ODD),
            "optimizer": (3, ODD, "sgd"),
            "params": ("a", ODD, {}),
            "steps_per_execution": ("a", 0, 1.5, ODD),
            "accumulation": ("a", 0, 1.5, ODD),
            "replicas": ("a", 0, 1.5, ODD),
            "offload_optimizer_state": ("a", ODD),
            "shard_optimizer_state": ("a", ODD),
            "offload_activations": ("a", ODD),
            "model_state": ("a", ODD),
            "replica_state": ("a", 3, ODD),
            "seed": NO_NUMBER,
            "observe_bytes": NO_COUNT,
            "loss_scale": ("a", ODD, -1.0),
            "precision": ("float15", ODD, "int8"),
            "fingerprint": NO_FLAG,
            "sentinel": ("a", ODD, 2.0, -0.5),
            "on_nonfinite": ("a", 3, ODD),
            "run_dir": NO_PATH,
            "eval_fn": ("a", 3, ODD),
            "log": (3, ODD, "a"),
            "config": (3, ODD, "a", {1: 2}),
            "rewrites": (3, ODD, "boundaries", {"a": True}, {"boundaries": "off"}, {3: True}),
            "compiler_options": (3, ODD, "a", {3: True}, {"xla_nothing": 1}, {"xla_dump_to": [1]}),
        },
    ),
    "fit": (
        fit,
        {
            "dataset": (3, ODD, X, "a", None),
            "steps": ("a", ODD, 1.5, -1),
            "epochs": ("a", ODD, 1.5, -1),
            "validation_data": (3, ODD, X, "a"),
            "checkpoint": NO_PATH,
            "callbacks": (3, ODD, [ODD], [tr.Callback]),
            "progress": NO_FLAG,
            "timeout_s": ("a", ODD, 0, -1.0, float("nan")),
            "trace": NO_PATH,
            "inputs": (ODD,),
        },
    ),
    "fit by steps": (
        made(fit, validation_data=[X]),
        {"validation_every": ("a", ODD, 0, 1.5)},
    ),
    "save": (method("save"), {"path": NO_PATH}),
    "restore": (method("restore"), {"path": NO_PATH}),
    "predict": (
        method("predict", dataset=[X], fn=loss_fn),
        {"live": NO_FLAG, "dataset": (3, ODD), "timeout_s": ("a", ODD, 0)},
    ),
    "evaluate": (
        method("evaluate", dataset=[X]),
        {"dataset": (3, ODD), "combine": (3, ODD, "a"), "timeout_s": ("a", ODD, 0)},
    ),
    "replay": (method("replay", **LOOKING), {"step": STEPS, "checkpoint": NO_PATH}),
    "explain_step": (method("explain_step", **LOOKING), {"step": STEPS, "checkpoint": NO_PATH}),
    "rewind": (method("rewind", **LOOKING), {"step": STEPS, "checkpoint": NO_PATH}),
    "replay_bundle": (method("replay_bundle", example=X), {"bundle": NO_PATH}),
    "Checkpoint": (
        made(tr.Checkpoint, directory="a"),
        {
            "directory": (),
            "every": ("a", "0s", ODD, 0, 1.5, True),
            "keep": (*NO_COUNT, 0),
            "best": NO_TEXT,
        },
    ),
    "EarlyStopping": (
        tr.callbacks.EarlyStopping,
        {
            "monitor": NO_TEXT,
            "patience": NO_COUNT,
            "mode": ("a", 3, ODD, []),
            "min_delta": (*NO_NUMBER, float("nan")),
            "restore_best": NO_FLAG,
        },
    ),
    "CSVLogger": (tr.callbacks.CSVLogger, {"path": NO_PATH}),
    "TensorBoard": (tr.callbacks.TensorBoard, {"directory": NO_PATH}),
    "Metrics": (tr.callbacks.Metrics, {"fn": (3, ODD)}),
    "on_spike": (
        tr.on_spike,
        {"score": NO_NUMBER, "window": (*NO_COUNT, 0), "least": (*NO_COUNT, 0)},
    ),
    "batches": (
        made(tr.batches, arrays=X, batch_size=2),
        {
            "batch_size": (*NO_COUNT, 0),
            "shuffle": NO_FLAG,
            "repeat": NO_FLAG,
            "seed": NO_NUMBER,
        },
    ),
    "InfeedQueue": (
        made(tr.InfeedQueue, dataset=[X]),
        {"prefetch": NO_COUNT, "resident": ("a", ODD), "timeout_s": ("a", ODD, 0)},
    ),
    "open_run": (made(tr.open_run, directory="none"), {"limit": ("a", ODD, 0, 1.5)}),
    "diff": (
        made(tr.diff, first="none", second="none"),
        {"rtol": NO_NUMBER, "atol": NO_NUMBER},
    ),
    "stop_on_nonfinite": (tr.stop_on_nonfinite, {"bundle": NO_PATH}),
    "trace": (made(tr.trace, directory="a"), {"operations": ("a", ODD, -1)}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_option_is_refused_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, options = CASES[name]
    raw, unnamed = [], []
    for option, values in options.items():
        for value in values:
            try:
                function(**{option: value})
            except tr.TailraceError as error:
                if option not in str(error):
                    unnamed.append((option, value, str(error)))
            except Exception as error:
                raw.append((option, value, repr(error)))
            else:
                raw.append((option, value, "is accepted"))
    assert not raw
    assert not unnamed
    assert not list(tmp_path.iterdir()), "nothing is written"
