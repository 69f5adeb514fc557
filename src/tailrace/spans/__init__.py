"""Spans and counters: recorded while a trace is open, and nearly free otherwise.

In: `span(...)` and `counter(...)` calls from any package. Out: the lists of an open `Recorder`.
Rule: any package may open a span; nothing here knows what is done with it (`profiling` does).
"""
