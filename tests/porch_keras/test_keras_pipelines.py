"""Stages: how they are assigned, what is refused, and that a pipelined fit equals the plain one."""

import contextlib

import keras
import numpy as np
import pytest
from keras_oracle import digits_like

import tailrace as tr
import tailrace.keras as tk
from oracles import assert_close
from tailrace.keras.optimizers.wrappers import Wrapper

L = keras.layers


def dense(units, name, **kwargs):
    return L.Dense(units, name=name, activation="relu", **kwargs)


def chain():
    return keras.Sequential(
        [keras.Input((6,)), dense(5, "a"), L.BatchNormalization(name="n"), L.Dense(4, "softmax")]
    )


def branched():
    """A shared layer, a skip connection, an operation, and an output of an early stage."""
    inputs = keras.Input((6,), name="in")
    with tk.PipelineStage(0):
        shared = dense(6, "shared", kernel_regularizer="l2")
        x = shared(inputs)
        early = L.Dense(2, name="early")(x)
    with tk.PipelineStage(1):
        y = dense(6, "middle")(x)
    with tk.PipelineStage(2):
        z = shared(y) + inputs
        late = L.Dense(4, activation="softmax", name="late")(L.Concatenate(name="cat")([z, x]))
    return keras.Model(inputs, {"early": early, "late": late})


def trained(
    make, pipelined, *, count=6, execution=6, replicas=1, targets=None, batches=12, **compiled
):
    """A model after some batches of 8, cut into stages or not."""
    keras.utils.set_random_seed(1)
    with tk.Strategy(replicas).scope():
        model = make()
    if pipelined:
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=count)
    else:
        model.reset_pipeline_stage_assignment()
        model.set_gradient_accumulation_options(count)
    compiled = {"optimizer": keras.optimizers.SGD(0.05), **compiled}
    compiled.setdefault("loss", "sparse_categorical_crossentropy")
    model.compile(**compiled, steps_per_execution=execution)
    x, y = digits_like(8 * batches)
    history = model.fit(
        x, y if targets is None else targets(y), batch_size=8, epochs=1, verbose=0, shuffle=False
    )
    return model, history.history


def assert_equal_to_plain(make, **call):
    plain, expected = trained(make, False, **call)
    staged, found = trained(make, True, **call)
    assert set(found) == set(expected)
    for name in expected:
        assert_close(np.float32(found[name]), np.float32(expected[name]))
    for a, b in zip(plain.variables, staged.variables, strict=True):
        assert_close(np.asarray(b.value), np.asarray(a.value))
    return staged


# -- training -----------------------------------------------------------------------------------


def test_the_accumulators_have_the_dtype_of_the_pipelining_options():
    with tk.Strategy(1).scope():
        model = branched()
    model.set_pipelining_options(6, gradient_accumulation_dtype="bfloat16")
    # That of the setter for models without stages has no effect, as the note says.
    model.set_gradient_accumulation_options(dtype="float16")
    pipeline = model.tailrace.loss_function(lambda *args: 0.0)
    assert isinstance(pipeline, tr.Pipeline)
    assert pipeline.accumulation.dtype == "bfloat16"


def test_a_branched_model_with_stages_named_where_layers_are_called():
    staged = assert_equal_to_plain(
        branched,
        loss={"early": "mse", "late": "sparse_categorical_crossentropy"},
        targets=lambda y: {"early": np.stack([y, y], 1).astype(np.float32), "late": y},
    )
    found = [
        (one.layer.name, one.node_index, one.pipeline_stage)
        for one in staged.get_pipeline_stage_assignment()
    ]
    assert found == [
        ("shared", 0, 0),
        ("early", 0, 0),
        ("middle", 0, 1),
        ("shared", 1, 2),
        ("cat", 0, 2),
        ("late", 0, 2),
    ]
    x, _ = digits_like(16)
    assert staged(x)["late"].shape == (16, 4)  # a plain call knows nothing of stages


