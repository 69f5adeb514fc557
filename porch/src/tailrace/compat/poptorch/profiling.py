"""`poptorch.profiling`: tracepoints of a tool that is not here."""

from tailrace.compat.originals.missing import missing_from
from tailrace.compat.poptorch.ops import Channel as Channel

__getattr__, __dir__ = missing_from(__name__)
