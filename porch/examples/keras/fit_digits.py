"""A Keras model on the device: validation, checkpoints, and a picture of its gradients.

`compile` and `fit` are Keras' own, with three more arguments. Started again with the same folder, a
script that was killed goes on.
"""

import argparse
import pathlib
import tempfile

import tailrace as tr


def main(epochs=5, folder=None):
    import tailrace.keras as tk  # before keras: it chooses the backend

    import keras  # isort: skip

    folder = pathlib.Path(folder or tempfile.mkdtemp())
    parts = [tr.data.digits(split, dtype="float32") for split in ("train", "test")]
    (x, y), test = ((images[..., None], labels) for images, labels in parts)
    keras.utils.set_random_seed(0)
    with tk.Strategy().scope():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(8, 3, strides=2, activation="relu", name="conv0"),
                keras.layers.Conv2D(16, 3, strides=2, activation="relu", name="conv1"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, name="head"),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=20,
            observe=[tr.Tap("grad/*", mode=tr.every(10))],
            run_dir=folder / "run",
        )
        history = model.fit(
            x,
            y,
            batch_size=50,
            epochs=epochs,
            validation_data=test,
            checkpoint=folder / "checkpoints",
            verbose=0,
        )
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    print(f"test accuracy {history.history['val_accuracy'][-1]:.3f}; see {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", help="where run, checkpoints and picture go")
    main(**vars(parser.parse_args()))
