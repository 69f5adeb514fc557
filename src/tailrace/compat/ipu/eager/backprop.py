"""Tapes that capture gradients of activations."""

from tailrace.compat.ipu.capturing import GradientCaptureContext as GradientCaptureContext
from tailrace.compat.ipu.capturing import GradientCaptureTape as GradientCaptureTape
