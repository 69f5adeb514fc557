"""The seed's program on inspecting tensors: its imports changed and its sizes cut, nothing else."""

import re

import numpy as np
import pytest

import tailrace as tr
from tailrace.compat import ipu

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

STEPS_PER_EXECUTION = 8


def process_filters(filters_input):
    if len(filters_input) == 1 and filters_input[0].lower() == "none":
        return None
    return filters_input


def create_dataset():
    images, labels = tr.data.digits()
    x_train = np.asarray(images).reshape(-1, 28, 28)[:640] / 255.0
    x_train = tf.expand_dims(x_train, -1)
    train_ds = (
        tf.data.Dataset.from_tensor_slices((x_train, np.asarray(labels)[:640]))
        .shuffle(len(x_train))
        .batch(32, drop_remainder=True)
    )
    return train_ds.map(lambda d, n: (tf.cast(d, tf.float32), tf.cast(n, tf.float32)))


def create_pipeline_sequential_model(multi_activations_outfeed_queue):
    seq_model = keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu", name="Dense_256"),
            keras.layers.Dense(128, activation="relu", name="Dense_128"),
            ipu.keras.MaybeOutfeed(
                multi_activations_outfeed_queue, final_outfeed=False, name="Dense_128_acts"
            ),
            keras.layers.Dense(10, activation="softmax", name="Dense_10"),
            ipu.keras.MaybeOutfeed(
                multi_activations_outfeed_queue, final_outfeed=True, name="Dense_10_acts"
            ),
        ]
    )
    seq_model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    seq_model.set_pipeline_stage_assignment([0, 0, 1, 1, 1, 1])
    return seq_model


def model_with_callbacks(gradients_filters, activations_filters):
    optimizer_q = ipu.keras.MaybeOutfeedQueue(filters=process_filters(gradients_filters))
    act_q = ipu.keras.MaybeOutfeedQueue(filters=process_filters(activations_filters))
    gradients_cb = ipu.keras.OutfeedCallback(outfeed_queue=optimizer_q, name="Gradients callback")
    multi_layer_cb = ipu.keras.OutfeedCallback(
        outfeed_queue=act_q, name="Multi-layer activations callback"
    )
    seq_model = create_pipeline_sequential_model(act_q)
    return seq_model, [gradients_cb, multi_layer_cb], optimizer_q


def run_the_program(mode, gradients_filters, activations_filters):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 2
    cfg.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        seq_model, callbacks, optimizer_outfeed_queue = model_with_callbacks(
            gradients_filters, activations_filters
        )
        seq_model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(),
            optimizer=ipu.keras.OutfeedOptimizer(
                wrapped_optimizer=keras.optimizers.SGD(),
                outfeed_queue=optimizer_outfeed_queue,
                outfeed_optimizer_mode=mode,
                model=seq_model,
            ),
            steps_per_execution=STEPS_PER_EXECUTION,
        )
        seq_model.fit(
            create_dataset(),
            callbacks=callbacks,
            steps_per_epoch=STEPS_PER_EXECUTION,
            epochs=2,
        )


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
@pytest.mark.parametrize(("mode", "steps"), [("BEFORE_APPLY", 2), ("AFTER_COMPUTE", 8)])
def test_the_program_prints_what_the_seed_shows(mode, steps, capsys):
    run_the_program(ipu.keras.OutfeedOptimizerMode[mode], ["Dense_128"], ["none"])
    printed = capsys.readouterr().out
    for line in (
        "Gradients callback",
        f"key: Dense_128/bias:0_grad shape: ({steps}, 128)",
        f"key: Dense_128/kernel:0_grad shape: ({steps}, 256, 128)",
        "Multi-layer activations callback",
        "key: Dense_128_acts shape: (8, 32, 128)",
        "key: Dense_10_acts shape: (8, 32, 10)",
        "Epoch 2 - Summary Stats",
    ):
        assert line in printed, printed
    assert "Dense_10/" not in printed
    header = r"Index Name +Mean +Std +Minimum +Maximum +NaNs +infs"
    assert len(re.findall(header, printed)) == 4
