"""From a model and a plan to work for each device.

In: the traced forward of a model with boundaries, and a plan.
Out: `PipelineStep`, the plain step; and an `Assembly`: which device does what, and where values are
kept.

    cut                                        a traced model in pieces, at its boundaries
    forward_backward, stage                    each piece as a `Stage`: data, made once
    residuals, loop_residuals, minimum_cut     what a forward keeps for its backward
    staged_model, pipeline_step                the plain interpreter of stages: the oracle
    jobs                                       the same calls by unit, for the executor
    update_partition                           equations outside the loop over microbatches, by device
    device_layout, buffers, stash_layout       who holds what, in buffers of one shape

Rules: nothing is emitted for devices here, `pipeline.running` does that. After `forward_backward` no
pass looks into the equations of a stage. In the loop over microbatches every equation names its unit
(`stage.in_unit`) or is free: it depends on the element, the counters and constants alone.
"""
