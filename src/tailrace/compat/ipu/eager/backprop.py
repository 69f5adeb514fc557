"""Tapes that capture gradients of activations."""

from tailrace.compat.ipu.graph.capture import GradientCaptureContext as GradientCaptureContext
from tailrace.compat.ipu.graph.capture import GradientCaptureTape as GradientCaptureTape
