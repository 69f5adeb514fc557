"""From stages and a plan to work for each device.

In: the traced forward of a model with boundaries, and a plan.
Out: `PipelineStep`, the plain step whose units are single equations; and an `Assembly`, which says
which device does what and where values are kept.

    cut, forward_backward, pipeline_step   pieces, their halves, the step made of them
    residuals, loop_residuals, minimum_cut what the halves hand on, and what is computed again
    jobs, update_partition                 equations of units, and those of the rest by device
    device_layout, buffers, stash_layout   who holds what, in buffers of one shape

Rule: nothing is emitted here. `pipeline.running` emits what the assembly says.
"""
