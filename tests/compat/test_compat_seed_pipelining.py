"""The seed's program on pipelining with Keras: its imports changed and its sizes cut, nothing else.

One process configures 1 device, then 2, then 1 again, and trains a fresh model each time.
"""

from typing import Optional

import numpy as np
import pytest

import tailrace as tr
from oracles import assert_close
from tailrace.compat import ipu

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from keras import Model, Sequential  # noqa: E402
from keras.layers import Dense, Flatten, Input  # noqa: E402

BATCH_SIZE = 8
STEPS_PER_EXECUTION = 8
STEPS_PER_EPOCH = STEPS_PER_EXECUTION
EPOCHS = 2
LEARNING_RATE = 0.01
MOMENTUM = 0.9
STEPS_PER_REPLICA = 4


@pytest.fixture
def digits(monkeypatch):
    """The digits that are here instead of those that would be downloaded, in a fixed order."""
    images, labels = tr.data.digits()
    images = np.asarray(images).reshape(-1, 28, 28)[:160]
    labels = np.asarray(labels)[:160]
    monkeypatch.setattr(
        keras.datasets.mnist, "load_data", lambda: ((images, labels), (images[:8], labels[:8]))
    )
    return images, labels


# -- the program ----------------------------------------------------------------------------------


def create_dataset(batch_size: int, repeat=True):
    mnist = keras.datasets.mnist
    (x_train, y_train), (x_test, _) = mnist.load_data()
    x_train, x_test = x_train / 255.0, x_test / 255.0

    train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train_ds = train_ds.batch(batch_size, drop_remainder=True)
    train_ds = train_ds.map(lambda d, n: (tf.cast(d, tf.float32), tf.cast(n, tf.float32)))
    return train_ds.repeat() if repeat else train_ds


def make_ipu_config(
    num_ipus: int,
    selection_order: Optional[ipu.utils.SelectionOrder] = None,  # noqa: UP045 -- as the seed has it
) -> ipu.config.IPUConfig:
    ipu_configuration = ipu.config.IPUConfig()
    ipu_configuration.auto_select_ipus = num_ipus
    if selection_order:
        ipu_configuration.selection_order = selection_order
    ipu_configuration.configure_ipu_system()
    return ipu_configuration


def train(
    strategy,
    model_factory,
    train_ds,
    steps_per_replica: int = STEPS_PER_REPLICA,
    steps_per_execution: int = STEPS_PER_EXECUTION,
    steps_per_epoch: int = STEPS_PER_EPOCH,
    epochs: int = EPOCHS,
):
    with strategy.scope():
        model = model_factory()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM),
            steps_per_execution=steps_per_execution,
        )
        if steps_per_replica:
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=steps_per_replica)
        model.fit(train_ds, steps_per_epoch=steps_per_epoch, epochs=epochs)
        return model


def create_functional_model(batch_size=BATCH_SIZE):
    input_layer = Input(shape=(28, 28, 1), dtype=tf.float32, batch_size=batch_size)
    x = Flatten(name="flatten")(input_layer)
    x = Dense(256, activation="relu", name="dense256")(x)
    x = Dense(128, activation="relu", name="dense128")(x)
    x = Dense(64, activation="relu", name="dense64")(x)
    x = Dense(32, activation="relu", name="dense32")(x)
    x = Dense(10, name="logits")(x)
    return Model(inputs=input_layer, outputs=x, name="singleIPU")


def layers_of_the_sequential_model():
    return [
        Flatten(name="flatten"),
        Dense(256, activation="relu", name="dense256"),
        Dense(128, activation="relu", name="dense128"),
        Dense(64, activation="relu", name="dense64"),
        Dense(32, activation="relu", name="dense32"),
        Dense(10, activation="softmax", name="logits"),
    ]


def create_sequential_model():
    return Sequential(layers=layers_of_the_sequential_model(), name="singleIPU")


def create_functional_model_with_stages():
    input_layer = Input(shape=(28, 28, 1), dtype=tf.float32, batch_size=BATCH_SIZE)
    with ipu.keras.PipelineStage(0):
        x = Flatten(name="flatten")(input_layer)
        x = Dense(256, activation="relu", name="dense256")(x)
        x = Dense(128, activation="relu", name="dense128")(x)
        x = Dense(64, activation="relu", name="dense64")(x)
    with ipu.keras.PipelineStage(1):
        x = Dense(32, activation="relu", name="dense32")(x)
        x = Dense(10, name="logits")(x)
    return Model(inputs=input_layer, outputs=x, name="multipleIPUfunctional")


def create_pipeline_sequential_model():
    seq_model = Sequential(layers=layers_of_the_sequential_model(), name="multipleIPUsequential")
    seq_model.set_pipeline_stage_assignment([0, 0, 1, 1, 1, 1])
    return seq_model


def create_pipeline_sequential_model_interleaved():
    seq_model = Sequential(layers=layers_of_the_sequential_model(), name="multipleIPUsequential")
    seq_model.set_pipeline_stage_assignment([0, 0, 1, 1, 1, 1])
    seq_model.set_pipelining_options(schedule=ipu.ops.pipelining_ops.PipelineSchedule.Interleaved)
    return seq_model


# -- what it must come to -------------------------------------------------------------------------


def plain(model, digits, microbatches):
    """Plain Keras on batches that join several of the seed's: the sum of their gradients."""
    images, labels = digits
    images = (images / 255.0).astype(np.float32)[..., None]
    size = BATCH_SIZE * microbatches
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(LEARNING_RATE * microbatches, momentum=MOMENTUM),
    )
    for step in range(STEPS_PER_EPOCH * EPOCHS // microbatches):
        rows = np.arange(step * size, (step + 1) * size) % len(images)
        model.train_on_batch(images[rows], labels[rows].astype(np.float32))
    return model


@pytest.mark.parametrize(
    ("factory", "alike", "devices", "microbatches"),
    [
        (create_functional_model, create_functional_model, 1, 1),
        (create_sequential_model, create_sequential_model, 1, 1),
        (create_functional_model_with_stages, create_functional_model, 2, 4),
        (create_pipeline_sequential_model, create_sequential_model, 2, 4),
        (create_pipeline_sequential_model_interleaved, create_sequential_model, 2, 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*from_logits=True.*:UserWarning")
def test_the_program_trains(factory, alike, devices, microbatches, digits):
    train_ds = create_dataset(batch_size=BATCH_SIZE)
    for count in (1, devices):
        make_ipu_config(num_ipus=count)
    keras.utils.set_random_seed(0)
    model = train(ipu.ipu_strategy.IPUStrategy(), factory, train_ds)
    keras.utils.set_random_seed(0)
    expected = alike()
    expected.build((BATCH_SIZE, 28, 28, 1))
    assert_close(model.get_weights(), plain(expected, digits, microbatches).get_weights())
