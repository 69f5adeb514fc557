"""Batches of Keras' data adapters, on their way to the device."""
