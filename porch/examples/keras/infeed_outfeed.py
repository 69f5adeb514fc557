"""A training loop written by hand: many steps in one execution, fed by an infeed.

The dataset, iterated in the scope of a strategy, is an infeed; the losses come out of an outfeed.
"""

import argparse
import time

import tailrace as tr

import tailrace.keras as tk  # isort: skip  (before keras: it chooses the backend)
import keras


def create_dataset():
    import tensorflow as tf

    images, labels = tr.data.digits("train")
    data = tf.data.Dataset.from_tensor_slices((images / 255.0, labels)).cache()
    data = data.shuffle(len(images), seed=0).batch(32, drop_remainder=True)
    data = data.map(lambda d, label: (tf.cast(d, tf.float32), tf.cast(label, tf.int32)))
    return data.prefetch(tf.data.AUTOTUNE).repeat()


def create_model():
    return keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def training_loop(iterator, outfeed_queue, model, optimizer, num_iterations):
    def step():
        # Get the data for the step.
        features, labels = next(iterator)

        # Perform the training step.
        def loss_of_the_batch():
            predictions = model(features, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, predictions)
            return keras.ops.mean(losses)

        loss, grads = tk.value_and_grad(loss_of_the_batch, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        # Store the loss in the outfeed queue.
        outfeed_queue.enqueue(loss)

    tk.repeat(num_iterations, step)


def main(step_count=10_000, steps_per_execution=10):
    strategy = tk.Strategy()
    data = create_dataset()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.01)
        model = create_model()
        iterator = tk.DatasetIterator(data)
        outfeed_queue = tr.OutfeedQueue()
        started = time.time()
        for _ in range(0, step_count, steps_per_execution):
            strategy.run(
                training_loop,
                args=[iterator, outfeed_queue, model, optimizer, steps_per_execution],
            )
        result = outfeed_queue.dequeue()
        print("Time taken using infeed/outfeed queues:", time.time() - started, "seconds")
    iterator.close()
    print(f"{len(result)} losses, from {result[0]:.3f} to {result[-1]:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-count", type=int, default=10_000)
    parser.add_argument("--steps-per-execution", type=int, default=10)
    main(**vars(parser.parse_args()))
