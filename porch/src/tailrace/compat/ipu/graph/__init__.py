"""Variables, gradients and updates of TensorFlow-style programs.

In: functions that read and write variables as a side effect.
Out: functions of arrays, and values to write back (`state`).
Rule: all of `compat.ipu` reads and writes variables through `state`; inside a program a `Scope`
holds the values.
"""
