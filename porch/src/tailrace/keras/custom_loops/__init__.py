"""Loops that users write by hand, and the state they reach.

In: a user's function and the models, optimizers and metrics it reaches.
Out: one device program, made by `tr.compile`; variables are written back after it ran.
Rule: what a function reaches is found in `reachable_state` alone.
"""
