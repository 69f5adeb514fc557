"""`ipu_tensorflow_addons.keras.layers` on Keras itself."""

from __future__ import annotations

from typing import Any

from keras.layers import GRU as GRU
from keras.layers import LSTM as LSTM
from keras.layers import Embedding as Embedding
from keras.layers import Layer

PopnnLSTM, PopnnGRU = LSTM, GRU


class RecomputationCheckpoint(Layer):
    """What it is given."""

    def call(self, inputs: Any) -> Any:
        """The same values."""
        return inputs
