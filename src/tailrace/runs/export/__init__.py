"""Runs as TensorBoard events and pictures."""