def nested():
    inner = keras.Sequential([keras.Input((5,)), dense(5, "i"), dense(5, "j")], name="inner")
    inputs = keras.Input((6,))
    x = inner(dense(5, "first")(inputs))
    model = keras.Model(inputs, L.Dense(4, activation="softmax", name="last")(x + 1.0))
    model.set_pipeline_stage_assignment([0, [0, 1], 1])
    return model


def test_models_inside_a_model():
    staged = assert_equal_to_plain(nested, count=4, execution=4)
    assignment = staged.get_pipeline_stage_assignment()
    assert isinstance(assignment[1], tk.NestedModelStageAssignment)
    assert [one.pipeline_stage for one in assignment[1].pipeline_stage_assignments] == [0, 1]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        with tk.PipelineStage(0):
            self.first = dense(5, "first")
        self.norm, self.last = L.BatchNormalization(), L.Dense(4, activation="softmax")

    def call(self, x, training=None):
        x = self.first(x)
        with tk.PipelineStage(1):
            return self.last(self.norm(x, training=training))


def subclassed():
    model = Subclassed()
    model(digits_like(8)[0])
    return model


def four():
    """Four stages, for a number of microbatches that they do not divide."""
    layers = [dense(5, name) for name in "abc"]
    model = keras.Sequential([keras.Input((6,)), *layers, L.Dense(4, "softmax")])
    model.set_pipeline_stage_assignment([0, 1, 2, 3])
    return model


def test_ten_microbatches_through_four_stages():
    with pytest.raises(tr.TailraceError, match="multiple of 8, but it is 10.*sequential schedule"):
        trained(four, True, count=10, execution=10, batches=20)

    def sequential():
        model = four()
        model.set_pipelining_options(schedule="sequential")
        return model

    assert_equal_to_plain(sequential, count=10, execution=10, batches=20)


def test_a_subclassed_model():
    staged = assert_equal_to_plain(subclassed, count=4, execution=4)
    stages = [one.pipeline_stage for one in staged.get_pipeline_stage_assignment()]
    assert stages == [0, 1, 1]


class Inner(keras.Model):
    """A model inside; `named` gives the stages of its layers where they are called."""

    def __init__(self, named):
        super().__init__(name="inner")
        self.named, self.up, self.norm = named, dense(5, "up"), L.BatchNormalization(name="norm")
        self.more = keras.Sequential([dense(5, "m"), L.Dropout(0.0, name="n")], name="more")

    def call(self, x, training=None):
        with tk.PipelineStage(0) if self.named else contextlib.nullcontext():
            x = self.norm(self.up(x), training=training)
        with tk.PipelineStage(1) if self.named else contextlib.nullcontext():
            return x + self.more(x)


class Outer(keras.Model):
    def __init__(self, named):
        super().__init__()
        self.inner = Inner(named)
        with tk.PipelineStage(1) if named else contextlib.nullcontext():
            self.last = L.Dense(4, activation="softmax", name="last")

    def call(self, x, training=None):
        return self.last(self.inner(x, training=training))


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        (None, [0, 0, 1, 1, 1]),
        ([[0, 0, 1], 1], [0, 0, 1, 1, 1]),
        ([[0, 0, [0, 1]], 1], [0, 0, 0, 1, 1]),
        ([0, 1], [0, 0, 0, 0, 1]),
    ],
)
def test_subclassed_models_inside_subclassed_models(given, stages):
    def make():
        model = Outer(named=given is None)
        model(digits_like(8)[0])
        if given is not None:
            model.set_pipeline_stage_assignment(given)
        return model

    staged = assert_equal_to_plain(make, count=4, execution=4)
    inner, last = staged.get_pipeline_stage_assignment()
    assert inner.nested_model.name == "inner"
    up, norm, more = inner.pipeline_stage_assignments
    calls = (up, norm, *more.pipeline_stage_assignments, last)
    assert [one.pipeline_stage for one in calls] == stages
    assert [one.layer.name for one in calls] == ["up", "norm", "m", "n", "last"]


