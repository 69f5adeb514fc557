"""Functional and Sequential models on one device, then cut into two stages on two devices."""

import argparse

import tailrace as tr

BATCH_SIZE, LEARNING_RATE, MOMENTUM = 32, 0.01, 0.9
STEPS_PER_REPLICA = 4


def create_dataset(batch_size=BATCH_SIZE):
    import tensorflow as tf

    images, labels = tr.data.digits("train")
    data = tf.data.Dataset.from_tensor_slices((images[..., None] / 255.0, labels))
    data = data.shuffle(10_000, seed=0).batch(batch_size, drop_remainder=True).repeat()
    return data.map(lambda d, label: (tf.cast(d, tf.float32), tf.cast(label, tf.float32)))


def create_functional_model(keras, tk, stages=False):
    layers = keras.layers
    x = inputs = keras.Input(shape=(28, 28, 1), batch_size=BATCH_SIZE)
    first = [layers.Flatten(name="flatten")]
    first += [layers.Dense(n, activation="relu", name=f"dense{n}") for n in (256, 128, 64)]
    second = [layers.Dense(32, activation="relu", name="dense32"), layers.Dense(10, name="logits")]
    if not stages:
        for layer in (*first, *second):
            x = layer(x)
        return keras.Model(inputs, x, name="singleDevice")
    with tk.PipelineStage(0):
        for layer in first:
            x = layer(x)
    with tk.PipelineStage(1):
        for layer in second:
            x = layer(x)
    return keras.Model(inputs, x, name="twoDevices")


def create_sequential_model(keras, tk, stages=False, schedule=None):
    layers = [keras.layers.Flatten(name="flatten")]
    for n in (256, 128, 64, 32):
        layers.append(keras.layers.Dense(n, activation="relu", name=f"dense{n}"))
    model = keras.Sequential([*layers, keras.layers.Dense(10, name="logits")])
    if stages:
        model.set_pipeline_stage_assignment([0, 0, 1, 1, 1, 1])
    if schedule is not None:
        model.set_pipelining_options(schedule=schedule)
    return model


def train(create_model, data, execution, epochs, **options):
    import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
    import keras

    with tk.Strategy().scope():
        model = create_model(keras, tk, **options)
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM),
            steps_per_execution=execution,
        )
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=STEPS_PER_REPLICA)
        history = model.fit(
            data, steps_per_epoch=execution, epochs=epochs, shuffle=False, verbose=0
        )
    losses = " ".join(f"{loss:.3f}" for loss in history.history["loss"])
    name = create_model.__name__.removeprefix("create_")
    print(f"{name} {options or ''}: losses {losses}")
    return history


def main(steps_per_execution=500, epochs=4):
    found = []
    for create_model, options in (
        (create_functional_model, {}),
        (create_sequential_model, {}),
        (create_functional_model, {"stages": True}),
        (create_sequential_model, {"stages": True}),
        (create_sequential_model, {"stages": True, "schedule": "interleaved"}),
    ):
        found.append(train(create_model, create_dataset(), steps_per_execution, epochs, **options))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps-per-execution", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=4)
    tr.configure(devices=2)
    main(**vars(parser.parse_args()))
