"""Tapes of the original, by the module they were in."""

from tailrace.compat.ipu.eager import backprop as backprop
