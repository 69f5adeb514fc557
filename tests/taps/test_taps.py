"""Every mode and every reduction, over microbatches and replicas, against a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_steps import STATS, all_tensors, elements, exponents, loss_fn, network, statistics

import tailrace as tr
from covering import covering
from oracles import assert_bits_equal, assert_close
from tailrace.errors import OptionError, SelectionError

OPTIMIZER = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.05))
STEPS, PER_EXECUTION = 8, 4

NAMES = [
    "input/0",
    "loss",
    "aux/mae",
    "activation/hidden",
    "cotangent/hidden",
    "param/hidden/bias",
    "reduced/hidden/kernel",
    "update/out/kernel",
    "updated/hidden/bias",
    "optimizer/0/trace/out/kernel",
    "optimizer/1/count",
]
IN_EVERY_WAY = ["grad/hidden/kernel", "accumulated/out/kernel"]
"""One tensor of each microbatch and one of each step, reduced in every way."""


def spread(value):
    """A reduction of one's own, which returns a tree."""
    value = value.astype(jnp.float32)
    return {"range": value.max() - value.min(), "first": (value.ravel()[:1],)}


REDUCE = {
    "tensor": lambda v: v,
    "stats": statistics,
    "histogram": exponents,
    "norm": lambda v: np.sqrt((np.asarray(v).astype(np.float64) ** 2).sum()),
    spread: lambda v: {
        "range": np.float32(v.max() - v.min()),
        "first": (np.asarray(v, np.float32).ravel()[:1],),
    },
}


def kind_of(reduce):
    return reduce if isinstance(reduce, str) else reduce.__name__


@functools.cache
def oracle(microbatches, replicas):
    data = elements(STEPS * microbatches * replicas)
    return data, *all_tensors(OPTIMIZER, network(), data, STEPS, microbatches, replicas)


def executions():
    """The steps of each execution of the fit, where nothing is periodic."""
    return [range(i, min(i + PER_EXECUTION, STEPS)) for i in range(0, STEPS, PER_EXECUTION)]


def expected_values(values, mode):
    """What a mode keeps of the values of one tensor: [(where, value)] in order."""
    ordered = sorted(values.items())
    if mode == "all":
        return ordered
    if isinstance(mode, int):
        return [(w, v) for w, v in ordered if (w[0] + 1) % mode == 0]
    found = []
    for steps in executions():
        for replica in sorted({w[2] for w, _ in ordered}):
            here = [(w, v) for w, v in ordered if w[0] in steps and w[2] == replica]
            if mode == "final":
                found.append(here[-1])
            else:
                dtype = here[0][1].dtype
                total = np.sum([v for _, v in here], axis=0).astype(dtype)
                found.append(((steps[-1], -1, replica), total))
    return found


def assert_record(record, expected, reduce):
    """The record has these values, with these tags, in this order."""
    where = np.array([w for w, _ in expected])
    assert_bits_equal(record.steps, where[:, 0])
    assert_bits_equal(record.microbatches, where[:, 1])
    assert_bits_equal(record.replicas, where[:, 2])
    assert_bits_equal(record.stages, np.full(len(where), -1))
    for number, (_, value) in enumerate(expected):
        found = jax.tree.map(lambda v, n=number: v[n], record.values)
        plain = REDUCE[reduce](value)
        if reduce == "stats":
            for field in STATS:
                np.testing.assert_allclose(found[field], plain[field], 3e-5, 3e-6, err_msg=field)
        elif reduce == "histogram":
            assert found.sum() == value.size
            # A value at the edge of a bin may fall on either side of it.
            assert np.abs(found - plain).sum() <= 2 + value.size // 10
        else:
            wide = (found, plain) if reduce != "norm" else (found, np.float32(plain))
            assert_close(*jax.tree.map(np.asarray, wide))


