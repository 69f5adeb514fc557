"""Gradients and activations of a Keras model, shown at the end of every epoch.

By default a three-layer model, pipelined over two devices. Filters are parts of names; `none` chooses
everything.
"""

import argparse

import tailrace as tr

BATCH_SIZE, MICROBATCHES = 32, 4


def create_dataset():
    import tensorflow as tf

    images, labels = tr.data.digits("train")
    data = tf.data.Dataset.from_tensor_slices((images[..., None] / 255.0, labels))
    data = data.shuffle(len(images), seed=0).batch(BATCH_SIZE, drop_remainder=True).repeat()
    return data.map(lambda d, label: (tf.cast(d, tf.float32), tf.cast(label, tf.float32)))


def create_layers(keras, tk, queue):
    """(layer, its stage) for each layer."""
    return [
        (keras.layers.Flatten(), 0),
        (keras.layers.Dense(256, activation="relu", name="Dense_256"), 0),
        (keras.layers.Dense(128, activation="relu", name="Dense_128"), 1),
        (tk.MaybeOutfeed(queue, final_outfeed=False, name="Dense_128_acts"), 1),
        (keras.layers.Dense(10, activation="softmax", name="Dense_10"), 1),
        (tk.MaybeOutfeed(queue, final_outfeed=True, name="Dense_10_acts"), 1),
    ]


def create_model(keras, tk, queue, model_type, pipelining):
    layers = create_layers(keras, tk, queue)
    if model_type == "Sequential":
        model = keras.Sequential([layer for layer, _ in layers])
        if pipelining:
            model.set_pipeline_stage_assignment([stage for _, stage in layers])
        return model
    inputs = x = keras.Input((28, 28, 1), batch_size=BATCH_SIZE)
    for layer, stage in layers:
        if not pipelining:
            x = layer(x)
            continue
        with tk.PipelineStage(stage):
            x = layer(x)
    return keras.Model(inputs, x)


def main(
    model_type="Sequential",
    no_pipelining=False,
    outfeed_pre_accumulated_gradients=False,
    use_gradient_accumulation=False,
    steps_per_epoch=500,
    epochs=3,
    gradients_filters=("Dense_128",),
    activations_filters=("none",),
    verbose="auto",
):
    import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
    import keras

    gradients = tk.MaybeOutfeedQueue(filters=list(gradients_filters))
    activations = tk.MaybeOutfeedQueue(filters=list(activations_filters))
    after_compute = tk.OutfeedOptimizerMode.AFTER_COMPUTE
    before_apply = tk.OutfeedOptimizerMode.BEFORE_APPLY

    with tk.Strategy().scope():
        model = create_model(keras, tk, activations, model_type, not no_pipelining)
        if not no_pipelining:
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=MICROBATCHES)
        elif use_gradient_accumulation:
            model.set_gradient_accumulation_options(MICROBATCHES)
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(),
            optimizer=tk.OutfeedOptimizer(
                wrapped_optimizer=keras.optimizers.SGD(),
                outfeed_queue=gradients,
                outfeed_optimizer_mode=(
                    after_compute if outfeed_pre_accumulated_gradients else before_apply
                ),
                model=model,
            ),
            steps_per_execution=steps_per_epoch,
        )
        callbacks = [
            tk.OutfeedCallback(gradients, name="Gradients callback"),
            tk.OutfeedCallback(activations, name="Multi-layer activations callback"),
        ]
        data = create_dataset()
        return model.fit(
            data,
            callbacks=callbacks,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            shuffle=False,
            verbose=verbose,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-type", choices=["Model", "Sequential"], default="Sequential")
    parser.add_argument("--no-pipelining", action="store_true")
    parser.add_argument("--use-gradient-accumulation", action="store_true")
    parser.add_argument("--outfeed-pre-accumulated-gradients", action="store_true")
    parser.add_argument("--steps-per-epoch", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gradients-filters", nargs="+", default=["Dense_128"])
    parser.add_argument("--activations-filters", nargs="+", default=["none"])
    arguments = vars(parser.parse_args())
    tr.configure(devices=1 if arguments["no_pipelining"] else 2)
    main(**arguments)
