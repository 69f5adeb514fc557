"""The instructions of compiled programs, and when they ran.

In: the text of a compiled program, and the events of JAX's profiler.
Out: instructions with scopes, costs and live ranges; operations with times; ticks of pipelines.
Rule: everything is read from those two sources; `op_names` alone interprets JAX's names.
"""
