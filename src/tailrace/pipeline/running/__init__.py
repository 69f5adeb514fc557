"""Running a pipelined step as one device program.

In: an `Assembly`, the state as a tree, and blocks of elements.
Out: the state after them, and the values for taps and outfeeds.

    emit_step, emit_ticks, in_place      one program for all devices: before, ticks, after
    value_lookup                         the value of a variable, while that program is emitted
    pipeline_executable                  that program, as an `Executable` compiles it
    pipeline_runner, stage_layout        a `LoopRunner` with one layout over all stages
    stage_buffers, buffer_writes         puts state into the devices' buffers and takes it out
    leaf_digests                         fingerprints of state, each device's by itself
    forward_step, forward_only           evaluation and prediction: forwards alone
    report                               what each stage costs, measured

`program.running` dispatches; everything specific to pipelines is in a `StageLayout`.
Rules: devices exchange values between ticks and between phases only. A device writes its own buffers
and nothing else. Order is the plan's: nothing here decides what runs when.
"""
