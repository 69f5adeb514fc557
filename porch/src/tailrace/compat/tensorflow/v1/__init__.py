"""TensorFlow 1: graphs that a session runs.

In: placeholders, and operations that are described before they run. Out: what `Session.run` returns.
Rule: what is described and not yet run is a `Deferred`; a session computes it.
"""
