"""Tapes of the original, by the module they were in.

In: values of a program. Out: their gradients, and captured gradients.
Rule: only names; the tapes are in `graph`.
"""

from tailrace.compat.ipu.eager import backprop as backprop
from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__)
