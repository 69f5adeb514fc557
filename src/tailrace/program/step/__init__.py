"""One optimizer update: gradients, accumulation, reduction over replicas.

In: a loss function, an optimizer, and options for accumulation, loss scale and precision.
Out: `Step`, whose `loop` is the body of a training program, and `TrainState`, which it carries.
Rule: pure functions of arrays; placement is decided elsewhere. `PipelineStep` in `pipeline/lowering` is
the same step in stages and must compute the same numbers.
"""
