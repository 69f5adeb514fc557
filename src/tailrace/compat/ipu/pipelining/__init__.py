"""`pipelining_ops.pipeline` on the pipeline engine.

In: the arguments of `pipelining_ops.pipeline`, checked by `pipeline_options`.
Out: a training pipeline that drives an `Engine`, or a forward pipeline on its runner.
Rule: `pipelines` decides which of them it is, and whether stages get separate devices.
"""
