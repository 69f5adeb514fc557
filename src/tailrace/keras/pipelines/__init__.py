"""Keras models in stages."""
