"""Running a pipelined step as one device program.

In: an `Assembly`, the state as a tree, and blocks of elements.
Out: one program for all devices (`emit_step`, `emit_ticks`), compiled and run by
`pipeline_executable` and `pipeline_runner`, which are used as those of `program.running` are.
Rule: devices exchange values between ticks and between phases only. `forward_only` is for
evaluation and prediction; `report` measures.
"""
