"""Tapes that capture gradients of activations."""

from tailrace.compat.ipu.graph.capture import GradientCaptureContext as GradientCaptureContext
from tailrace.compat.ipu.graph.capture import GradientCaptureTape as GradientCaptureTape
from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__)
