"""Placement of optimizer state and activations: on the device, sharded, or offloaded to the host.

In: the shapes of parameters and optimizer state, and the user's options.
Out: `StateKeeping` (where each leaf is held, and the update from there), `HeldActivations`.
Rule: results are those of the plain step. `trainer/costs/memory_plan.py` decides; this package runs.
"""
