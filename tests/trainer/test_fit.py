"""`fit`: how many elements it takes, how long it goes on, what it leaves behind."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal, mlp, mlp_loss, plain_training, regression
from tailrace.errors import DataError, DataExhausted, OptionError, ProducerError, ProgramError
from threads import infeed_threads

ELEMENTS = regression(24)


def trainer_of(**options):
    options.setdefault("steps_per_execution", 2)
    return tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), **options)


class Counted:
    """A generator-like iterator over the elements that counts what was taken from it."""

    def __init__(self, elements=ELEMENTS):
        self.taken, self._elements = 0, iter(elements)

    def __iter__(self):
        return self

    def __next__(self):
        element = next(self._elements)
        self.taken += 1
        return element


# -- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [2, 5, "auto"])
@pytest.mark.parametrize(("accumulation", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_steps_take_exactly_their_elements(steps_per_execution, accumulation, replicas):
    source = Counted()
    trainer = trainer_of(
        steps_per_execution=steps_per_execution, accumulation=accumulation, replicas=replicas
    )
    history = trainer.fit(source, steps=5)
    assert source.taken == 5 * accumulation * replicas
    assert len(history.loss) == 5
    assert trainer.step == 5
    assert not infeed_threads()


def test_a_second_fit_goes_on_where_the_first_ended():
    source, trainer = Counted(), trainer_of()
    first, second = trainer.fit(source, steps=5), trainer.fit(source, steps=7)
    assert source.taken == 12
    params, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:12])
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(np.concatenate([first.loss, second.loss]), losses)
    assert second.steps.tolist() == list(range(5, 12))
    assert trainer.history is second
    assert trainer.step == 12


def test_no_steps():
    trainer = trainer_of()
    history = trainer.fit(ELEMENTS, steps=0)
    assert history.loss.shape == (0,)
    assert trainer.step == 0
    assert_bits_equal(trainer.params, mlp())


@pytest.mark.parametrize("known", [True, False])
def test_a_dataset_that_is_too_short(known):
    """It says the sum; what was trained until then stays, in the history too."""
    data = ELEMENTS[:7] if known else (lambda: iter(ELEMENTS[:7]))
    trainer = trainer_of()
    with pytest.raises(
        DataExhausted, match=r"10 x 1 x 1 = 10, .*This one has 7; \d steps were done"
    ):
        trainer.fit(data, steps=10)
    done = 0 if known else 6
    assert trainer.step == done
    assert len(trainer.history.loss) == done
    params, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:done])
    assert_bits_equal(trainer.params, jax.tree.map(np.asarray, params))
    if done:
        assert_bits_equal(trainer.history.loss, losses)
    assert not infeed_threads()


@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_of_less_than_a_step(known):
    """It speaks of epochs; a dataset of unknown length made the fit go on for ever."""
    data = ELEMENTS[:4] if known else (lambda: iter(ELEMENTS[:4]))
    trainer = trainer_of(accumulation=5)
    text = r"5 x 1 = 5, and an epoch has at least one step. This dataset has 4. Lower accumulation"
    with pytest.raises(DataExhausted, match=text):
        trainer.fit(data, epochs=1)
    assert trainer.step == 0


def test_a_dataset_that_is_shorter_than_its_length():
    class Longer(list):
        def __len__(self):
            return 8

    # A `for` loop ends where its iterator does, whatever `len()` says.
    assert len(trainer_of().fit(Longer(ELEMENTS[:5]), epochs=2).loss) == 10


def test_an_endless_dataset_needs_steps():
    trainer = trainer_of()
    endless = tr.batches((np.zeros((8, 3), np.float32), np.zeros(8, np.float32)), 4, repeat=True)
    with pytest.raises(DataError, match=r"repeats without end. Use fit\(steps=...\)"):
        trainer.fit(endless, epochs=1)
    trainer.fit(endless, steps=3)


# -- epochs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps_per_execution", [2, 3, 100, "auto"])
def test_epochs(known, steps_per_execution):
    data = ELEMENTS[:8] if known else (lambda: iter(ELEMENTS[:8]))
    trainer = trainer_of(steps_per_execution=steps_per_execution)
    history = trainer.fit(data, epochs=3)
    params, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:8] * 3)
    assert_bits_equal(history.loss, losses)
    assert_bits_equal(trainer.params, params)


def test_periodic_taps_lose_no_step_at_the_end():
    """Executions are cut where taps look; what is left behind the last cut is trained too."""
    tap = tr.Tap("loss", mode=tr.every(3), reduce="tensor")
    trainer = trainer_of(steps_per_execution=100, observe=[tap])
    history = trainer.fit(lambda: iter(ELEMENTS[:8]), epochs=2)
    _, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[:8] * 2)
    assert_bits_equal(history.loss, losses)


def test_one_epoch_is_the_default_and_none_is_none():
    trainer = trainer_of()
    assert len(trainer.fit(ELEMENTS).loss) == 24
    assert len(trainer.fit(ELEMENTS, epochs=0).loss) == 0


@pytest.mark.parametrize("known", [True, False])
def test_what_does_not_fill_a_step_is_left_out_and_noted(known, caplog):
    data = ELEMENTS[:11] if known else (lambda: iter(ELEMENTS[:11]))
    trainer = trainer_of(accumulation=2, replicas=2)
    history = trainer.fit(data, epochs=2)
    assert len(history.loss) == 4
    notes = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(notes) == 1
    assert notes[0] == (
        "The last 3 elements of the dataset do not fill a step of 4 and are left out."
    )


def test_epochs_of_shuffled_batches_differ_and_repeat():
    x, y = (np.concatenate(leaf) for leaf in zip(*ELEMENTS, strict=True))
    data = tr.batches((x, y), 4, shuffle=True, seed=1)
    histories = [trainer_of().fit(data, epochs=2) for _ in range(2)]
    assert_bits_equal(histories[0].loss, histories[1].loss)
    elements = [batch for epoch in range(2) for batch in data.iterate(epoch)]
    _, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), elements)
    assert_bits_equal(histories[0].loss, losses)


def test_one_shot_iterators_have_one_epoch():
    trainer = trainer_of()
    assert len(trainer.fit(iter(ELEMENTS), epochs=1).loss) == 24
    with pytest.raises(DataError, match=r"epochs=2.*can be read only once. Give a re-iterable"):
        trainer.fit(iter(ELEMENTS), epochs=2)


# -- callbacks ----------------------------------------------------------------------------------


class Diary(tr.Callback):
    def __init__(self, stop_at=None):
        self.begun = self.ended = 0
        self.executions, self.steps, self.stop_at = [], [], stop_at

    def on_fit_begin(self, trainer):
        self.begun += 1

    def on_execution_end(self, trainer, execution):
        self.executions.append((execution.first_step, execution.steps))
        assert len(execution.values["loss"]) == execution.steps

    def on_step_end(self, trainer, step, values):
        self.steps.append((step, values["loss"], values["mae"]))
        if step == self.stop_at:
            trainer.stop()

    def on_fit_end(self, trainer, history):
        self.ended += 1
        self.history = history


@pytest.mark.parametrize(("accumulation", "replicas"), [(1, 1), (2, 2)])
def test_callbacks_once_an_execution_and_once_a_step(accumulation, replicas):
    diary = Diary()
    trainer = trainer_of(accumulation=accumulation, replicas=replicas)
    trainer.fit(ELEMENTS, steps=1)
    history = trainer.fit(ELEMENTS, steps=5, callbacks=[diary])
    assert diary.executions == [(1, 2), (3, 2), (5, 1)]
    assert [step for step, _, _ in diary.steps] == [1, 2, 3, 4, 5]
    assert_bits_equal(np.float32([loss for _, loss, _ in diary.steps]), history.loss)
    assert_bits_equal(np.float32([mae for _, _, mae in diary.steps]), history["mae"])
    assert (diary.begun, diary.ended) == (1, 1)
    assert diary.history is history


def test_stop_ends_the_fit_after_the_execution_that_runs():
    diary = Diary(stop_at=1)
    trainer = trainer_of()
    history = trainer.fit(ELEMENTS, steps=20, callbacks=[diary])
    # Callbacks are called before the next execution goes out.
    assert len(history.loss) == 2
    assert [step for step, _, _ in diary.steps] == [0, 1]
    assert len(trainer.fit(ELEMENTS, steps=3).loss) == 3


def test_stop_ends_all_epochs():
    diary = Diary(stop_at=0)
    history = trainer_of().fit(ELEMENTS[:4], epochs=50, callbacks=[diary])
    assert len(history.loss) <= 6


def test_what_a_stopped_fit_staged_is_not_lost():
    """A one-shot iterator gives its next element to the next fit, none is skipped."""
    source, trainer = Counted(), trainer_of()
    done = len(trainer.fit(source, steps=20, callbacks=[Diary(stop_at=1)]).loss)
    history = trainer.fit(source, steps=3)
    _, losses = plain_training(mlp_loss, optax.sgd(0.1), mlp(), ELEMENTS[: done + 3])
    assert_bits_equal(history.loss, losses[done:])


def test_an_exception_in_a_callback_or_producer_ends_the_fit_cleanly():
    class Breaks(tr.Callback):
        def on_execution_end(self, trainer, execution):
            raise KeyError("mine")

    diary, trainer = Diary(), trainer_of()
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(ELEMENTS, steps=8, callbacks=[Breaks(), diary])
    assert diary.ended == 1
    assert not infeed_threads()

    def failing():
        yield from ELEMENTS[:5]
        raise OSError("disk on fire")

    with pytest.raises(ProducerError, match="raised OSError after 5 elements: disk on fire"):
        trainer.fit(failing(), steps=8)
    assert not infeed_threads()
    assert len(trainer.fit(ELEMENTS, steps=2).loss) == 2


# -- what stays ---------------------------------------------------------------------------------


def test_copies_of_the_parameters_survive_training():
    start = jax.tree.map(jnp.asarray, mlp())
    trainer = tr.Trainer(mlp_loss, optax.sgd(0.1, 0.9), start, steps_per_execution=2)
    copies = [trainer.params, trainer.state]
    trainer.fit(ELEMENTS, steps=3)
    copies += [trainer.params, trainer.state]
    kept = jax.tree.map(np.array, copies)
    trainer.fit(ELEMENTS, steps=6)
    assert_bits_equal(copies, kept)
    assert_bits_equal(start, mlp())
    assert_bits_equal(copies[0], mlp())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves([start, copies]))


def test_elements_of_another_form_get_their_own_program():
    trainer = trainer_of()
    small = regression(6, batch=2)
    first = trainer.fit(ELEMENTS, steps=4)
    second = trainer.fit(small, steps=4)
    third = trainer.fit(ELEMENTS[4:], steps=4)
    params, losses = plain_training(
        mlp_loss, optax.sgd(0.1), mlp(), [*ELEMENTS[:4], *small[:4], *ELEMENTS[4:8]]
    )
    assert_bits_equal(trainer.params, params)
    assert_bits_equal(np.concatenate([h.loss for h in (first, second, third)]), losses)


def test_a_second_fit_compiles_nothing(caplog):
    trainer = trainer_of(accumulation=2, replicas=2)
    trainer.fit(ELEMENTS, steps=6)
    trainer.evaluate(ELEMENTS)
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer.fit(ELEMENTS, steps=6)
        trainer.evaluate(ELEMENTS)
        trainer.fit(iter(ELEMENTS), steps=4)
    compiled = [
        r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()
    ]
    assert compiled == []


def test_executions_are_counted():
    trainer = trainer_of(steps_per_execution=4)
    trainer.fit(ELEMENTS, steps=10)
    assert trainer.executions == 3


# -- what fit refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        ({"steps": 2, "epochs": 2}, "steps= or epochs=, not both. Received: steps=2, epochs=2"),
        ({"steps": -1}, "steps must be a whole number >= 0. Received: steps=-1"),
        ({"steps": 2.5}, "steps must be a whole number >= 0. Received: steps=2.5"),
        ({"steps": True}, "Received: steps=True"),
        ({"epochs": "3"}, "Received: epochs='3'"),
        # As in Keras: fit(x, y, epochs=1).
        (
            {"steps": np.zeros((8, 2), np.float32), "epochs": 1},
            r"one dataset, then steps=.*steps=float32\[8, 2\]\. Inputs and labels are one dataset",
        ),
    ],
)
def test_bad_durations(duration, text):
    with pytest.raises(OptionError, match=text):
        trainer_of().fit(ELEMENTS, **duration)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3, optax.sgd(0.1), {"w": 1.0}), {}, OptionError, "loss_fn is a function of parameters"),
        ((mlp_loss, 0.1, {"w": 1.0}), {}, OptionError, r"with init and update. Received: 0.1.*sgd"),
        ((mlp_loss, optax.sgd(0.1), {}), {}, ProgramError, r"no parameters to train.*params=\{\}"),
        (
            (mlp_loss, optax.sgd(0.1), {"a": [np.arange(3)]}),
            {},
            ProgramError,
            r"Parameters are floats.*'a/0' of int32\[3\]. Keep integers in model_state",
        ),
        ((mlp_loss, optax.sgd(0.1), 1.0), {"steps_per_execution": 0}, OptionError, ">= 1, or"),
        ((mlp_loss, optax.sgd(0.1), 1.0), {"steps_per_execution": "all"}, OptionError, "or 'auto'"),
        ((mlp_loss, optax.sgd(0.1), 1.0), {"accumulation": 0}, OptionError, "accumulation=0"),
        ((mlp_loss, optax.sgd(0.1), 1.0), {"accumulation": 2.0}, OptionError, "accumulation=2.0"),
        ((mlp_loss, optax.sgd(0.1), 1.0), {"replicas": 9}, ProgramError, "take 9 x 1 = 9 devices"),
    ],
)
def test_what_a_trainer_refuses(arguments, options, error, text):
    with pytest.raises(error, match=text):
        tr.Trainer(*arguments, **options)


@pytest.mark.parametrize("seed", [1.5, "a", None, True])
def test_a_seed_is_a_whole_number(seed):
    text = rf"^seed must be a whole number. Received: seed={seed!r}\.$"
    with pytest.raises(OptionError, match=text):
        trainer_of(seed=seed)
    with pytest.raises(OptionError, match=text):
        tr.compile(lambda x: x, seed=seed)
    with pytest.raises(OptionError, match=text):
        tr.observe(lambda x: x, [], seed=seed)


def test_seeds_of_numpy():
    assert type(trainer_of(seed=np.int64(3)).seed) is int


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda t: trainer_of(learning_rate=3),
            "tr.Trainer.. got .* 'learning_rate'. It belongs to",
        ),
        (lambda t: trainer_of(epochs=3), "'epochs'. It is an argument of trainer.fit"),
        (lambda t: trainer_of(on_nonfinit="stop"), "Is 'on_nonfinite' meant"),
        (lambda t: trainer_of(zzz=1), "'zzz'. There are: loss_fn, optimizer, params, steps_per"),
        (
            lambda t: t.fit(ELEMENTS, run_dir="x"),
            "trainer.fit.. got .* is an argument of tr.Trainer",
        ),
        (lambda t: t.fit(ELEMENTS, epoch=2), "Is 'epochs' meant"),
    ],
)
def test_unknown_keywords_say_what_may_be_meant(call, text):
    with pytest.raises(TypeError, match=text):
        call(trainer_of())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"reduction": "max"},
            "reduction of gradients is one of 'sum', 'mean', 'running_mean'. Received: 'max'",
        ),
        ({"dtype": "int32"}, r"its dtype is a float. Received: dtype = int32. Use float32"),
        ({"dtype": "floaty"}, "dtype must be a dtype, or a function that returns one"),
        ({"dtype": 3}, "dtype must be a dtype"),
        ({"reduction": "sum", "weight": lambda x, y: 1.0}, "do not go with reduction='sum'"),
    ],
)
def test_what_an_accumulation_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        tr.Accumulation(4, **options)


def test_accumulations_that_fail_for_a_parameter():
    trainer = trainer_of(accumulation=tr.Accumulation(2, dtype=lambda p: jnp.int8))
    with pytest.raises(OptionError, match=r"chosen for .*hidden.*bias.* = int8"):
        trainer.fit(ELEMENTS, steps=1)
    assert tr.Accumulation(2, reduction="SUM").reduction is tr.Reduction.SUM


@pytest.mark.parametrize(
    ("loss_fn", "state", "text"),
    [
        (
            lambda p, x, y: x * p,
            None,
            r"returns one loss, a float scalar.*float32\[4, 3\]. Take its",
        ),
        (lambda p, x, y: jnp.int32(3), None, r"a loss of int32\[\]. Cast it to a float"),
        (lambda p, x, y: None, None, "Received: None. Is its return statement missing"),
        (
            lambda p, x, y: {"loss": p},
            None,
            r"or \(loss, aux\). Received: PyTreeDef\({'loss': \*}\)",
        ),
        (lambda p, x, y: (p, 1.0, 2.0), None, r"Received: PyTreeDef\(\(\*, \*, \*\)\)"),
        (lambda p, x, y: "low", None, "returns trees of arrays and numbers. Received: str. Leave"),
        (lambda p, x, y: (p, {"a": "b"}), None, r"Received: str at \[1\]\['a'\]. Leave it out"),
        (lambda p, s, x, y: (p, ({"s": len}, 0)), {"s": 1.0}, r"method at \[1\]\[0\]\['s'\]"),
        (lambda p: p, None, "does not fit"),
        (lambda p, s, x, y: p, {"s": 1.0}, r"returns \(loss, \(new_state, aux\)\). Received"),
        (
            lambda p, s, x, y: (p, ({"other": 1.0}, {})),
            {"s": 1.0},
            "The new model state has the structure of the old one",
        ),
    ],
)
def test_loss_functions_of_another_form(loss_fn, state, text):
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), jnp.float32(1), model_state=state)
    with pytest.raises(ProgramError, match=text):
        trainer.fit(ELEMENTS, steps=1)


@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"loss_scale": "dynamic"}])
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            jnp.ones(2),
            jnp.ones(3),
            r"s was float32\[2\] and came back as float32\[3\] from f. Cast",
        ),
        (jnp.ones(2), jnp.ones(2, jnp.bfloat16), r"came back as bfloat16\[2\]"),
        (jnp.ones(2), 1.0, r"came back as float32\[\]"),
        (jnp.int32(1), 1.5, r"s was int32\[\] and came back as float32\[\]"),
    ],
)
def test_a_model_state_that_changes_its_form_names_the_leaf(before, after, text, options):
    def f(p, s, x, y):
        return p, ({"s": after}, {})

    trainer = tr.Trainer(f, optax.sgd(0.1), jnp.float32(1), model_state={"s": before}, **options)
    with pytest.raises(ProgramError, match=text):
        trainer.fit(ELEMENTS, steps=1)


@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"loss_scale": "dynamic"}])
def test_a_model_state_may_come_back_as_a_number(options):
    trainer = tr.Trainer(
        lambda p, s, x, y: (p, ({"half": 3, "count": 2}, {})),
        optax.sgd(0.1),
        jnp.float32(1),
        model_state={"half": jnp.bfloat16(1), "count": jnp.int32(1)},
        **options,
    )
    trainer.fit(ELEMENTS, steps=2)
    assert trainer.model_state == {"half": 3, "count": 2}
    assert trainer.model_state["half"].dtype == jnp.bfloat16


def test_functions_that_return_something_else_than_arrays():
    """Each names the function and the leaf."""

    def names(p, x, y):
        return {"a": "b"}

    trainer = tr.Trainer(lambda p, x, y: p, optax.sgd(0.1), jnp.float32(1))
    with pytest.raises(ProgramError, match=r"names returns trees of arrays .* str at \['a'\]"):
        trainer.evaluate(ELEMENTS, fn=names)
    with pytest.raises(ProgramError, match="names returns trees of arrays .* Received: str at"):
        trainer.predict(ELEMENTS, names)
    tap = tr.Tap("grad/*", reduce=lambda value: "much")
    with pytest.raises(ProgramError, match="The function '<lambda>' of a tap returns trees of"):
        tr.Trainer(lambda p, x, y: p, optax.sgd(0.1), jnp.float32(1), observe=[tap]).fit(
            ELEMENTS, steps=1
        )
    named = optax.GradientTransformation(lambda params: {"name": "sgd"}, optax.sgd(0.1).update)
    with pytest.raises(
        ProgramError, match=r"optimizer.init returns .* Received: str at \['name'\]"
    ):
        tr.Trainer(lambda p, x, y: p, named, jnp.float32(1))
    with pytest.raises(ProgramError, match="An observed function returns .* Received: str"):
        tr.observe(lambda x: (x * 2, "twice"), "output/*")(1.0)


def test_a_state_that_is_set_loses_no_digits():
    trainer = tr.Trainer(
        lambda p, s, x, y: (p, (s, None)), optax.sgd(0.1), jnp.float32(1), model_state={"n": 1}
    )
    with pytest.raises(ProgramError, match=r"'model_state/n' is int32\[\]. Received: float32"):
        trainer.state = trainer.state._replace(model_state={"n": 1.5})


def test_a_weight_that_is_no_number():
    trainer = trainer_of(accumulation=tr.Accumulation(2, weight=lambda x, y: y))
    with pytest.raises(ProgramError, match=r"is one number. Received: shape \(4,\). Sum it"):
        trainer.fit(ELEMENTS, steps=1)


def test_a_dataset_that_is_none():
    with pytest.raises(OptionError, match="or give a dataset"):
        trainer_of().fit(None)
    with pytest.raises(DataExhausted, match="at least one element"):
        trainer_of().fit([])
    with pytest.raises(DataExhausted, match=r"3 x 2 = 6, .*This dataset has 5"):
        trainer_of(accumulation=3, replicas=2).fit(ELEMENTS[:5], epochs=1)


@pytest.mark.parametrize(("steps_per_execution", "period"), [(5, 10), ("auto", 30)])
def test_an_epoch_of_unknown_length_is_trained_whole_under_periodic_taps(
    steps_per_execution, period
):
    tap = tr.Tap("loss", mode=tr.every(period))
    trainer = trainer_of(steps_per_execution=steps_per_execution, observe=[tap])
    assert len(trainer.fit(lambda: iter(ELEMENTS[:17]), epochs=1).loss) == 17


@pytest.mark.parametrize("bad", [lambda *_: None, tr.Callback, object()])
def test_what_is_no_callback(bad):
    with pytest.raises(OptionError, match=r"object with the methods of tr\.Callback.*Derive"):
        trainer_of().fit(ELEMENTS, steps=2, callbacks=[bad])


def test_params_that_are_not_arrays():
    with pytest.raises(ProgramError, match=r"'act', a .*function.*close over the rest"):
        tr.Trainer(mlp_loss, optax.sgd(0.1), {**mlp(), "act": lambda x: x})
    with pytest.raises(ProgramError, match=r"model_state is a tree of arrays.*'name', a str"):
        tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), model_state={"name": "bn"})


def test_large_weights_do_not_overflow_narrow_accumulators():
    def weight(x):
        return 40_000.0

    def train(**options):
        trainer = tr.Trainer(
            lambda w, x: (w * x).sum(),
            optax.sgd(0.1),
            np.ones(3, np.float16),
            accumulation=tr.Accumulation(2, **options),
            replicas=2,
        )
        trainer.fit([np.full(3, i, np.float16) for i in range(8)], steps=2)
        return trainer.params

    assert_bits_equal(train(weight=weight), train(reduction="running_mean"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_history_covers_all_steps_when_a_fit_is_broken_off(error):
    class Breaks(tr.Callback):
        def on_step_end(self, trainer, step, values):
            if step == 3:
                raise error

    trainer = trainer_of()
    with pytest.raises(error):
        trainer.fit(ELEMENTS, steps=20, callbacks=[Breaks()])
    assert len(trainer.history.loss) == trainer.step < 20
