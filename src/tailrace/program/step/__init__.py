"""One optimizer update: gradients, accumulation, reduction over replicas.

In: a loss function, an optimizer, and options for accumulation, loss scale and precision.
Out: a `Step`, whose `loop` is the body of a training program, and `TrainState`, which it carries.
Rule: pure functions of arrays; placement is decided elsewhere. There are two kinds of `Step`:
`PlainStep`, and `PipelineStep` in `pipeline/lowering`, the same step in stages, which must compute the
same numbers.
"""
