"""Keras' train, test and predict functions as device programs."""
