"""`poptorch.profiling`: tracepoints of a tool that is not here."""

from tailrace.compat.poptorch.ops import Channel as Channel
