"""Keras' own distribution, which a program on our devices does not have."""

from __future__ import annotations

import keras

from tailrace.errors import OptionError


def check_not_distributed(model: keras.Model) -> None:
    """Refuse `keras.distribution`: its devices and layouts would be left without a word."""
    found = keras.distribution.distribution()
    if found is not None:
        raise OptionError(
            f"keras.distribution is not used by models that train on the engine: the program has "
            f"devices of its own. Received: {type(found).__name__} with the model {model.name!r}. For "
            f"data-parallel copies, use tk.Strategy(replicas=...); or keras.distribution."
            f"set_distribution(None), or plain Keras without tk.Strategy and tk.adopt."
        )
