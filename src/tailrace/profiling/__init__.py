"""Where the time of a run goes: a timeline, and a profile of its programs by scope.

In: spans and executions (`spans`), compiled programs, and the events of JAX's profiler.
Out: a Perfetto file (`timeline`, `tr.trace`) and a `Profile` (`profile`, `trainer.profile`).

    programs   the instructions of compiled programs, their costs and memory, and when they ran
    profile    time, FLOPs, bytes and memory by scope; bubbles of pipelines
    timeline   writing a trace

Rule: it only reads programs and events; apart from a short measurement of the roofline it runs nothing.
"""
