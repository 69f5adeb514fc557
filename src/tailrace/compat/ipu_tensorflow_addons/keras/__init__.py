"""Layers for Keras models, by the module they were in."""

from tailrace.compat.ipu_tensorflow_addons.keras import layers as layers
