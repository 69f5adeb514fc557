"""From a Python function to a traced program that is checked and ready to compile.

In: a function, the forms of its arguments, and taps.
Out: `Traced` (jaxpr, feeds, outfeeds), and a `Sight`: the catalogue and the tensors that taps select.

    trace            traces a function, and checks feeds, keys and what JAX has dropped
    replica_drift    which values differ between replicas: refused where they must not
    tap_selection    the catalogue of a traced program, and taps applied to it

Rules: every program is traced by `trace.trace_program`. Errors that can be found by reading the whole
program are raised here, before anything is compiled. Nothing here changes a program: `taps` does.
"""
