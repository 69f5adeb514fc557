"""Keras' train, test and predict functions as device programs.

In: an adopted model, blocks of batches, and the pacing of one call.
Out: logs for Keras' callbacks, and variables written back to the model (`variables`).
Rule: `train` drives an `Engine`; `steps` drives a `LoopRunner` for evaluation, prediction and
overridden train steps. What both share is in `executions`.
"""
