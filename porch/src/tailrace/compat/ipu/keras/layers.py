"""Layers of the original that Keras has itself."""

from __future__ import annotations

from tailrace.compat.originals.missing import missing_from

_OURS = {
    "Dropout": "Dropout",
    "Embedding": "Embedding",
    "GRU": "GRU",
    "LSTM": "LSTM",
    "LayerNorm": "LayerNormalization",
    "LayerNormalization": "LayerNormalization",
    "PopnnGRU": "GRU",
    "PopnnLSTM": "LSTM",
}
"""The name there, and the one in `keras.layers`."""

__getattr__, __dir__ = missing_from(
    __name__, {name: f"keras:layers.{ours}" for name, ours in _OURS.items()}
)