@pytest.mark.parametrize(
    ("mode", "microbatches", "replicas"), covering(["all", "sum", "final", 3], [1, 3], [1, 2])
)
def test_every_mode_and_reduction(mode, microbatches, replicas):
    data, params, table = oracle(microbatches, replicas)
    tap_mode = tr.every(mode) if isinstance(mode, int) else mode
    trainer = tr.Trainer(
        loss_fn,
        OPTIMIZER,
        network(),
        accumulation=microbatches,
        replicas=replicas,
        steps_per_execution=PER_EXECUTION,
        observe=[
            tr.Tap(NAMES, mode=tap_mode, reduce="tensor"),
            *(tr.Tap(IN_EVERY_WAY, mode=tap_mode, reduce=reduce) for reduce in REDUCE),
        ],
    )
    trainer.fit(data, steps=STEPS)
    assert_close(trainer.params, params)
    assert len(trainer.records) == len(NAMES) + len(IN_EVERY_WAY) * len(REDUCE)
    for name in [*NAMES, *IN_EVERY_WAY]:
        expected = expected_values(table[name], mode)
        for reduce in REDUCE if name in IN_EVERY_WAY else ["tensor"]:
            assert_record(trainer.records[name, kind_of(reduce)], expected, reduce)


@pytest.mark.parametrize("per_execution", [1, 3, "auto"])
def test_several_periods_beside_each_other_and_beside_all(per_execution):
    data, _, table = oracle(1, 1)
    trainer = tr.Trainer(
        loss_fn,
        OPTIMIZER,
        network(),
        steps_per_execution=per_execution,
        observe=[
            tr.Tap("grad/out/*", mode=tr.every(4), reduce="tensor"),
            tr.Tap("activation/out", mode=tr.every(6), reduce="tensor"),
            tr.Tap("loss", mode="all", reduce="tensor"),
            tr.Tap("aux/mae", mode=tr.every(1), reduce="tensor"),
            tr.Tap("cotangent/out", mode=tr.every(8), reduce="tensor"),
        ],
    )
    trainer.fit(data, steps=STEPS)
    steps = {name: trainer.records[name].steps.tolist() for name in trainer.records.names}
    assert steps == {
        "grad/out/kernel": [3, 7],
        "activation/out": [5],
        "loss": list(range(STEPS)),
        "aux/mae": list(range(STEPS)),
        "cotangent/out": [7],
    }
    for name in trainer.records.names:
        record = trainer.records[name]
        for step, value in zip(record.steps, record.values, strict=True):
            assert_close(value, table[name][step, 0, -1])


def test_a_second_fit_starts_in_the_middle_of_a_period():
    data, _, table = oracle(1, 1)
    tap = tr.Tap("grad/out/kernel", mode=tr.every(4), reduce="tensor")
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), steps_per_execution=3, observe=[tap])
    trainer.fit(data[:2], steps=2)
    with pytest.raises(SelectionError, match=r"with mode=tr\.every\(n\) first in step n-1"):
        trainer.records["grad/out/kernel"]
    trainer.fit(data[2:7], steps=5)
    record = trainer.records["grad/out/kernel"]
    assert record.steps.tolist() == [3]
    for step, value in zip(record.steps, record.values, strict=True):
        assert_close(value, table["grad/out/kernel"][step, 0, -1])
    trainer.fit(data[7:], steps=1)
    record = trainer.records["grad/out/kernel"]
    assert record.steps.tolist() == [7]
    assert_close(record.values[0], table["grad/out/kernel"][7, 0, -1])


def test_records_are_those_of_the_latest_fit():
    data, _, table = oracle(1, 1)
    tap = tr.Tap("loss", reduce="tensor")
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), steps_per_execution=2, observe=tap)
    trainer.fit(data[:3], steps=3)
    assert trainer.records["loss"].steps.tolist() == [0, 1, 2]
    history = trainer.fit(data[3:], steps=5)
    record = trainer.records["loss"]
    assert record.steps.tolist() == list(range(3, 8))
    assert_bits_equal(record.values, np.asarray(history.loss, np.float32))
    assert_close(record.values, np.stack([table["loss"][t, 0, -1] for t in range(3, 8)]))


def test_one_tensor_may_have_several_taps_if_they_keep_something_else():
    data, *_ = oracle(1, 1)
    taps = [tr.Tap("grad/out/kernel"), tr.Tap("grad/*", mode=tr.every(2), reduce="norm")]
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), steps_per_execution=4, observe=taps)
    trainer.fit(data[:4], steps=4)
    assert len(trainer.records["grad/out/kernel", "stats"]) == 4
    assert len(trainer.records["grad/out/kernel", "norm"]) == 2
    assert len(trainer.records["grad/hidden/bias"]) == 2
    with pytest.raises(SelectionError, match=r"several taps: 'stats', 'norm'. Say which"):
        trainer.records["grad/out/kernel"]


