"""How fast an infeed delivers a dataset, and whether the data or the device is the bottleneck.

In: a dataset, and optionally how long a step takes.
Out: elements and bytes per second (`measure`), a table of them (`table`), and one sentence of judgement
(`verdict`).
Rule: it drives the infeed of training and has no reader of its own; no program runs. Used by
`tr.dataset_benchmark`, the command line and `compat`; nothing in `feeds` depends on it.
"""
