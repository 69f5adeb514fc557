"""Results of taps on the host: records, histograms, printed tensors, and the interface of sinks.

In: the emissions of an execution, and the taps they belong to (`records.take_records`).
Out: `Records` and `History` for users; a `Finished` execution for a sink.
Rule: nothing here writes files: `sinks` is the interface that `runs` implements. Values are copied to
the host here; before, they are on the device.
"""
