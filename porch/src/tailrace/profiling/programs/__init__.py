"""What compiled programs consist of, and which of their operations ran when.

Rule: everything is read from the text of a compiled program and from the events of JAX's profiler.
"""
