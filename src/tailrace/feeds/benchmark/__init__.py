"""The speed of a dataset, and whether the data or the device is the bottleneck.

In: a dataset, and optionally the time of a step.
Out: elements and bytes per second (`measure`), a table, and a one-sentence `verdict`.
Rule: nothing runs on a device. Used by `tr.dataset_benchmark`, the command line and `compat`.
"""
