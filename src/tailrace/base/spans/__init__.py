"""Spans and counters: recorded while a trace is open, and nearly free otherwise.

In: `span(...)` and `counter(...)` calls from any package, and the dispatches of executions.
Out: the lists of an open `Recorder`: intervals of threads, values of counters, executions.

    span         what code calls to report what it does
    recorder     what an open trace keeps of it
    scopes       the names of our own operations in programs, by which profiles find them

Rules: any package may open a span; nothing here knows what is done with it (`profiling` does). Only
`Recorder.open` and `close` change which recorders there are. Nothing here imports JAX.
"""
