"""Where optimizer state and activations are kept: device, shards, host memory.

In: the forms of parameters and optimizer state, and what the user wants kept elsewhere.
Out: `StateKeeping` (how each leaf is held, and the update from that), `HeldActivations`.
Rule: the numbers are those of the plain step. `trainer/memory_plan.py` decides; this room does it.
"""
