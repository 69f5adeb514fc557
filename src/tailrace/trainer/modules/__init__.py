"""Modules of other libraries as parameters: Flax NNX, Flax Linen, Equinox.

In: a module, and functions that take it. Out: a `Binding`: trees of arrays, and functions of those.
Rule: the engine sees only trees of arrays; undocumented behaviour of a library is in its `*_seams`
file.
"""