def cut_chain():
    model = chain()
    model.set_pipeline_stage_assignment([0, 0, 1])
    model.set_pipelining_options(schedule="interleaved")
    return model


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([L.Dense(5), L.Dense(5)])
        self.second = keras.Sequential([L.Dense(4)])

    def call(self, x):
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:.build... was called on layer")
@pytest.mark.parametrize("built", ["by its shape", "by a call"])
def test_models_inside_have_each_layer_once(built):
    with tk.Strategy().scope():
        model = Nested()
    if built == "by a call":
        model(np.zeros((2, 6), np.float32))
    else:
        model.build((None, 6))  # leaves the models inside unbuilt
    assignment = model.get_pipeline_stage_assignment()
    assert [len(one.pipeline_stage_assignments) for one in assignment] == [2, 1]
    for stage, nested in enumerate(assignment):
        for one in nested.pipeline_stage_assignments:
            one.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)


def test_replicas_of_a_pipeline_with_batch_norm():
    staged = assert_equal_to_plain(
        cut_chain, count=2, execution=2, replicas=2, metrics=["accuracy"]
    )
    x, y = digits_like(32)
    loss, accuracy = staged.evaluate(x, y, batch_size=8, verbose=0)
    assert 0 <= accuracy <= 1 < loss
    assert staged.predict(x, batch_size=8, verbose=0).shape == (32, 4)


def mapped(gradient, value):
    """Not linear: what it makes of a sum is not the sum of what it makes."""
    return keras.ops.clip(gradient, -0.02, 0.05) + 0.1 * value


