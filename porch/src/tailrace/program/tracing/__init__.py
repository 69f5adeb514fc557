"""From a Python function to a traced program that is checked and ready to run.

In: a function, the forms of its arguments, and taps.
Out: `Traced` (jaxpr, feeds, outfeeds), and a `Sight`: the catalogue and what taps choose.
Rule: every program is traced by `trace.trace_program`. What can be refused by reading the whole
program is refused here, before anything is compiled.
"""
