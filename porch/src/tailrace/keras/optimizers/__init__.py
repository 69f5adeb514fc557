"""Keras optimizers as update rules, and their wrappers.

In: a Keras optimizer, maybe in wrappers. Out: `init` and `apply`, as the engine calls them.
Rule: how the engine calls an optimizer is in `adapter`; what wrappers do to gradients is in
`wrapper` and `wrappers`.
"""
