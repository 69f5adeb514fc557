"""Capturing gradients of activations."""

from tailrace.compat.ipu.graph.capture import (
    capture_upstream_gradients as capture_upstream_gradients,
)
from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__)
