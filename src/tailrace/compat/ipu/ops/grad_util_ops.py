"""Capturing gradients of activations."""

from tailrace.compat.ipu.capturing import (
    capture_upstream_gradients as capture_upstream_gradients,
)
