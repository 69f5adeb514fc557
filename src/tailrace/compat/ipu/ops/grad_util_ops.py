"""Capturing gradients of activations."""

from tailrace.compat.ipu.graph.capture import (
    capture_upstream_gradients as capture_upstream_gradients,
)
