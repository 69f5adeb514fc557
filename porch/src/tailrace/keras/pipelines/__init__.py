"""Keras models in stages.

In: a model and which layer call belongs to which stage.
Out: its forward pass stage by stage, for `tr.Pipeline` (`staged_forward`).
Rule: `assignment_classes` checks what users wrote; `graph` orders layer calls and runs them.
"""