def test_two_taps_that_keep_the_same_are_refused():
    taps = [tr.Tap("grad/*"), tr.Tap("*/out/*", mode="final")]
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=taps)
    with pytest.raises(OptionError, match="Two taps keep the same of one tensor: 'grad/out/kernel"):
        trainer.fit(elements(1), steps=1)


def test_a_tap_given_twice_counts_once():
    tap = tr.Tap("loss", reduce="tensor")
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tap, tap, "loss"])
    trainer.fit(elements(2), steps=2)
    assert set(trainer.records) == {("loss", "tensor"), ("loss", "stats")}


def test_a_bare_selection_means_statistics():
    for observe in ("loss", tr.Tap("loss"), ["loss"], lambda entry: entry.name == "loss"):
        trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=observe)
        trainer.fit(elements(2), steps=2)
        assert trainer.records["loss"].kind == "stats"


# -- what taps may not do -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "often"}, r"mode is one of 'all', 'sum', 'final', or tr.every\(n\). Received"),
        ({"reduce": "median"}, "reduce is one of 'tensor', 'stats', 'histogram', 'norm', or a JAX"),
    ],
)
def test_options_of_a_tap_are_checked(options, text):
    with pytest.raises(OptionError, match=text):
        tr.Tap("loss", **options)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "3"])
def test_a_period_is_a_whole_number(n):
    with pytest.raises(
        OptionError, match=r"n must be a whole number >= 1 in tr.every\(n\). Received"
    ):
        tr.every(n)


def test_an_unknown_name_lists_the_nearest():
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe="grad/hiden/kernel")
    with pytest.raises(
        SelectionError,
        match=r"(?s)'grad/hiden/kernel'.*'grad/hidden/kernel'.* trainer.tensors\(example\)\.$",
    ):
        trainer.fit(elements(1), steps=1)
    assert trainer.step == 0


def test_where_all_names_are_listed():
    observed = tr.observe(lambda x: x + 1, "grad/w")
    with pytest.raises(SelectionError, match=r"All names: tensors\(\*args\) of the observed func"):
        observed(1.0)
    with pytest.raises(SelectionError, match="All names: names of the catalogue"):
        observed.tensors(1.0)["grad/w"]
    with pytest.raises(
        SelectionError, match=r"All names: program.records.names, after a call with"
    ):
        tr.compile(lambda x: x + 1, observe="grad/w")(1.0)


def test_a_list_with_one_unknown_name_is_an_error_too():
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tr.Tap(["loss", "nothing"])])
    with pytest.raises(SelectionError, match="'nothing'"):
        trainer.fit(elements(1), steps=1)


def test_too_many_bytes_are_refused_before_anything_runs():
    tap = tr.Tap("activation/*", reduce="tensor")
    trainer = tr.Trainer(
        loss_fn,
        OPTIMIZER,
        network(),
        steps_per_execution=1000,
        accumulation=2,
        observe=[tap],
        observe_bytes=10_000,
    )
    with pytest.raises(OptionError) as caught:
        trainer.fit(elements(2), steps=1)
    text = str(caught.value)
    assert "execution of 1000 steps with 2 microbatches" in text
    for lever in ("tr.every(n)", "'sum' or 'final'", "reduce='stats'", "steps_per_execution"):
        assert lever in text
    assert "microbatches, or raise observe_bytes" in text
    assert "activation/hidden" in text
    assert trainer.step == 0


def test_executions_of_automatic_length_respect_the_limit():
    tap = tr.Tap("activation/hidden", reduce="tensor")  # 80 bytes a step
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tap], observe_bytes=400)
    trainer.fit(elements(40), steps=40)
    assert trainer.executions >= 8
    assert len(trainer.records["activation/hidden"]) == 40


def test_one_step_that_is_too_large_is_refused_in_automatic_length_too():
    tap = tr.Tap("activation/hidden", reduce="tensor")
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tap], observe_bytes=79)
    with pytest.raises(OptionError, match=r"largest is 'activation/hidden' \(tensor, 80 bytes"):
        trainer.fit(elements(4), steps=4)


# -- records ------------------------------------------------------------------------------------


