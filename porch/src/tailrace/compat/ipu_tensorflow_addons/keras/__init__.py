"""Layers for Keras models."""

from tailrace.compat.ipu_tensorflow_addons.keras import layers as layers
