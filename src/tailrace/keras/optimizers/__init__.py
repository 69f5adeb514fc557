"""Keras optimizers as update rules, and their wrappers."""
