"""`pipelining_ops.pipeline` on the pipeline engine."""
