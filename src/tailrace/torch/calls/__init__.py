"""One call of a model: its inputs, its feed, its outputs.

In: the arguments of one call of a model. Out: blocks of elements; tensors for its outputs.
Rule: the first call fixes the shapes (`inputs`). `options` are checked when they are given.
"""
