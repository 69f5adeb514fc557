"""What taps deliver, on the host: records, histograms, printed tensors, and where they are sent.

In: emissions of an execution, and which taps chose them (`records.take_records`).
Out: `Records` and `History` for users; a `Finished` execution for a sink.
Rule: this room knows no files: `sinks` is the interface that `runs` implements. Here values come
to the host; before, they are on the device.
"""