def test_records_tell_what_they_are():
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tr.Tap("grad/*")])
    trainer.fit(elements(3), steps=3)
    records = trainer.records
    assert records.names == ["grad/hidden/bias", "grad/hidden/kernel", "grad/out/kernel"]
    assert "grad/out/kernel" in records
    assert ("grad/out/kernel", "stats") in records
    assert "grad/out" not in records
    assert len(records["grad/out/kernel"]) == 3
    assert repr(records["grad/out/kernel"]) == "Record('grad/out/kernel', stats, 3 values)"
    assert repr(records).splitlines()[0] == "Records(3 tensors)"
    assert records["grad/out/kernel"].values.dtype.names == STATS


@pytest.mark.parametrize("key", ["grad/out/kernle", ("grad/out/kernel", "norm")])
def test_records_that_are_not_there_name_the_nearest(key):
    trainer = tr.Trainer(loss_fn, OPTIMIZER, network(), observe=[tr.Tap("grad/*")])
    trainer.fit(elements(1), steps=1)
    with pytest.raises(SelectionError, match=r"(?s)There are no records of.*'grad/out/kernel'"):
        trainer.records[key]


def test_records_of_no_taps():
    records = tr.Trainer(loss_fn, OPTIMIZER, network()).records
    with pytest.raises(SelectionError, match="of 'grad/w'. There are none at all. Only what obs"):
        records["grad/w"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_statistics_of_every_step_beside_those_of_every_nth(accumulation):
    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        network(),
        accumulation=accumulation,
        observe=[tr.Tap("loss"), tr.Tap("grad/*", mode=tr.every(3))],
    )
    history = trainer.fit(elements(12 * accumulation), steps=12)
    losses = trainer.records["loss"].values["mean"].reshape(12, -1)
    assert_close(losses.mean(1).astype(np.float32), history.loss)
    assert sorted(set(trainer.records["grad/hidden/kernel"].steps)) == [2, 5, 8, 11]


def test_too_many_bytes_are_refused_before_a_program_runs():
    tap = tr.Tap("activation/*:sin", reduce="tensor")
    message = r"from one execution of 50 steps.*400 bytes a record.*every\(n\).*tr\.repeat"
    loop = lambda x: tr.repeat(50, jnp.sin, x)  # noqa: E731
    program = tr.compile(loop, observe=[tap], observe_bytes=50 * 400 - 1)
    with pytest.raises(OptionError, match=message):
        program(jnp.ones(100))
    program = tr.compile(loop, observe=[tap], observe_bytes=50 * 400)
    program(jnp.ones(100))
    assert program.records["activation/:sin"].values.shape == (50, 100)
    with pytest.raises(OptionError, match="400 bytes a record"):
        tr.observe(jnp.sin, [tap], observe_bytes=399)(jnp.ones(100))


def with_keys(params, state, x):
    """A loss with a random key in its model state, and constants as aux values."""
    after, key = jax.random.split(state["key"])
    loss = jnp.sum(params * x * jax.random.normal(key, x.shape))
    return loss, ({"key": after}, {"int": 1, "float": 2.5, "flag": True, "np": np.float32(3)})


def trained_with_keys(taps):
    trainer = tr.Trainer(
        with_keys,
        optax.sgd(0.1),
        jnp.ones(3),
        model_state={"key": jax.random.key(0)},
        observe=taps,
        steps_per_execution=2,
    )
    trainer.fit(list(np.ones((4, 2, 3), np.float32)), steps=4)
    return trainer


@pytest.mark.parametrize("reduce", ["stats", "tensor", "norm", "histogram"])
def test_random_keys_are_passed_over(reduce):
    """They are no numbers; a selection of all the others is not refused for their sake."""
    trainer = trained_with_keys([tr.Tap("*", reduce=reduce), tr.stop_on_nonfinite("*")])
    names = {name for name, _ in trainer.records}
    assert "buffer/key" not in names
    assert {"grad/params", "loss", "aux/int"} < names
    assert_close(trainer.params, trained_with_keys([]).params)
    with pytest.raises(
        SelectionError, match="random keys alone: buffer/key. Observe jax.random.key"
    ):
        trained_with_keys([tr.Tap("buffer/*", reduce=reduce)])


def test_constants_are_observed():
    records = trained_with_keys([tr.Tap("aux/*", reduce="tensor")]).records
    values = {name: records[name].values.tolist() for name in ("aux/int", "aux/float", "aux/np")}
    assert values == {"aux/int": [1] * 4, "aux/float": [2.5] * 4, "aux/np": [3.0] * 4}
    stats = trained_with_keys([tr.Tap("aux/*")]).records["aux/float"].values
    assert stats["mean"].tolist() == [2.5] * 4
