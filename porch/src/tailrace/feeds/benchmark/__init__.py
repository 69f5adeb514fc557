"""How fast a dataset delivers, and whether the data or the device is the bottleneck.

In: a dataset, and optionally how long a step takes.
Out: elements and bytes per second (`measure`), a table, and one sentence of judgement (`verdict`).
Rule: nothing runs on a device. Used by `tr.dataset_benchmark`, the command line and `compat`.
"""