class Idle(L.Layer):
    """A weight without a gradient: what the function makes of zero counts all the same."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")

    def call(self, x):
        return x


def chain_with_an_idle_weight():
    layers = [keras.Input((6,)), dense(5, "a"), Idle(name="i"), L.Dense(4, "softmax")]
    model = keras.Sequential(layers)
    model.set_pipeline_stage_assignment([0, 0, 1])
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_a_function_of_each_gradient(scaled):
    def optimizer():
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        if scaled:
            inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        return tk.MapGradientOptimizer(tk.MapGradientOptimizer(inner, lambda g, v: 2.0 * g), mapped)

    call = {"count": 4, "execution": 4}
    plain, _ = trained(chain_with_an_idle_weight, False, optimizer=optimizer(), **call)
    staged, _ = trained(chain_with_an_idle_weight, True, optimizer=optimizer(), **call)
    assert_close(staged.get_weights(), plain.get_weights())
    if scaled:
        return
    without, _ = trained(chain_with_an_idle_weight, True, **call)
    apart = np.abs(staged.get_weights()[0] - without.get_weights()[0]).max()
    assert apart > 1e-3, "the function changes something"


def test_functions_of_gradients_that_a_pipeline_refuses():
    shared = {"loss": {"early": "mse", "late": "sparse_categorical_crossentropy"}}
    with pytest.raises(
        tr.TailraceError, match=r"'shared/kernel' .* parts that stages \[0, 2\] make"
    ):
        trained(
            branched,
            True,
            **shared,
            optimizer=tk.MapGradientOptimizer("sgd", mapped),
            targets=lambda y: {"early": np.stack([y, y], 1).astype(np.float32), "late": y},
        )
    queue = tk.MaybeOutfeedQueue()
    model = made(cut_chain)
    model.set_pipelining_options(4)
    inner = tk.MapGradientOptimizer("sgd", mapped)
    sending = tk.OutfeedOptimizer(inner, queue, "after_compute", model=model)
    model.compile(sending, "sparse_categorical_crossentropy", steps_per_execution=4)
    with pytest.raises(ValueError, match="Put it inside the MapGradientOptimizer"):
        model.fit(*digits_like(32), batch_size=8, verbose=0)

    class Other(Wrapper):
        sees_each = True

    model.compile(Other("sgd"), "sparse_categorical_crossentropy", steps_per_execution=4)
    with pytest.raises(ValueError, match="Other cannot change them all at once"):
        model.fit(*digits_like(32), batch_size=8, verbose=0)


def small_resnet():
    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=4, pooling="avg"
    )
    assignment = model.get_pipeline_stage_assignment()
    names = [one.layer.name for one in assignment]
    border = names.index("conv4_block1_1_conv")
    for number, one in enumerate(assignment):
        one.pipeline_stage = int(number >= border)
    model.set_pipeline_stage_assignment(assignment)
    return model


@pytest.mark.exhaustive
def test_resnet50_cut_by_get_and_set():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 32, 32, 3)).astype(np.float32), rng.integers(0, 4, 16)
    changes = []
    for pipelined in (False, True):
        keras.utils.set_random_seed(1)
        with tk.Strategy().scope():
            model = small_resnet()
        if not pipelined:
            model.reset_pipeline_stage_assignment()
            model.set_gradient_accumulation_options(4)
        model.set_pipelining_options(4)
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.SGD(1e-5), loss, steps_per_execution=4)
        start = [np.asarray(v.value) for v in model.variables]
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        after = [np.asarray(v.value) for v in model.variables]
        changes.append([b - a for a, b in zip(start, after, strict=True)])
    # 50 layers with BatchNormalization over 4 examples amplify rounding: what counts is how a
    # variable changed as a whole.
    for a, b in zip(*changes, strict=True):
        assert np.linalg.norm(b - a) <= 1e-2 * np.linalg.norm(a) + 1e-7


def test_resnet50_is_cut_by_get_and_set_or_by_cost():
    with tk.Strategy().scope():
        model = small_resnet()
    assert len(model.get_pipeline_stage_assignment()) == len(model.layers) - 1
    model.set_pipeline_stage_assignment("auto", stages=4)
    stages = [one.pipeline_stage for one in model.get_pipeline_stage_assignment()]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2, 3}


# -- inspection ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "length"), [("before_apply", 3), ("after_compute", 12)])
def test_outfeeds_in_a_pipeline(mode, length):
    gradients, activations = tk.MaybeOutfeedQueue(filters=["a/"]), tk.MaybeOutfeedQueue()

    def make():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                dense(5, "a"),
                tk.MaybeOutfeed(activations, final_outfeed=False, name="a_acts"),
                L.Dense(4, activation="softmax", name="b"),
                tk.MaybeOutfeed(activations, name="b_acts"),
            ]
        )
        model.set_pipeline_stage_assignment([0, 1, 1, 1])
        return model

    def sent(pipelined):
        keras.utils.set_random_seed(1)
        with tk.Strategy().scope():
            model = make()
        if not pipelined:
            model.reset_pipeline_stage_assignment()
        model.set_gradient_accumulation_options(4)
        model.set_pipelining_options(4)
        optimizer = tk.OutfeedOptimizer(keras.optimizers.SGD(0.05), gradients, mode, model=model)
        model.compile(optimizer, "sparse_categorical_crossentropy", steps_per_execution=4)
        model.fit(*digits_like(96), batch_size=8, verbose=0, shuffle=False)
        return gradients.maybe_dequeue(), activations.maybe_dequeue()

    (plain, shown), (staged, seen) = sent(False), sent(True)
    assert list(staged) == list(plain) == ["a/bias:0_grad", "a/kernel:0_grad"]
    assert staged["a/kernel:0_grad"].shape == (length, 6, 5)
    assert list(seen) == ["a_acts", "b_acts"]
    assert seen["a_acts"].shape == (12, 8, 5)
    for a, b in ((plain, staged), (shown, seen)):
        for name in a:
            assert_close(b[name], a[name])


def test_taps_in_a_pipeline():
    staged, _ = trained(cut_chain, True, count=4, execution=4, observe=["grad/*", "activation/a"])
    assert staged.records["grad/a/kernel"].values.shape == (12,)
    assert staged.records["activation/a"].values.shape == (12,)


# -- assignment ---------------------------------------------------------------------------------


def made(make):
    with tk.Strategy().scope():
        return make()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((0, 0, 1), "needs to be a list"),
        ([0, 1], r"\(2\) does not match the number of layers in the graph \(3\)"),
        ([1, 1, 2], "first layer .* needs to be assigned to the 0th pipeline stage"),
        ([0, 0, 2], "same pipeline stage as the previous layer or to the next pipeline stage"),
        ([0, "x", 1], "must be instances of"),
        ([0, None, 1], "Layer n with node_index 0 has not been assigned a pipeline stage"),
    ],
)
def test_assignments_that_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        made(chain).set_pipeline_stage_assignment(stages)


def test_assignments_of_functional_models():
    with tk.Strategy().scope():
        model = nested()
        entries = model.get_pipeline_stage_assignment()
        with pytest.raises(ValueError, match="does not match the post-order"):
            model.set_pipeline_stage_assignment([entries[2], entries[1], entries[0]])
        model.reset_pipeline_stage_assignment()
        assert [getattr(one, "pipeline_stage", None) for one in entries] == [0, None, 1]
        fresh = model.get_pipeline_stage_assignment()
        assert fresh[0].pipeline_stage is None
        model.set_pipeline_stage_assignment([1, [0, 0], 1])
        model.set_pipelining_options(2)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        with pytest.raises(
            ValueError, match="has a dependency from a pipeline stage which has not"
        ):
            model.fit(*digits_like(16), batch_size=8, verbose=0)
        model.set_pipeline_stage_assignment([0, [2, 2], 4])
        with pytest.raises(tr.TailraceError, match=r"at lease one layer .* stages \[1, 3\] had no"):
            model.fit(*digits_like(16), batch_size=8, verbose=0)
        model.set_pipeline_stage_assignment([0, 0, 0])
        with pytest.raises(tr.TailraceError, match="at least two computational stages"):
            model.fit(*digits_like(16), batch_size=8, verbose=0)


def test_what_a_pipelined_fit_needs():
    model = made(chain)
    model.set_pipeline_stage_assignment([0, 0, 1])
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
    x, y = digits_like(32)
    with pytest.raises(ValueError, match="has not been set through set_pipelining_options"):
        model.fit(x, y, batch_size=8, verbose=0)
    model.set_pipelining_options(8)
    with pytest.raises(tr.TailraceError, match="The pipelined model has been configured to use"):
        model.fit(x, y, batch_size=8, verbose=0)
    model.compile(tk.GradientAccumulationOptimizer("sgd", 2), "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="A pipeline accumulates gradients itself"):
        model.fit(x, y, batch_size=8, verbose=0)


def test_stages_are_named_in_a_scope_and_for_all_layers():
    with pytest.raises(tr.TailraceError, match="only be used from within a tk.Strategy"):
        tk.PipelineStage(0).__enter__()
    with tk.Strategy().scope():
        with pytest.raises(ValueError, match="whole number of at least 0"):
            tk.PipelineStage(-1).__enter__()
        with tk.PipelineStage(0), pytest.raises(tr.TailraceError, match="must not be nested"):
            tk.PipelineStage(1).__enter__()
        inputs = keras.Input((6,))
        with tk.PipelineStage(0):
            x = dense(5, "staged")(inputs)
        with pytest.raises(ValueError, match="However, loose has not been assigned to one"):
            keras.Model(inputs, dense(4, "loose")(x))
        unbuilt = Subclassed()
        with pytest.raises(tr.TailraceError, match="has not been built yet"):
            unbuilt.get_pipeline_stage_assignment()


def test_saving_keeps_stages(tmp_path):
    model = made(nested)
    model.set_pipelining_options(4, device_mapping=[0, 0], schedule="sequential")
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert again.tailrace.options == model.tailrace.options
    assert again.get_pipeline_stage_assignment()[2].pipeline_stage == 1


def test_the_printed_summary():
    lines = []
    made(nested).print_pipeline_stage_assignment_summary(print_fn=lines.append)
    assert lines[1] == "_" * 89
    assert lines[2].split() == [
        "Layer",
        "(type)",
        "(node",
        "index)",
        "Input",
        "Layers",
        "Pipeline",
        "Stage",
    ]
    assert lines[4].split() == ["first", "(Dense)", "(0)", "0"]
    assert 'Nested Model: "inner"' in lines
    assert lines[-1] == "=" * 89
    lines.clear()
    made(chain).print_pipeline_stage_assignment_summary(print_fn=lines.append)
    assert lines[4].split() == ["a", "(Dense)", "None"]
    assert len(lines[1]) == 60
