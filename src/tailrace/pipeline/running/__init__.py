"""Running a pipelined step as one device program.

In: an `Assembly`, the state as a tree, and blocks of elements.
Out: the state after them, and what taps and outfeeds ask for.

    emit_step, emit_ticks, in_place      one program for all devices: before, ticks, after
    value_lookup                         the value of a variable, while that program is emitted
    pipeline_executable                  compiles it and dispatches it
    pipeline_runner, buffer_writes       puts state into the devices' buffers and takes it out
    leaf_digests                         fingerprints of state, each device's by itself
    forward_step, forward_only           evaluation and prediction: forwards alone
    report                               what each stage costs, measured

`pipeline_runner` and `pipeline_executable` are used as those of `program.running` are.
Rules: devices exchange values between ticks and between phases only. A device writes its own buffers
and nothing else. Order is the plan's: nothing here decides what runs when.
"""
